"""One head's attention, a block of queries at a time: online softmax.

The running maximum, sum and product of a row are updated for each block of keys, so that memory
does not grow with S_q·S_k. Scores are stored keys-first, [keys, queries]: reductions over keys are
then vectorized over the queries of the block.

Products are split into stacks of small ones that BLAS computes on the calling thread. OpenBLAS
distributes any product of more than 2¹⁸ multiply-adds over its own threads, and callers on several
threads then wait for one another; small ones also use its kernels without packing. So threads over
heads keep every core busy, and lose little where a core is shared.
"""

from __future__ import annotations

import math

import numpy as np

from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.reference.attention_scores import Array, Scores
from kernelseam.reference.scratch import shaped

# 1 MiB of float32 scores; the fastest of 64…256 × 512…2048 where that is a core's L2
QUERIES, _KEYS = 256, 1024
_SMALL = 1 << 18  # multiply-adds
# queries in one small product with v: fewer would starve BLAS, more would shorten its sums
_ROWS = 8


def in_place(p: AttentionProblem) -> tuple[bool, ...]:
    """For k and v, whether BLAS can read them in place; else they are copied, one head at a
    time."""
    return tuple(
        p.spec.kv_view != "paged"
        and p.spec.kv is p.spec.dtype.accumulator
        and strides[2] >= columns
        for strides, columns in ((p.k_strides, p.spec.head_dim), (p.v_strides, p.spec.value_dim))
    )


def scratch_sizes(p: AttentionProblem, keep: tuple[bool, ...]) -> tuple[int, ...]:
    """Elements of the scratch of one thread: scores, queries, result, partial products, copies of k
    and v."""
    n, d, d_v = _padded(min(p.S_q, QUERIES)), p.spec.head_dim, p.spec.value_dim
    keys = min(p.S_k, _KEYS)
    stacked = max(keys // _step(min(n, _ROWS), d_v), 1)
    copies = (0 if kept else p.S_k * w for kept, w in zip(keep, (d, d_v), strict=True))
    return keys * n, d * n, n * d_v, n * d_v * stacked, *copies


def _step(rows: int, columns: int) -> int:
    return max(_SMALL // max(rows * columns, 1), 1)


def _padded(n: int) -> int:
    """Queries computed for n: whole groups of ``_ROWS`` where there are more than one."""
    return n if n < _ROWS else -(-n // _ROWS) * _ROWS


class Head:
    """The keys and values of one head, and the scratch of one block of queries."""

    def __init__(self, p: AttentionProblem, keep: tuple[bool, ...], scratch: list[Array]) -> None:
        self.keep = keep
        self.scores, self.queries, self.acc, self.partial, *self.copies = scratch
        self.dtype = self.scores.dtype
        self.widths = p.spec.head_dim, p.spec.value_dim
        self.hides = p.spec.causal or p.spec.window or p.spec.mask

    def load(
        self,
        k: list[Array],
        v: list[Array],
        k_scales: Array | None = None,
        v_scales: Array | None = None,
    ) -> None:
        """Set k [S_k, D] and v [S_k, D_v], each a list of consecutive pieces, times their scales,
        [S_k] or [1]."""
        self.k, self.v = (
            x[0] if kept else joined(x, copy, width)
            for x, kept, copy, width in zip(
                (k, v), self.keep, self.copies, self.widths, strict=True
            )
        )
        for x, scales in ((self.k, k_scales), (self.v, v_scales)):
            if scales is not None:
                np.multiply(x, scales[:, None], out=x)
        # A hidden value has weight 0, but 0·NaN is NaN: one sum tells whether that can happen.
        self.finite = not self.hides or bool(np.isfinite(self.v.sum()))

    def block(
        self,
        q: Array,
        i: int,
        scores: Scores,
        out: Array,
        lse: Array | None,
        q_scales: Array | None = None,
    ) -> None:
        """Attention of queries q [n, D] times their scales, [n], the first of which is query
        ``i``."""
        n, d = q.shape
        wide = _padded(n)
        x, acc = shaped(self.queries, d, wide), shaped(self.acc, wide, self.v.shape[1])
        exp, log, unit = (np.exp2, np.log2, math.log(2)) if scores.plain else (np.exp, np.log, 1.0)
        np.multiply(q.T, scores.factor, out=x[:, :n], dtype=self.dtype)
        if q_scales is not None:
            np.multiply(x[:, :n], q_scales, out=x[:, :n])
        x[:, n:] = 0
        acc[...] = 0
        top = np.full(wide, scores.sink, self.dtype)
        total = np.full(wide, scores.sink != -math.inf, self.dtype)  # a sink is a key of value 0
        for j, stop in scores.runs(i, n, _KEYS):
            s = shaped(self.scores, stop - j, wide)
            product(self.k[j:stop], x, s)
            scores.change(s, i, n, j)
            visible, hidden = scores.hidden(i, n, j, s.shape)
            if hidden is not None:
                np.copyto(s[visible:], -np.inf, where=hidden)
            before, top = top, np.maximum(top, s.max(axis=0))
            shift = np.where(np.isneginf(top), self.dtype.type(0), top)
            np.subtract(s, shift, out=s)
            exp(s, out=s)
            rescale = exp(before - shift)
            total = total * rescale + s.sum(axis=0)
            acc *= rescale[:, None]
            self._weigh(s, self.v[j:stop], visible, hidden, acc[:n])
        acc /= total[:, None]
        acc[np.isneginf(top)] = 0  # no score but −inf
        out[...] = acc[:n]
        if lse is not None:
            lse[...] = ((log(total, dtype=np.float64) + top) * unit)[:n]

    def _weigh(self, p: Array, v: Array, visible: int, hidden: Array | None, acc: Array) -> None:
        """Add pᵀ·v to the rows of acc; where a hidden value is not finite, each query adds only its
        visible keys."""
        if self.finite or hidden is None:
            self._add_product(p, v)
            return
        self._add_product(p[:visible], v[:visible])
        for row, shown in enumerate(~hidden[:, : len(acc)].T):
            acc[row] += p[visible:, row][shown] @ v[visible:][shown]

    def _add_product(self, p: Array, v: Array) -> None:
        """Add pᵀ·v, of p [keys, queries], to the accumulator: partial sums over runs of equal
        length, then the rest."""
        keys, n = p.shape
        rows, d_v = min(n, _ROWS), v.shape[1]
        step = _step(rows, d_v)
        whole = keys // step * step
        acc = shaped(self.acc, n // rows, rows, d_v)
        for start, stop, run in ((0, whole, step), (whole, keys, keys - whole)):
            if stop > start:
                runs = (stop - start) // run
                left = p[start:stop].reshape(runs, run, n // rows, rows).transpose(2, 0, 3, 1)
                right = v[start:stop].reshape(runs, run, d_v)
                parts = shaped(self.partial, *left.shape[:3], d_v)
                np.matmul(left, right, out=parts)
                acc += parts[:, 0] if runs == 1 else parts.sum(axis=1)


def product(a: Array, b: Array, out: Array) -> None:
    """out = a·b of a [rows, D], b [D, columns], a run of rows at a time."""
    rows, (d, n) = len(a), b.shape
    step = _step(d, n)
    whole = rows // step * step
    if whole:
        runs = whole // step
        np.matmul(a[:whole].reshape(runs, step, d), b, out=out[:whole].reshape(runs, step, n))
    if whole < rows:
        np.matmul(a[whole:], b, out=out[whole:])


def joined(pieces: list[Array], scratch: Array, width: int) -> Array:
    """Pieces [rows, width] one after the other in scratch."""
    whole = shaped(scratch, sum(map(len, pieces)), width)
    at = 0
    for piece in pieces:
        np.copyto(whole[at : at + len(piece)], piece)
        at += len(piece)
    return whole
