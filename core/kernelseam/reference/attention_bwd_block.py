"""The gradients of a stack of heads, a block of queries at a time, and in it a block of keys.

Scores are recomputed as in the forward; its LSE turns them into probabilities without a running
maximum. dk and dv of a KV head are accumulated in scratch over all queries of its group's heads, so
that memory grows with S_k alone.
"""

from __future__ import annotations

import numpy as np

from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.reference.attention_keys import Keys, in_place
from kernelseam.reference.attention_scores import Array, by_column, split
from kernelseam.reference.attention_tiling import Block, Tiling, padded
from kernelseam.reference.attention_views import Rows, Stack, Views
from kernelseam.reference.products import product, visible_product
from kernelseam.reference.scratch import shaped

# products over columns then have as many rows as those over keys
BLOCK = Block(columns=256, keys=256)


def scratch_sizes(p: AttentionProblem, t: Tiling) -> tuple[int, ...]:
    """Elements of the scratch of one thread: probabilities, their gradient and the softcap's;
    queries, scaled queries, dout in both orders, dq; a product; dk and dv; copies of k and v."""
    d, d_v, keys = p.spec.head_dim, p.spec.value_dim, t.stack * p.S_k
    rows, plane = t.stack * t.columns, t.stack * t.columns * t.keys
    copies = (0 if kept else keys * w for kept, w in zip(in_place(p), (d, d_v), strict=True))
    return (
        plane,
        plane,
        plane if p.spec.softcap or p.spec.expression else 0,
        rows * d,
        rows * d,
        rows * d_v,
        rows * d_v,
        rows * d,
        t.stack * max(t.keys, t.columns) * max(d, d_v),
        keys * d,
        keys * d_v,
        *copies,
    )


class BiasGradient:
    """dbias, [batch, heads, S_q, S_k] with extent 1 where the bias is broadcast, to which one head
    after another adds."""

    def __init__(self, to: Array, whole: bool) -> None:
        """``whole``: dbias is not a sum over any axis."""
        self._to, self._whole = to, whole

    def add(self, x: Array, b: int, h: int, i: int, j: int) -> None:
        """x [keys, heads, queries] from head h, query i and key j on."""
        x = np.moveaxis(x, 0, 2)
        axes = self._to.shape[1:]
        summed = tuple(a for a, n in enumerate(axes) if n == 1)
        if summed and not self._whole:
            x = x.sum(axis=summed, keepdims=True)
        at = tuple(
            slice(1) if n == 1 else slice(start, start + extent)
            for n, start, extent in zip(axes, (h, i, j), x.shape, strict=True)
        )
        to = self._to[min(b, len(self._to) - 1)][at]
        if self._whole:
            to[...] = x
        else:
            to += x


class HeadGradients:
    """The operands of a stack, the gradients of its keys and values, and the scratch of one
    block."""

    def __init__(self, p: AttentionProblem, t: Tiling, scratch: list[Array]) -> None:
        self._most, self._scale = max(t.keys, 1), p.scale
        self._head_dim, self._value_dim = p.spec.head_dim, p.spec.value_dim
        self._group = p.head_group
        (
            self._p,
            self._dx,
            self._slope,
            self._queries,
            self._scaled,
            self._dout_rows,
            self._dout_columns,
            self._dq_rows,
            self._product,
            self._dk_rows,
            self._dv_rows,
            *copies,
        ) = scratch
        self._copies = [None if kept else x for kept, x in zip(in_place(p), copies, strict=True)]
        self._dtype = self._p.dtype

    def load(self, views: Views, own: Stack) -> None:
        """Take a stack, and set its dk and dv to 0."""
        self._own, self._of = own, views.scores(own)
        self._stack = own.batch.stop - own.batch.start, own.heads.stop - own.heads.start
        self._k, self._v = (
            Keys(views.keys(name, own), None, copy, own.S_k).rows(0, own.S_k)
            for name, copy in zip("kv", self._copies, strict=True)
        )
        self._q, self._dout, self._out, self._dq = (
            views.queries(name, own) for name in ("q", "dout", "out", "dq")
        )
        self._lse = views.lse(own)
        self._dk, self._dv = (
            shaped(x, *self._stack, own.S_k, w)
            for x, w in ((self._dk_rows, self._head_dim), (self._dv_rows, self._value_dim))
        )
        self._dk[...] = 0
        self._dv[...] = 0

    def store(self, dk: Array, dv: Array) -> None:
        """Write dk and dv, [batch, KV heads, rows, width]; rows after the stack's keys are set to
        0."""
        self._dk *= self._scale
        for to, x in ((dk, self._dk), (dv, self._dv)):
            to[:, :, : x.shape[2]] = x
            to[:, :, x.shape[2] :] = 0

    def block(
        self, heads: slice, i: int, n: int, dbias: BiasGradient | None, sink_sums: Array | None
    ) -> None:
        """Gradients of n queries from query i on of some heads of each group: dq is written, dk,
        dv, dbias and the sums of the sinks' gradients, [batch, KV heads, group], are added to."""
        scores, dtype, stack = self._of, self._dtype, self._stack
        inner = heads.stop - heads.start, n
        columns = inner[0] * n
        wide = padded(columns)
        queries, acc = (
            shaped(x, *stack, wide, self._head_dim) for x in (self._queries, self._dq_rows)
        )
        scaled = shaped(self._scaled, *stack, self._head_dim, wide)
        dout = shaped(self._dout_rows, *stack, wide, self._value_dim)
        dout_columns = shaped(self._dout_columns, *stack, self._value_dim, wide)
        self._take(self._q, heads, i, n, queries)
        np.multiply(queries.swapaxes(2, 3), scores.scale, out=scaled)
        self._take(self._dout, heads, i, n, dout)
        np.copyto(dout_columns, dout.swapaxes(2, 3))
        out = shaped(self._product, *stack, wide, self._value_dim)
        self._take(self._out, heads, i, n, out)
        out *= dout
        delta = out.sum(axis=3)[:, :, None]
        assert self._lse is not None
        total = np.zeros((*stack, 1, wide), dtype)
        split(total, inner)[:, :, 0] = self._lse[:, :, heads, i : i + n]
        empty = np.isneginf(total)  # a row without a finite score
        np.copyto(total, 0, where=empty)
        acc[...] = 0
        for j, stop in scores.runs(i, n, self._most):
            p, dx = (shaped(x, *stack, stop - j, wide) for x in (self._p, self._dx))
            slope = shaped(self._slope, *p.shape) if scores.has_slope else None
            k, v = self._k[:, :, j:stop], self._v[:, :, j:stop]
            product(k, scaled, p)
            scores.change(
                split(p, inner), heads, i, j, None if slope is None else split(slope, inner)
            )
            p -= total
            np.exp(p, out=p)
            p[..., columns:] = 0
            mask = self._mask(heads, i, n, j, p, empty)
            self._add_product(self._dv[:, :, j:stop], p, dout, mask)
            product(v, dout_columns, dx)
            dx -= delta
            dx *= p
            _clear(dx, p)
            if dbias is not None:
                self._add_bias(dbias, split(dx, inner), heads, i, j)
            if slope is not None:
                slope[..., columns:] = 0
                dx *= slope
                _clear(dx, p)
            self._add_product(self._dk[:, :, j:stop], dx, queries, mask)
            self._add_product(
                acc, dx.swapaxes(2, 3), k, None if mask is None else mask.swapaxes(2, 3)
            )
        acc *= self._scale
        rows = self._by_head(acc, inner)
        for at, dq in self._dq.block(heads, i, n):
            dq[...] = rows[:, :, at]
        if sink_sums is not None and scores.sinks is not None:
            sunk = np.exp(scores.sinks[:, None, heads, None] - split(total, inner))
            sunk *= split(delta, inner)
            sink_sums[:, :, heads] -= sunk.sum(axis=4, where=~split(empty, inner))[:, :, 0]

    def _mask(self, heads: slice, i: int, n: int, j: int, p: Array, empty: Array) -> Array | None:
        """Set the hidden keys' probabilities to 0, and say which they are: [batch, KV heads, keys,
        columns]; None where none is."""
        inner, wide = (heads.stop - heads.start, n), p.shape[3]
        visible, hidden = self._of.hidden(heads, i, n, j, p.shape[2])
        if hidden is None and not empty.any():
            return None
        if hidden is None:
            mask = np.broadcast_to(empty, p.shape)
        else:
            mask = by_column(visible, hidden, inner, wide).swapaxes(2, 3) | empty
        np.copyto(p, 0, where=mask)
        return mask

    def _add_bias(self, dbias: BiasGradient, dx: Array, heads: slice, i: int, j: int) -> None:
        """Of one head of the stack after another, so that each sum has one order."""
        for b, g in np.ndindex(*self._stack):
            head = (self._own.heads.start + g) * self._group + heads.start
            dbias.add(dx[b, g], self._own.batch.start + b, head, i, j)

    def _add_product(self, to: Array, a: Array, b: Array, hidden: Array | None) -> None:
        """Add a·b to ``to``; a row of a skips the rows of b that are hidden from it."""
        part = shaped(self._product, *to.shape)
        if hidden is None or np.isfinite(b.sum()):
            product(a, b, part)
        else:
            visible_product(a, b, hidden, part)
        to += part

    def _by_head(self, x: Array, inner: tuple[int, int]) -> Array:
        """Rows [batch, KV heads, columns, width] as [batch, KV heads, heads, queries, width]."""
        return x[:, :, : inner[0] * inner[1]].reshape(*self._stack, *inner, x.shape[3])

    def _take(self, x: Rows, heads: slice, i: int, n: int, to: Array) -> None:
        """Copy a block's rows; those that only pad are 0."""
        inner = heads.stop - heads.start, n
        rows = self._by_head(to, inner)
        for at, part in x.block(heads, i, n):
            np.copyto(rows[:, :, at], part)
        to[:, :, inner[0] * n :] = 0


def _clear(dx: Array, p: Array) -> None:
    """Set dx to 0 where a key has no weight, also where it is not finite."""
    if not np.isfinite(dx.sum()):
        np.copyto(dx, 0, where=p == 0)
