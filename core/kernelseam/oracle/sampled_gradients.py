"""Some elements of an attention's gradients, from the forward's result and LSE.

Given these, every pair of a query and a key is computed by itself: a row of dq takes all keys, a
row of dk or dv all queries of its group's heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.frozen import dataclass
from kernelseam.oracle.formulas import Array, Floats, Variant
from kernelseam.oracle.gradients import PARTS, SPREAD, Gradient, Head, Parts, pairs, times, wide

Numbers = npt.NDArray[np.int64]
Sample = Callable[[int, int], Numbers]
"""(number of rows, pairs of a query and a key per row) → indices of the rows to compute."""


@dataclass(frozen=True)
class SampledGradient:
    """Elements of one gradient."""

    gradient: Gradient
    index: tuple[Numbers, ...]
    """Their indices: one array per axis of the whole, which broadcast to the elements' shape."""
    undefined: npt.NDArray[np.bool_]
    """Where a hidden pair meets a NaN or an infinity: its weight of 0 may be multiplied by it."""


@dataclass(frozen=True, eq=False)
class Forward:
    """The forward's operands and dout: [batch, head, row, column], lse [batch, head, row]."""

    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    dout: Array
    causal: bool
    scale: float
    variant: Variant

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        heads, kv_heads = self.q.shape[1], self.k.shape[1]
        return int(max(heads // max(kv_heads, 1), 1))

    def lengths(self, b: int) -> tuple[int, int]:
        """Queries and keys of an entry."""
        of_q, of_k = self.variant.q_lengths, self.variant.kv_lengths
        return (
            self.q.shape[2] if of_q is None else of_q[b],
            self.k.shape[2] if of_k is None else of_k[b],
        )

    def pairs(
        self, b: int, h: int, i: Numbers | None = None, j: Numbers | None = None
    ) -> tuple[Parts, Parts, Parts, Parts]:
        """p, dx, ds and the sink's part of one head's queries i and keys j; None: all of them."""
        n_q, n_k = self.lengths(b)
        i, j = np.arange(n_q) if i is None else i, np.arange(n_k) if j is None else j
        g = h // self.group
        return pairs(
            wide(self.q[b, h, i]),
            wide(self.k[b, g, j]),
            wide(self.v[b, g, j]),
            wide(self.dout[b, h, i]),
            Head(b, h, n_q, n_k, i, j),
            self.causal,
            self.scale,
            self.variant,
            (wide(self.out[b, h, i]), wide(self.lse[b, h, i])),
        )


def of_queries(x: Forward, sample: Sample) -> SampledGradient:
    """Rows of dq."""
    B, H, S_q, D = x.q.shape
    numbers = sample(B * H * S_q, x.k.shape[2])
    parts, undefined = _blank((len(numbers), D)), np.zeros((len(numbers), D), np.bool_)
    for (b, h), indices, i in _by_head(numbers, (B, H, S_q)):
        n_q, n_k = x.lengths(b)
        indices, i = indices[i < n_q], i[i < n_q]
        _, _, ds, _ = x.pairs(b, h, i)
        K = wide(x.k[b, h // x.group, :n_k])
        _add(parts, indices, times(ds, K, x.scale, n_k))
        undefined[indices] = _zero_times_nonfinite(ds, K)
    return SampledGradient(Gradient(**parts), _index(numbers, x.q.shape), undefined)


def of_keys(x: Forward, sample: Sample) -> tuple[SampledGradient, SampledGradient]:
    """The same rows of dk and of dv."""
    shapes = x.k.shape, x.v.shape
    numbers = sample(math.prod(shapes[0][:3]), x.q.shape[2] * x.group)
    parts = [_blank((len(numbers), s[3])) for s in shapes]
    undefined = [np.zeros((len(numbers), s[3]), np.bool_) for s in shapes]
    for (b, g), indices, j in _by_head(numbers, shapes[0][:3]):
        n_q, n_k = x.lengths(b)
        indices, j = indices[j < n_k], j[j < n_k]
        for h in range(g * x.group, (g + 1) * x.group if x.q.shape[1] else 0):
            p, _, ds, _ = x.pairs(b, h, None, j)
            products = (ds, x.q, x.scale), (p, x.dout, 1.0)
            for i, (pair, rows, scale) in enumerate(products):
                across, by = {n: part.T for n, part in pair.items()}, wide(rows[b, h, :n_q])
                _add(parts[i], indices, times(across, by, scale, n_q * x.group))
                undefined[i][indices] |= _zero_times_nonfinite(across, by)
    dk, dv = (
        SampledGradient(Gradient(**f), _index(numbers, s), u)
        for f, s, u in zip(parts, shapes, undefined, strict=True)
    )
    return dk, dv


def of_bias(x: Forward, shape: tuple[int, ...], rows: Numbers, columns: Numbers) -> SampledGradient:
    """Rows and columns of dbias, of a ``shape`` that is 1 where the bias repeats."""
    whole = (*x.q.shape[:3], x.k.shape[2])
    summed = tuple(m == 1 != n for n, m in zip(whole, shape, strict=True))
    lead = (len(rows), len(columns))
    parts, squares = _blank(lead), np.zeros(lead)
    for row, (b0, h0, i0) in enumerate(zip(*np.unravel_index(rows, shape[:3]), strict=True)):
        for b in range(whole[0]) if summed[0] else (int(b0),):
            n_q, n_k = x.lengths(b)
            i = np.arange(n_q) if summed[2] else np.array([i0])[np.array([i0]) < n_q]
            visible = columns < n_k
            j = np.arange(n_k) if summed[3] else columns[visible]
            at = np.array([row]), np.flatnonzero(visible | summed[3])
            for h in range(whole[1]) if summed[1] else (int(h0),):
                _, dx, _, _ = x.pairs(b, h, i, j)
                if summed[3]:
                    dx = {name: part.sum(axis=1, keepdims=True) for name, part in dx.items()}
                _add(parts, np.ix_(*at), {name: part.sum(axis=0) for name, part in dx.items()})
                squares[np.ix_(*at)] += (dx["outs"] ** 2).sum(axis=0)
    count = math.prod(n for n, s in zip(whole, summed, strict=True) if s)
    parts["single"] += math.sqrt(count) * parts["rounded"]
    parts["rounded"] = np.zeros(lead)
    if any(summed[:3]):  # the errors of rows are independent
        parts["outs"] = np.minimum(parts["outs"], SPREAD * np.sqrt(squares))
    index = *(n[:, None] for n in np.unravel_index(rows, shape[:3])), columns[None]
    return SampledGradient(Gradient(**parts), index, np.zeros(lead, np.bool_))


def of_sinks(x: Forward) -> SampledGradient:
    """dsinks, which takes no pair of a query and a key: all of it."""
    B, H = x.q.shape[:2]
    parts, squares, nothing = _blank((H,)), np.zeros(H), np.zeros(0, np.int64)
    for b, h in np.ndindex(B, H):
        part = x.pairs(b, h, None, nothing)[3]
        _add(parts, np.array([h]), {name: y.sum(keepdims=True) for name, y in part.items()})
        squares[h] += (part["outs"] ** 2).sum()
    parts["single"] += math.sqrt(B * x.q.shape[2]) * parts["rounded"]
    parts["rounded"] = np.zeros(H)
    parts["outs"] = np.minimum(parts["outs"], SPREAD * np.sqrt(squares))
    return SampledGradient(Gradient(**parts), (np.arange(H),), np.zeros(H, np.bool_))


def _by_head(
    numbers: Numbers, lead: tuple[int, ...]
) -> Iterator[tuple[tuple[int, int], Numbers, Numbers]]:
    """((batch, head), indices into ``numbers``, rows of the head) for each head that has any."""
    heads, rows = np.divmod(numbers, max(lead[2], 1))
    for head in np.unique(heads):
        indices = np.flatnonzero(heads == head)
        b, h = divmod(int(head), lead[1])
        yield (b, h), indices, rows[indices]


def _index(numbers: Numbers, shape: tuple[int, ...]) -> tuple[Numbers, ...]:
    return *(n[:, None] for n in np.unravel_index(numbers, shape[:3])), np.arange(shape[3])[None]


def _zero_times_nonfinite(x: Mapping[str, Floats], y: Floats) -> npt.NDArray[np.bool_]:
    """Where a product of rows x with y multiplies 0 by a NaN or an infinity."""
    bad = ~np.isfinite(y)
    if not bad.any():
        return np.zeros((len(x["value"]), y.shape[1]), np.bool_)
    undefined: npt.NDArray[np.bool_] = (x["value"] == 0).astype(float) @ bad.astype(float) > 0
    return undefined


def _blank(shape: tuple[int, ...]) -> Parts:
    return {name: np.zeros(shape) for name in PARTS}


def _add(to: Parts, index: Any, more: Mapping[str, Floats]) -> None:
    for name, x in more.items():
        to[name][index] += x
