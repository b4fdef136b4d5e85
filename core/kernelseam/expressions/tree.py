"""Masks of drafts that form a tree, as speculative decoding verifies them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.errors import InvalidValue
from kernelseam.expressions.elementwise import where
from kernelseam.expressions.scores import MaskMod

MOST_DRAFTS = 64
"""Of an entry: bits of an int64."""
_BITS = {"int32": 32, "int64": MOST_DRAFTS}
_DRAFTS = "drafts"
"""The attribute of a tree's mask that has its ancestors' shape."""


def tree_ancestors(parents: Any) -> npt.NDArray[np.int32] | npt.NDArray[np.int64]:
    """The bits that ``tree_mask`` takes, from each draft's parent.

    ``parents`` [n] or [B, n], on the host: draft i's parent, a draft before it, or −1 for one that
    follows the prompt; 64 drafts at most. Returns int32 of that shape, of more than 32 drafts
    int64: bit j of element i says that draft i descends from draft j, or is it. Raises
    InvalidValue.
    """
    try:
        given = np.asarray(parents)
    except ValueError as error:  # NumPy's, which names no operand
        rule, remedy = "must be rows of one length", "Pad shorter ones with −1"
        raise InvalidValue("parents", type(parents).__name__, rule, remedy) from error
    if given.ndim not in (1, 2) or given.dtype.kind not in "iu" or given.shape[-1] > MOST_DRAFTS:
        raise InvalidValue(
            "parents",
            f"{given.dtype} of shape {list(given.shape)}",
            f"must be integers [n] or [B, n], n up to {MOST_DRAFTS}",
            "Give each draft's parent, −1 for none",
        )
    drafts = np.arange(given.shape[-1])
    if (wrong := (given < -1) | (given >= drafts)).any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise InvalidValue(
            f"parents{list(at)}",
            int(given[at]),
            "must be −1 or a draft before it",
            "Order drafts so that parents come first",
        )
    bits = np.zeros(given.shape, np.uint32 if len(drafts) <= 32 else np.uint64)
    for i in drafts:
        above = np.take_along_axis(bits, np.maximum(given[..., i : i + 1], 0), -1)
        above = np.where(given[..., i : i + 1] < 0, bits.dtype.type(0), above)
        bits[..., i] = above[..., 0] | bits.dtype.type(1 << int(i))
    return bits.view(np.int32) if bits.itemsize == 4 else bits.view(np.int64)


def tree_mask(ancestors: Any, kv_lengths: Any, cu_seqlens_q: Any = None) -> MaskMod:
    """A ``mask_mod`` for ``attention_paged`` (with ``causal=False``) whose queries are drafts: each
    sees the keys before the drafts, and of these its ancestors and itself.

    ``ancestors`` int32 [B, n], n up to 32, or int64, n up to 64, as ``tree_ancestors`` makes them:
    an entry's drafts are its n queries and its last n keys; q of another B or n is refused where
    the mask is given. With ``cu_seqlens_q`` int32 [B + 1] entries have numbers of drafts of their
    own, each up to as many, and ``ancestors`` is [T].
    ``kv_lengths`` int32 [B] counts the drafts. All are on the device of q; contents may change
    between calls and between replays of a graph. Raises InvalidValue.
    """
    dtype = _dtype("ancestors", ancestors, "Take what tree_ancestors makes")
    for name, x in (("kv_lengths", kv_lengths), ("cu_seqlens_q", cu_seqlens_q)):
        if x is not None or name == "kv_lengths":
            _dtype(name, x, "Take what attention_paged takes")
    shape, rank = tuple(ancestors.shape), 2 if cu_seqlens_q is None else 1
    if len(shape) != rank or (rank == 2 and shape[1] > _BITS[dtype]):
        rule = f"must be [B, n], n up to {_BITS[dtype]} of {dtype}"
        if rank == 1:
            rule = "must be [T] with cu_seqlens_q"
        raise InvalidValue(
            "ancestors", f"an array of shape {list(shape)}", rule, "Give a word for each query"
        )

    def of_entries(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return _sees(ancestors[b, q_idx], kv_idx - (kv_lengths[b] - shape[1]))

    def of_packed_rows(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        first = cu_seqlens_q[b]
        drafts = cu_seqlens_q[b + 1] - first
        return _sees(ancestors[first + q_idx], kv_idx - (kv_lengths[b] - drafts))

    mask = of_entries if rank == 2 else of_packed_rows
    setattr(mask, _DRAFTS, shape)
    return mask


def check_drafts(mask_mod: MaskMod | None, q: Any, layout: str) -> None:
    """Refuse a ``tree_mask`` of other drafts than the queries ``q``, [B, S_q, H, D] in ``layout``'s
    order or packed [T, H, D]. Raises InvalidValue."""
    drafts = getattr(mask_mod, _DRAFTS, None)
    if drafts is None or len(q.shape) != len(drafts) + 2:
        return
    axes = {1: (0,), 2: (0, 1 if layout == "bshd" else 2)}[len(drafts)]
    own = tuple(q.shape[i] for i in axes)
    if own != drafts:
        raise InvalidValue(
            "mask_mod",
            f"a tree_mask of ancestors {list(drafts)}",
            f"must be of q's {'batch and queries' if len(axes) == 2 else 'rows'}, {list(own)}",
            "Give a word for each query",
        )


def _dtype(name: str, x: Any, remedy: str) -> str:
    """Of an array of integers. Raises InvalidValue for another, and for what is no array."""
    dtype = str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch.")
    if dtype not in _BITS:
        raise InvalidValue(name, f"of {dtype}", "must be an array of int32 or int64", remedy)
    return dtype


def _sees(bits: Any, draft: Any) -> Any:
    """Whether a query of these ancestors sees draft number ``draft``; negative ones are keys before
    the drafts."""
    return (draft < 0) | ((bits >> where(draft > 0, draft, 0)) & 1 == 1)
