"""What Transformers' models hand to an attention beside its operands: what is taken is checked, and
what may change a result and is not taken is refused by name. Imports torch."""

from __future__ import annotations

from typing import Any

import torch

from kernelseam.errors import InvalidValue
from kernelseam.interop.transformers_padding import Packed

Tensor = Any

OF_THE_MODEL = frozenset(
    {
        "cache",
        "cache_position",
        "decoder_input_ids",
        "deterministic",
        "input_ids",
        "labels",
        "logits_to_keep",
        "mm_token_type_ids",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_value",
        "past_key_values",
        "position_ids",
        "return_dict",
        "seq_idx",
        "token_type_ids",
        "use_cache",
    }
)
"""Names that a model's own keywords have: they go through all of its layers, and no attention of
Transformers reads them."""


def refuse(dropout: float, options: dict[str, Any]) -> None:
    """Refuse dropout, probabilities, and options that may change the result."""
    if dropout:
        raise InvalidValue(
            "dropout",
            dropout,
            "must be 0",
            "Set the config's dropout of attentions to 0 (attention_dropout, "
            "attention_probs_dropout_prob, dropout_rate), or call model.eval()",
        )
    for name, value in options.items():
        if name in OF_THE_MODEL or value is None or value is False:
            continue
        if name == "output_attentions":
            rule, remedy = "probabilities are not kept", 'Use attn_implementation="eager" for them'
        else:
            rule = "is not an option of this attention, and would be dropped"
            remedy = 'Leave it out, or use attn_implementation="eager"'
        raise InvalidValue(name, value, rule, remedy)


def check_mask(mask: Tensor) -> None:
    """Of four axes: of bool, or added to the scores. Of two: padding, not to be added."""
    if mask.dim() not in (2, 4):
        raise InvalidValue(
            "attention_mask",
            f"a tensor of shape {list(mask.shape)}",
            "must have 2 or 4 axes",
            "Pass [B, keys], or [B, 1 or H, S_q or 1, keys]",
        )
    floats = mask.dtype.is_floating_point
    if mask.dtype != torch.bool and floats != (mask.dim() == 4):
        rule = (
            "must be bool, or floats that are added to the scores"
            if mask.dim() == 4
            else "must be bool or an integer, 0 where a key is padding"
        )
        raise InvalidValue("attention_mask.dtype", mask.dtype, rule, "Convert it: mask.bool()")


def packed_rows(*given: Any) -> Packed | None:
    """cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k."""
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    missing = [n for n, x in zip(names, given, strict=True) if x is None]
    if len(missing) == len(names):
        return None
    if missing:
        raise InvalidValue(missing[0], None, f"{' and '.join(names)} go together", "Pass all four")
    q, k, longest_q, longest_k = given
    return Packed(q.to(torch.int32), k.to(torch.int32), longest_q, longest_k)


def sinks_of(
    s_aux: Tensor | None, sinks: Tensor | None, shape: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Float32 sinks (by head [H], by query [B, H, S_q, 1]) of a query of a shape [B, H, S_q, D]."""
    if s_aux is not None and sinks is not None:
        raise InvalidValue("s_aux", "given", "sinks are given as well", "Pass one of them")
    name, found = ("s_aux", s_aux) if sinks is None else ("sinks", sinks)
    if found is None:
        return None, None
    if found.dim() == 1:
        return found.float(), None
    if found.dim() == 4 and found.shape == (*shape[:3], 1):
        return None, found.float()
    raise InvalidValue(
        name,
        f"a tensor of shape {list(found.shape)}",
        f"must be [H={shape[1]}] or [B={shape[0]}, H={shape[1]}, S_q={shape[2]}, 1]",
        "Give each head, or each query of each head, one number",
    )


def selection(
    indices: Tensor | None, block_indices: Tensor | None, module: Any, heads: int, keys: int
) -> Tensor | None:
    """The mask [B, 1 or H, S_q, keys] of a selection of keys, of blocks of them, or of both."""
    mask = None
    if indices is not None:
        mask = _scattered(indices, keys)[:, None]
    if block_indices is not None:
        size = getattr(getattr(module, "indexer", None), "block_size", None)
        if size is None:
            raise InvalidValue(
                "block_indices",
                "given",
                f"{type(module).__name__}.indexer.block_size, the keys of a block, is missing",
                'Use attn_implementation="eager"',
            )
        blocks = _scattered(block_indices, -(-keys // size))
        seen = blocks.repeat_interleave(size, -1)[..., :keys]
        seen = seen.repeat_interleave(heads // seen.shape[1], 1)
        mask = seen if mask is None else mask & seen
    return mask


def _scattered(indices: Tensor, extent: int) -> Tensor:
    """[…, n] of places → […, extent] of bool, True at those; below 0 is none."""
    seen = indices.new_zeros((*indices.shape[:-1], extent + 1), dtype=torch.bool)
    places = torch.where(indices < 0, extent, indices).long()
    return seen.scatter(-1, places, True)[..., :extent]
