"""Keys or values of a stack of heads in the accumulator's dtype: in place, or copied into
scratch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.reference.attention_scores import Array
from kernelseam.reference.attention_tiling import Tiling
from kernelseam.reference.scratch import shaped


def in_place(p: AttentionProblem) -> tuple[bool, ...]:
    """For k and v, whether BLAS can read them in place."""
    return tuple(
        p.spec.kv_view != "paged"
        and p.spec.kv is p.spec.dtype.accumulator
        and p.spec.kv_scales is None
        and strides[2] >= columns
        for strides, columns in ((p.k_strides, p.spec.head_dim), (p.v_strides, p.spec.value_dim))
    )


def rows_copied(p: AttentionProblem, t: Tiling) -> int:
    """Rows of a copy: all where several blocks of queries read them, else those of one block."""
    once = t.heads == p.head_group and t.queries == p.S_q
    return t.keys if once else p.S_k


class Keys:
    """k or v, [batch, KV heads, S_k, width], as consecutive pieces, times ``scales``, [batch, KV
    heads, S_k] or one for all rows.

    ``scratch``: None where there is no copy; else with room for all rows, or for those of a block.
    """

    def __init__(
        self, pieces: Sequence[Array], scales: Array | None, scratch: Array | None, S_k: int
    ) -> None:
        self._pieces, self._scales, self._scratch = pieces, scales, scratch
        self._whole: Array | None = None
        if scratch is None:
            self._whole = pieces[0]
        elif pieces and pieces[0][..., :1, :].size * S_k <= scratch.size:
            self._whole = self._copy(0, S_k)

    def rows(self, j: int, stop: int) -> Array:
        """Those from j to stop; a copy is valid until the next call."""
        return self._copy(j, stop) if self._whole is None else self._whole[..., j:stop, :]

    def _copy(self, j: int, stop: int) -> Array:
        assert self._scratch is not None
        batch, heads, _, width = self._pieces[0].shape
        to = shaped(self._scratch, batch, heads, stop - j, width)
        start = 0
        for piece in self._pieces:
            end = start + piece.shape[-2]
            first, last = max(start, j), min(end, stop)
            if first < last:
                convert(
                    piece[..., first - start : last - start, :], to[..., first - j : last - j, :]
                )
            start = end
        if self._scales is not None:
            scales = self._scales if self._scales.shape[-1] == 1 else self._scales[..., j:stop]
            np.multiply(to, scales[..., None], out=to)
        return to


def convert(x: Array, out: Array) -> None:
    """out = x; numbers of 8 bits by a table, which takes a fifth of the time of a cast."""
    if x.dtype.itemsize == 1:
        np.take(_table(x.dtype, out.dtype), x.view(np.uint8), out=out, mode="clip")
    else:
        np.copyto(out, x)


@lru_cache
def _table(dtype: np.dtype, to: np.dtype) -> Array:
    return np.arange(256, dtype=np.uint8).view(dtype).astype(to)
