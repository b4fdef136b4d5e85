"""Masks that our attention takes from Transformers' models. Imports torch and Transformers.

A mask that follows a pattern is encoded in few elements:

- None: all keys, or the causal ones where the layer is causal; the last query meets the last key.
- [batch, left + 2, keys], of stride 0 along its second axis: padding, by key. The extent of that
  axis is a window's: keys up to ``left`` before the query are seen (on both sides in an encoder); 1
  is no window. Of bool: True where a key is no padding. Of int8: 1 where a key is seen, 0 where it
  is padding, −1 where a cache of fixed length holds none yet. Of int32: the number of the packed
  sequence that a row belongs to.
- [batch, 1, queries, keys] of bool: any other pattern, as Transformers makes it for SDPA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from kernelseam.errors import InvalidValue

Tensor = Any


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    device: Any = "cpu",
    **options: Any,
) -> Tensor | None:
    """What ``transformers.masking_utils.sdpa_mask`` says, in as few elements as it takes.

    Queries are at ``q_offset`` + i, an int or, with a cache of fixed length, a tensor; keys at
    ``kv_offset`` + j. ``attention_mask`` is [batch, positions], False where one is padding, or what
    this function made before, which is returned.

    Raises InvalidValue for a model whose attention is its own code: Transformers takes any name
    where such a model is made, and the model would misread the mask.
    """
    if config is not None:
        _refuse_own_attention(config)
    if attention_mask is not None and attention_mask.dim() != 2:
        return attention_mask
    lengths = {"q_length": q_length, "kv_length": kv_length, "kv_offset": kv_offset}
    window = _window(mask_function, local_size, allow_is_bidirectional_skip, config)
    pure = allow_is_causal_skip or allow_is_bidirectional_skip
    if pure and window is not None:
        extent = window if local_size is not None and kv_length > window - 1 else 1
        padding = _padding(attention_mask, kv_length, kv_offset)
        if allow_is_bidirectional_skip:
            return _folded(padding, None, batch_size, kv_length, extent, device)
        end = q_offset + q_length - kv_offset
        if isinstance(end, torch.Tensor) or 0 < end <= kv_length:
            behind = None if not isinstance(end, torch.Tensor) and end == kv_length else end
            return _folded(padding, behind, batch_size, kv_length, extent, device)
    elif (packed := _packed(mask_function, local_size)) is not None:
        sequences, window = packed
        return sequences.to(torch.int32)[:, None].expand(-1, window, -1)
    return sdpa_mask(
        batch_size,
        q_offset=q_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        device=device,
        **lengths,
        **options,
    )


def _refuse_own_attention(config: Any) -> None:
    text = getattr(config, "get_text_config", None)
    if text is not None and text() is not config:
        return  # the parts have their own
    home = type(config).__module__
    if not _asks_for_attentions(home.replace(".configuration_", ".modeling_"), home):
        raise InvalidValue(
            "attn_implementation",
            "kernelseam",
            f"{type(config).__name__}'s model has an attention of its own in Transformers",
            "Leave it out",
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _asks_for_attentions(module: str, of_config: str) -> bool:
    """Whether a model's module has the table of attentions; one that is not found may."""
    loaded = None if module == of_config else sys.modules.get(module)
    return loaded is None or hasattr(loaded, "ALL_ATTENTION_FUNCTIONS")


def _window(
    mask_function: Any, local_size: int | None, bidirectional: bool, config: Any
) -> int | None:
    """The extent that stands for the window of a pattern, given that it has no addition; None where
    it is no window."""
    if local_size is None:
        known = bidirectional_mask_function if bidirectional else causal_mask_function
        return 1 if mask_function is known else None
    if getattr(config, "attention_chunk_size", None) is not None:
        return None  # local_size is the size of chunks, or may be
    # a causal window counts the query's own key, a bidirectional one does not
    return local_size + (2 if bidirectional else 1)


def _padding(mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """The padding of the keys at hand; None where there is none. As elsewhere in Transformers, a
    compiled caller does not look."""
    if mask is None:
        return None
    beyond = kv_offset + kv_length - mask.shape[-1]
    if beyond > 0:
        mask = torch.nn.functional.pad(mask, (0, beyond))
    mask = mask[:, kv_offset : kv_offset + kv_length]
    if beyond <= 0 and not _traced() and bool(mask.all()):
        return None
    return mask


def _folded(
    padding: Tensor | None, end: Any, batch: int, keys: int, extent: int, device: Any
) -> Tensor | None:
    """``padding`` with the number of keys that there are, if there may be less than ``keys``."""
    if end is None:
        if padding is None:
            if extent == 1:
                return None
            padding = torch.ones((batch, keys), dtype=torch.bool, device=device)
    else:
        there = torch.arange(keys, device=device) < end
        seen = there if padding is None else there & padding
        padding = (seen.to(torch.int8) - (~there).to(torch.int8)).expand(batch, keys)
    return padding[:, None].expand(-1, extent, -1)


def _packed(mask_function: Any, local_size: int | None) -> tuple[Tensor, int] | None:
    """The sequences [batch, rows] that Transformers found in position_ids, and the extent of their
    window. It hands them over inside of its mask function alone; None where that holds anything
    else, or the caller is compiled."""
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
        return sequences, 1
    match _parts(inner, "and_masks"):
        case {"mask_functions": (overlay, causal)} if causal is causal_mask_function:
            window = _parts(overlay, "sliding_window_overlay").get("sliding_window")
            return None if window is None or window != local_size else (sequences, window + 1)
    return None


def _parts(function: Any, maker: str) -> dict[str, Any]:
    """What a function holds that ``maker`` made; empty for others."""
    if not getattr(function, "__qualname__", "").startswith(f"{maker}.<locals>."):
        return {}
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (x.cell_contents for x in cells), strict=True))


def _traced() -> bool:
    return bool(torch.compiler.is_compiling() or torch.jit.is_tracing())
