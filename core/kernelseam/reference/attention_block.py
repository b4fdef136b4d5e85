"""The attention of a stack of heads, a block of queries at a time: online softmax.

The reference of the exponents, their sum and the product of a row are updated for each block of
keys, so that memory does not grow with S_q·S_k. Any reference cancels in the result and in the LSE.
It starts as 0, and stays what it is while the weights of a block sum to at most 2¹⁵, and all so far
to at least 2⁻¹⁵: then no weight that counts overflows or vanishes, and the block's maximum is not
needed. Otherwise the block is computed again, by its maximum. Each column decides for itself, so
that its bits do not depend on others.
"""

from __future__ import annotations

import math

import numpy as np

from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.reference.attention_keys import Keys, in_place, rows_copied
from kernelseam.reference.attention_scores import Array, by_column, split
from kernelseam.reference.attention_tiling import Block, Tiling, padded
from kernelseam.reference.attention_views import Stack, Views
from kernelseam.reference.products import product, visible_product
from kernelseam.reference.scratch import shaped

# columns: a multiple of what BLAS takes at once (``products``), few beside a causal mask
BLOCK = Block(columns=192, keys=512)
_MOST, _LEAST = 2.0**15, 2.0**-15
_NARROW = 8
"""Columns up to which BLAS multiplies by queries fastest where they lie as rows."""


def scratch_sizes(p: AttentionProblem, t: Tiling) -> tuple[int, ...]:
    """Elements of the scratch of one thread: scores, queries, result, a product or queries before
    they are transposed, copies of k and v."""
    rows, d, d_v = t.stack * t.columns, p.spec.head_dim, p.spec.value_dim
    copied = t.stack * rows_copied(p, t)
    copies = (0 if kept else copied * w for kept, w in zip(in_place(p), (d, d_v), strict=True))
    return t.keys * rows, d * rows, d_v * rows, max(d, d_v) * rows, *copies


class Heads:
    """The operands of a stack, and the scratch of one block."""

    def __init__(self, p: AttentionProblem, t: Tiling, scratch: list[Array]) -> None:
        self._most, self._value_dim, self._head_dim = (
            max(t.keys, 1),
            p.spec.value_dim,
            p.spec.head_dim,
        )
        self._scores, self._queries, self._acc, self._product, *copies = scratch
        self._copies = [None if kept else x for kept, x in zip(in_place(p), copies, strict=True)]
        self._dtype = self._scores.dtype
        # sums over keys by BLAS: with two rows it stays on the calling thread
        self._ones = np.ones((2, self._most), self._dtype)

    def load(self, views: Views, own: Stack) -> None:
        self._of, self._stack = (
            views.scores(own),
            (own.batch.stop - own.batch.start, own.heads.stop - own.heads.start),
        )
        self._k, self._v = (
            Keys(views.keys(name, own), views.key_scales(name, own), copy, own.S_k)
            for name, copy in zip("kv", self._copies, strict=True)
        )
        self._q, self._out = views.queries("q", own), views.queries("out", own)
        self._q_scales, self._lse = views.query_scales(own), views.lse(own)

    def block(self, heads: slice, i: int, n: int) -> None:
        """n queries from query i on of some heads of each group."""
        scores, dtype = self._of, self._dtype
        inner = (heads.stop - heads.start, n)
        columns = inner[0] * n
        wide = padded(columns)
        x = self._columns(wide)
        self._take_queries(x, heads, i, n)
        acc, part = (
            shaped(m, *self._stack, wide, self._value_dim) for m in (self._acc, self._product)
        )
        # the exponents' reference: 0, or a sink, which is a key of value 0
        top, total = (np.zeros((*self._stack, 1, wide), dtype) for _ in range(2))
        if scores.sinks is not None:
            split(top, inner)[...] = scores.sinks[:, None, heads, None]
            total[...] = top != -math.inf
        zero = scores.sinks is None  # whether the reference is still 0 in all columns
        weighed = False  # whether it is known that every column has weights
        to = acc  # of the first keys; later products are added
        for j, stop in scores.runs(i, n, self._most):
            s = shaped(self._scores, *self._stack, stop - j, wide)
            visible, hidden = self._fill(s, x, heads, i, n, j)
            added = self._weights(s, None if zero else top)
            after = added if zero and to is acc else total + added
            weighed = bool(
                np.maximum.reduce(added, axis=None) <= _MOST
                and np.minimum.reduce(after, axis=None) >= _LEAST
                and (zero or np.isfinite(top).all())
            )
            if weighed:
                total = after
            else:
                keep = (added <= _MOST) & (after >= _LEAST) & np.isfinite(top)
                self._fill(s, x, heads, i, n, j)
                before = np.where(total == 0, -math.inf, top)
                top = np.where(keep, top, np.maximum(before, s.max(axis=2, keepdims=True)))
                zero = False
                shift = np.where(np.isneginf(top), dtype.type(0), top)
                rescale = np.exp(before - shift)
                total = total * rescale + self._weights(s, shift)
                if to is part:
                    acc *= rescale.swapaxes(2, 3)
            weights, v = s.swapaxes(2, 3), self._v.rows(j, stop)
            if hidden is None or np.isfinite(v.sum()):
                product(weights, v, to)
            else:
                visible_product(weights, v, by_column(visible, hidden, inner, wide), to)
            if to is part:
                acc += part
            to = part
        self._store(acc, total if weighed else _cleared(acc, total, to is part), heads, i, n)
        if self._lse is not None:
            lse = np.log(total, dtype=np.float64) + top
            self._lse[:, :, heads, i : i + n] = split(lse, inner)[:, :, 0]

    def _store(self, acc: Array, total: Array, heads: slice, i: int, n: int) -> None:
        """Write acc/total."""
        inner = heads.stop - heads.start, n
        weighted, weights = (
            split(x, inner).transpose(0, 1, 3, 4, 2) for x in (acc.swapaxes(2, 3), total)
        )
        for at, out in self._out.block(heads, i, n):
            np.divide(weighted[:, :, at], weights[:, :, at], out=out, casting="unsafe")

    def _fill(
        self, s: Array, x: Array, heads: slice, i: int, n: int, j: int
    ) -> tuple[int, Array | None]:
        """The scores of a block, −inf where hidden; and ``Scores.hidden``."""
        keys = s.shape[2]
        product(self._k.rows(j, j + keys), x, s)
        each = split(s, (heads.stop - heads.start, n))
        self._of.change(each, heads, i, j)
        return self._of.hide(each, heads, i, j)

    def _weights(self, s: Array, shift: Array | None) -> Array:
        """exp(s − shift) in place, and its sums over keys. ``shift``: None where it is 0."""
        if shift is not None:
            np.subtract(s, shift, out=s)
        np.exp(s, out=s)
        sums = np.empty((*s.shape[:2], 2, s.shape[3]), s.dtype)
        product(self._ones[:, : s.shape[2]], s, sums)
        return sums[:, :, :1]

    def _columns(self, wide: int) -> Array:
        """Scratch of so many queries as columns, [batch, KV heads, D, columns]."""
        if wide <= _NARROW:
            return shaped(self._queries, *self._stack, wide, self._head_dim).swapaxes(2, 3)
        return shaped(self._queries, *self._stack, self._head_dim, wide)

    def _take_queries(self, x: Array, heads: slice, i: int, n: int) -> None:
        """The scaled queries of a block as columns, [batch, KV heads, D, columns]."""
        inner = (heads.stop - heads.start, n)
        each = split(x, inner)
        rows = shaped(self._product, *self._stack, *inner, self._head_dim)
        for at, q in self._q.block(heads, i, n):
            np.multiply(q, self._of.scale, out=rows[:, :, at], dtype=x.dtype)
        np.copyto(each, rows.transpose(0, 1, 4, 2, 3))
        x[..., inner[0] * n :] = 0
        if (scales := self._q_scales) is not None:
            scales = scales if scales.shape[2] == 1 else scales[:, :, heads]
            scales = scales if scales.shape[3] == 1 else scales[..., i : i + n]
            np.multiply(each, scales[:, :, None], out=each)


def _cleared(acc: Array, total: Array, any_keys: bool) -> Array:
    """Set acc to 0 where no score was finite; ``total`` with 1 there."""
    if not any_keys:
        acc[...] = 0
    empty = total == 0
    if not empty.any():
        return total
    np.copyto(acc, 0, where=empty.swapaxes(2, 3))
    return np.where(empty, total.dtype.type(1), total)
