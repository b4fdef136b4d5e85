"""Masks that our attention takes from Transformers' models. Imports torch and Transformers.

- None, as for eager attention: nothing is hidden.
- [batch, 1, 1, keys] of bool for padding alone, and [batch, extent, 1, 1, keys] for causality,
  windows, padding beside them and packed rows: ``transformers_pattern``.
- [batch, 1, queries, keys] of bool for any other pattern, as Transformers makes it for SDPA.
- The same of floats, as Transformers makes it for eager attention, for a model that supports
  neither SDPA nor FlashAttention: what such a model does with its mask is written for that one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, masking_utils
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from kernelseam.errors import InvalidValue
from kernelseam.interop.transformers_pattern import Pattern, encoded

Tensor = Any


def attention_mask(
    *,
    batch_size: int,
    kv_length: int,
    q_length: int = 0,
    q_offset: Any = 0,
    cache_position: Tensor | None = None,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    device: Any = None,
    **options: Any,
) -> Tensor | None:
    """The mask of ``transformers.masking_utils.sdpa_mask`` in as few elements as possible.

    Queries are at ``q_offset`` + i, an int or, with a cache of fixed length, a tensor (or, in an
    older Transformers, at ``cache_position``); keys at ``kv_offset`` + j. ``attention_mask`` is
    [batch, positions], False at padding, or an earlier result of this function, which is returned.

    None where nothing is masked, as for a single query without padding.

    Raises InvalidValue for a model with attention code of its own: Transformers accepts any name
    when such a model is made, and the model would misread the mask.
    """
    support = _Support() if config is None else supported(config)
    if attention_mask is not None and attention_mask.dim() != 2:
        return attention_mask
    if cache_position is None:
        where = {"q_length": q_length, "q_offset": q_offset, "device": device}
    else:
        where, device = {"cache_position": cache_position}, cache_position.device
        q_length = cache_position.shape[0]
    dense = {
        "batch_size": batch_size,
        "kv_length": kv_length,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "local_size": local_size,
        **where,
        **options,
    }
    if not (support.sdpa or support.flash):
        skip = allow_is_bidirectional_skip
        return eager_mask(**dense, allow_is_bidirectional_skip=skip)
    if allow_is_bidirectional_skip:
        known, left = _window(mask_function, local_size, True, config)
        if known and (left is None or q_length == kv_length):
            padding = _padding(attention_mask, kv_length, kv_offset)
            pattern = Pattern(padding, False, _hiding(left, kv_length))
            if padding is None and pattern.left is None:
                return None
            return encoded(pattern, batch_size, kv_length, device)
    elif allow_is_causal_skip:
        known, left = _window(mask_function, local_size, False, config)
        if cache_position is not None:
            q_offset = cache_position[0] if _traced() else int(cache_position[0])
        end = q_offset + q_length - kv_offset
        fixed = isinstance(end, torch.Tensor)
        if known and (fixed or 0 < end <= kv_length):
            keys = _padding(attention_mask, kv_length, kv_offset)
            if fixed or end != kv_length:
                keys = _held(keys, end, batch_size, kv_length, device)
            pattern = Pattern(keys, True, _hiding(left, kv_length))
            if keys is None and pattern.left is None and q_length == 1:
                return None  # the last query sees every key
            return encoded(pattern, batch_size, kv_length, device)
    elif support.flash and (packed := _packed(mask_function, local_size)) is not None:
        sequences, left = packed
        pattern = Pattern(sequences.to(torch.int32), True, left)
        return encoded(pattern, batch_size, kv_length, device)
    return sdpa_mask(**dense, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)


class _Support(NamedTuple):
    """Which of Transformers' attentions a model declares as supported."""

    sdpa: bool = True
    flash: bool = True


def supported(config: Any) -> _Support:
    """The support that a config's model declares. Raises InvalidValue for a model with attention
    code of its own."""
    home = type(config).__module__
    found: _Support | None = _supported(
        home.replace(".configuration_", ".modeling_"), home, type(config).__name__
    )
    if found is None:
        text = getattr(config, "get_text_config", None)
        if text is not None and text() is not config:
            return _Support()  # the parts have their own
        raise InvalidValue(
            "attn_implementation",
            "kernelseam",
            f"{type(config).__name__}'s model has an attention of its own in Transformers",
            "Leave it out",
        )
    return found


def _supported(module: str, of_config: str, config: str) -> _Support | None:
    """As ``_supported_by``; a model whose module is not found counts as supporting both."""
    loaded = None if module == of_config else sys.modules.get(module)
    return _Support() if loaded is None else _supported_by(loaded, config)


# what torch.compiler.assume_constant_result sets: called, it imports Dynamo
_supported._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(64)
def _supported_by(loaded: ModuleType, config: str) -> _Support | None:
    """The support declared by the classes of a model's module that take this kind of config, or by
    all of them. None where neither the module nor one it takes models from has the table of
    attentions. Cached, since every step of a model asks."""
    classes = [x for x in vars(loaded).values() if isinstance(x, type)]
    known: list[Any] = [x for x in classes if issubclass(x, PreTrainedModel)]
    homes = {x.__module__ for x in known} - {PreTrainedModel.__module__}  # DPR's are of BERT's
    if not any(hasattr(sys.modules[x], "ALL_ATTENTION_FUNCTIONS") for x in homes):
        return None
    models = [x for x in known if x.__module__ == loaded.__name__]
    own = [x for x in models if getattr(x.config_class, "__name__", None) == config] or models
    return _Support(any(x._supports_sdpa for x in own), any(x._supports_flash_attn for x in own))


def _window(
    mask_function: Any, local_size: int | None, bidirectional: bool, config: Any
) -> tuple[bool, int | None]:
    """(whether a pattern without additions is the plain one, or that with a window, of its
    direction; how many keys before its own a query then sees)."""
    # without a function of its own, a Transformers does not ask for what sees both sides
    both = getattr(masking_utils, "bidirectional_mask_function", None)
    plain = mask_function is (both if bidirectional else causal_mask_function)
    if plain or local_size is None:  # DiffusionGemma names a size beside a function without one
        return plain, None
    if getattr(config, "attention_chunk_size", None) is not None:
        return False, None  # local_size is the size of chunks, or may be
    # a causal window counts the query's own key, a bidirectional one does not
    return True, local_size - (0 if bidirectional else 1)


def _hiding(left: int | None, keys: int) -> int | None:
    """The window, or None where it masks none of so many keys."""
    return left if left is not None and left + 1 < keys else None


def _padding(mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """The padding of the keys at hand; None where there is none. As elsewhere in Transformers its
    contents are not read in a compiled caller."""
    if mask is None:
        return None
    beyond = kv_offset + kv_length - mask.shape[-1]
    if beyond > 0:
        mask = torch.nn.functional.pad(mask, (0, beyond))
    mask = mask[:, kv_offset : kv_offset + kv_length]
    if beyond <= 0 and not _traced() and bool(mask.all()):
        return None
    return mask


def _held(padding: Tensor | None, end: Any, batch: int, keys: int, device: Any) -> Tensor:
    """[batch, keys] of int8: ``padding``, and 0 for keys that a cache does not hold yet; ``end`` is
    how many it holds."""
    held = torch.arange(keys, device=device) < end
    seen = held if padding is None else held & padding
    return (seen.to(torch.int8) - (~held).to(torch.int8)).expand(batch, keys)


def _packed(mask_function: Any, local_size: int | None) -> tuple[Tensor, int | None] | None:
    """The sequences [batch, rows] that Transformers found in position_ids, and their window. It
    hands them over inside of its mask function alone; None where that holds anything else, or the
    caller is compiled."""
    if _traced():
        return None
    sequences, inner = None, None
    parts = _parts(mask_function, "and_masks").get("mask_functions", ())
    for part in parts if len(parts) == 2 else ():
        held = _parts(part, "packed_sequence_mask_function")
        if held:
            sequences = held.get("packed_sequence_mask")
        else:  # positions within a sequence, or, before 5.23, those of the row
            remapped = _parts(part, "remap_positions_for_packed_sequence")
            inner = remapped.get("mask_function", part)
    if sequences is None:
        return None
    if inner is causal_mask_function:
        return sequences, None
    match _parts(inner, "and_masks"):
        case {"mask_functions": (overlay, causal)} if causal is causal_mask_function:
            window = _parts(overlay, "sliding_window_overlay").get("sliding_window")
            return None if window is None or window != local_size else (sequences, window - 1)
    return None


def _parts(function: Any, maker: str) -> dict[str, Any]:
    """The closure contents of a function that ``maker`` made; empty for others."""
    if not getattr(function, "__qualname__", "").startswith(f"{maker}.<locals>."):
        return {}
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (x.cell_contents for x in cells), strict=True))


def _traced() -> bool:
    return bool(torch.compiler.is_compiling() or torch.jit.is_tracing())
