"""torch's scaled_dot_product_attention, by ours. Imports torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kernelseam.descriptors.common.validation import flag, number
from kernelseam.descriptors.common.wording import Wording
from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_autograd import attention
from kernelseam.interop.torch_function import tensors, with_rows
from kernelseam.interop.torch_nested import is_jagged


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What torch.nn.functional.scaled_dot_product_attention computes, by ``attention``, with its
    gradients.

    query [..., H, L, E], key [..., H, S, E], value [..., H, S, E_v] → [..., H, L, E_v]; leading
    axes repeat to each other, and so do heads unless ``enable_gqa``, by which H is a multiple of
    key's heads. ``attn_mask`` repeats to [..., H, L, S]: of bool, True where a key takes part, or
    added to the scores (query's dtype or float32). ``is_causal`` begins at the top left: query i
    sees keys 0 … i, also where L and S differ. Nested tensors of layout torch.jagged, [B, H, rows,
    E], have no mask, and are causal where key is nested as query is. Rows that are not contiguous
    are copied.

    Raises InvalidValue for dropout, for a mask beside ``is_causal``, and for shapes that do not fit
    together.
    """
    given = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
    tensors(given, ("query", "key", "value"))
    is_causal, enable_gqa = flag("is_causal", is_causal), flag("enable_gqa", enable_gqa)
    if number("dropout_p", dropout_p) != 0:
        raise InvalidValue("dropout_p", dropout_p, "must be 0", "Drop out outside of the attention")
    if attn_mask is not None and is_causal:
        raise InvalidValue(
            "is_causal", True, "a mask is given as well", "Pass what both allow as attn_mask"
        )
    if query.is_nested:
        return _nested(query, key, value, attn_mask, is_causal, scale)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 2:
            raise InvalidValue(
                name,
                f"an array of shape {list(x.shape)}",
                "must have 2 axes or more",
                "Add axes with reshape",
            )
    query, key, value = (with_rows(x) for x in (query, key, value))
    batch = _batch(query, key, value)
    q, k, v = _heads(query, key, value, batch, enable_gqa)
    options: dict[str, Any] = {"scale": scale}
    if attn_mask is not None:
        _check_mask(attn_mask, query, (*batch, *q.shape[1:3], k.shape[2]))
        whole = attn_mask if attn_mask.dim() < 4 else _four(attn_mask, batch)
        options["mask" if attn_mask.dtype == torch.bool else "bias"] = whole
    if is_causal:
        rows, keys = q.shape[-2], k.shape[-2]
        if rows < keys:
            k, v = k[..., :rows, :], v[..., :rows, :]
        # from the bottom right, where the diagonal of attention ends
        options |= {"window": (None, rows - keys)} if rows > keys else {"causal": True}
    try:
        out = attention(q, k, v, **options)
    except InvalidValue as e:
        if torch.compiler.is_compiling():  # which follows no regular expressions
            raise
        raise _WORDING.reworded(e) from None
    lead = (*batch, q.shape[1]) if max(x.dim() for x in (query, key, value)) > 2 else ()
    return out.reshape(*lead, *out.shape[-2:])


_WORDING = Wording(
    {"q": "query", "k": "key", "v": "value", "mask": "attn_mask", "bias": "attn_mask"}
)


def _heads(
    query: Tensor, key: Tensor, value: Tensor, batch: Any, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """[batch, heads, rows, E], with one head for one of none."""
    q, k, v = (_four(x, batch) for x in (query, key, value))
    if not enable_gqa:
        counts = {x.shape[1] for x in (q, k, v)} - {1}
        if len(counts) > 1:
            raise InvalidValue(
                "enable_gqa",
                False,
                f"query has {q.shape[1]} heads, key {k.shape[1]} and value {v.shape[1]}",
                "Pass enable_gqa=True where groups of query's heads share one of key's",
            )
        heads = max(counts, default=1)
        q, k, v = (x.expand(-1, heads, -1, -1) for x in (q, k, v))
    return q, k, v


def _four(x: Tensor, batch: Any) -> Tensor:
    """Leading axes as one; where a mask has extent 1 for all of them, it keeps that."""
    heads = x.shape[-3] if x.dim() > 2 else 1
    if len(batch) == 1 and x.dim() == 4 and x.shape[0] == batch[0]:
        return x
    whole = x.reshape(*x.shape[:-3], heads, *x.shape[-2:])
    return whole.expand(*batch, *whole.shape[-3:]).reshape(math.prod(batch), *whole.shape[-3:])


def _batch(query: Tensor, key: Tensor, value: Tensor) -> Any:
    """The leading axes that all repeat to."""
    try:
        return torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    except RuntimeError:
        raise InvalidValue(
            "query",
            f"an array of shape {list(query.shape)}",
            "must repeat along its leading axes to those of key and value, of shapes "
            f"{list(key.shape)} and {list(value.shape)}",
            "Check the order of the axes",
        ) from None


def _check_mask(mask: Tensor, query: Tensor, wanted: tuple[Any, ...]) -> None:
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise InvalidValue(
            "attn_mask.dtype",
            mask.dtype,
            f"must be bool, float32 or {query.dtype} as query is",
            "Convert it",
        )
    if mask.dim() > len(wanted) or any(
        n not in (1, of) for n, of in zip(mask.shape[::-1], wanted[::-1], strict=False)
    ):
        raise InvalidValue(
            "attn_mask",
            f"an array of shape {list(mask.shape)}",
            f"must repeat to {list(wanted)}",
            "Check the order of the axes",
        )


def _nested(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: Any
) -> Tensor:
    if mask is not None:
        raise InvalidValue(
            "attn_mask", "given", "nested tensors have none", "Call attention_varlen with its mask"
        )
    same = is_jagged(query) and is_jagged(key) and query.offsets() is key.offsets()
    if causal and not same:
        raise InvalidValue(
            "is_causal",
            True,
            "where lengths of query and key differ, each entry would begin at its own top left",
            "Nest both with the same offsets, or call attention_varlen",
        )
    return attention(query, key, value, causal=causal, scale=scale)
