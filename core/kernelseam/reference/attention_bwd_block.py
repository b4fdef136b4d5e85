"""One head's gradients, a block of queries at a time, and in it a block of keys.

Scores are made again as the forward made them, keys-first; its LSE turns them into probabilities at
once. dk and dv of a KV head grow in scratch over all queries of its group's heads, so that memory
grows with S_k alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.reference.attention_block import joined, product
from kernelseam.reference.attention_scores import Array, Scores
from kernelseam.reference.scratch import shaped

# products over keys then take as many rows at a time as those over queries
QUERIES, KEYS = 256, 256


def scratch_sizes(p: AttentionProblem, keep: tuple[bool, ...]) -> tuple[int, ...]:
    """Elements of the scratch of one thread: probabilities, their gradient and the cap's; queries,
    scaled ones, dout, dq; a product; dk and dv; copies of k and v."""
    n, keys, d, d_v = min(p.S_q, QUERIES), min(p.S_k, KEYS), p.spec.head_dim, p.spec.value_dim
    copies = (0 if kept else p.S_k * w for kept, w in zip(keep, (d, d_v), strict=True))
    plane = keys * n
    return (
        plane,
        plane,
        plane if p.spec.softcap else 0,
        n * d,
        n * d,
        n * d_v,
        n * d,
        max(keys, n) * max(d, d_v),
        p.S_k * d,
        p.S_k * d_v,
        *copies,
    )


@dataclass(frozen=True)
class BiasGradient:
    """What one head adds to the bias's gradient: [S_q, S_k], with extent 1 where the bias
    repeats."""

    to: Array
    whole: bool
    """Whether nothing is summed, over no axis at all."""

    def add(self, x: Array, i: int, j: int) -> None:
        """x [queries, keys] from query i and key j on."""
        rows, columns = (slice(at, at + n) for at, n in zip((i, j), x.shape, strict=True))
        if self.whole:
            self.to[rows, columns] = x
            return
        if len(self.to) == 1:
            x, rows = x.sum(axis=0, keepdims=True), slice(1)
        if self.to.shape[1] == 1:
            x, columns = x.sum(axis=1, keepdims=True), slice(1)
        self.to[rows, columns] += x


class HeadGradients:
    """The keys and values of one KV head, their gradients, and the scratch of one block of
    queries."""

    def __init__(self, p: AttentionProblem, keep: tuple[bool, ...], scratch: list[Array]) -> None:
        self.keep, self.scale = keep, p.scale
        (
            self._p,
            self._dx,
            self._slope,
            self._queries,
            self._scaled,
            self._dout,
            self._dq,
            self._part,
            self._dk,
            self._dv,
            *self._copies,
        ) = scratch
        self.dtype = self._p.dtype
        self.widths = p.spec.head_dim, p.spec.value_dim

    def load(self, k: list[Array], v: list[Array]) -> None:
        """Take k [S_k, D] and v [S_k, D_v], each in pieces that follow one another; dk and dv are
        zeros."""
        self.k, self.v = (
            x[0] if kept else joined(x, copy, width)
            for x, kept, copy, width in zip(
                (k, v), self.keep, self._copies, self.widths, strict=True
            )
        )
        self.dk, self.dv = shaped(self._dk, *self.k.shape), shaped(self._dv, *self.v.shape)
        self.dk[...] = 0
        self.dv[...] = 0

    def store(self, dk: Array, dv: Array) -> None:
        """Write the gradients of what was loaded; rows beyond it get zeros."""
        self.dk *= self.scale
        for to, x in ((dk, self.dk), (dv, self.dv)):
            to[: len(x)] = x
            to[len(x) :] = 0

    def block(
        self,
        q: Array,
        dout: Array,
        out: Array,
        lse: Array,
        i: int,
        scores: Scores,
        dq: Array,
        dbias: BiasGradient | None,
    ) -> float:
        """Gradients of queries q [n, D], the first of which is query ``i``, given dout and out [n,
        D_v] and lse [n]. dq is written, dk, dv and dbias are added to. Returns what the sink
        takes."""
        n, (d, d_v) = len(q), self.widths
        queries, scaled, acc = (shaped(x, n, d) for x in (self._queries, self._scaled, self._dq))
        given, part = shaped(self._dout, n, d_v), shaped(self._part, n, d_v)
        np.copyto(queries, q)
        np.multiply(queries, scores.factor, out=scaled)
        np.copyto(given, dout)
        np.multiply(given, out, out=part, dtype=self.dtype)
        dots = part.sum(axis=1)
        acc[...] = 0
        exp, unit = (np.exp2, math.log2(math.e)) if scores.plain else (np.exp, 1.0)
        empty = np.isneginf(lse)  # such a row weighs nothing
        total = np.where(empty, 0, lse).astype(self.dtype)
        level = total * self.dtype.type(unit)
        for j, stop in scores.runs(i, n, KEYS):
            p, dx = (shaped(x, stop - j, n) for x in (self._p, self._dx))
            slope = shaped(self._slope, stop - j, n) if scores.cap else None
            k, v = self.k[j:stop], self.v[j:stop]
            product(k, scaled.T, p)
            scores.change(p, i, n, j, slope)
            p -= level
            exp(p, out=p)
            hidden = _hidden(scores, i, n, j, p.shape, empty)
            if hidden is not None:
                np.copyto(p, 0, where=hidden)
            self._add_product(self.dv[j:stop], p, given, hidden)
            product(v, given.T, dx)
            dx -= dots
            dx *= p
            weighs = p != 0
            np.copyto(dx, 0, where=~weighs)  # whatever stands in v and dout
            if dbias is not None:
                dbias.add(dx.T, i, j)
            if slope is not None:
                np.multiply(dx, slope, out=dx, where=weighs)
            self._add_product(self.dk[j:stop], dx, queries, hidden)
            self._add_product(acc, dx.T, k, None if hidden is None else hidden.T)
        acc *= self.scale
        dq[...] = acc
        return -float((np.exp(scores.sink - total) * dots).sum(where=~empty))

    def _add_product(self, to: Array, a: Array, b: Array, hidden: Array | None) -> None:
        """Add a·b, of a [rows, m], b [m, columns], to ``to``; a row takes nothing of b where
        ``hidden`` [rows, m] is True: a is 0 there, but 0·NaN is NaN."""
        part = shaped(self._part, *to.shape)
        if hidden is None or np.isfinite(b.sum()):
            product(a, b, part)
            to += part
            return
        bad, clean = np.flatnonzero(~np.isfinite(b.sum(axis=1))), b.copy()
        clean[bad] = 0
        product(a, clean, part)
        to += part
        for m in bad:
            shown = ~hidden[:, m]
            to[shown] += a[shown, m, None] * b[m]


def _hidden(
    scores: Scores, i: int, n: int, j: int, shape: tuple[int, ...], empty: Array
) -> Array | None:
    """Which keys of a block [keys, queries] weigh nothing for which queries; None where all may
    weigh something."""
    seen, beyond = scores.hidden(i, n, j, shape)
    if beyond is None and not empty.any():
        return None
    hidden = np.empty(shape, np.bool_)
    hidden[...] = empty
    if beyond is not None:
        hidden[seen:] |= beyond
    return hidden
