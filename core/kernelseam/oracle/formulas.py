"""The oracle: what the operations mean, in float64, written as plainly as their formulas.

It shares no code with the reference implementation. Each result comes with the terms of its
bound in ``tolerances``. All arrays are on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.descriptors.attention.options import ScoreNumbers
from kernelseam.frozen import dataclass
from kernelseam.oracle.user_functions import Changed, Function, called, changed

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
WEIGHS = 2.0**-149
"""The smallest weight, relative to a row's largest, that float32 can hold."""
TOGETHER = 2**22
"""Scores that are computed at once."""
Rows = Sequence[int] | npt.NDArray[np.integer[Any]] | None
"""Row numbers of a result whose leading axes are flattened; None means all of them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Variant(ScoreNumbers):
    """The options of an attention beyond softmax(scale·q·kᵀ)·v; None: not used. B and H as in q."""

    window: tuple[int | None, int | None] = (None, None)
    """(left, right): distance from the diagonal up to which keys are attended to; None: no
    limit."""
    prefix_lengths: Sequence[int] | None = None
    """[B]: keys before it are always attended to."""
    alibi_slopes: Array | None = None
    """Slopes [B, H]."""
    bias: Array | None = None
    """[B, H, S_q, S_k]."""
    mask: Array | None = None
    """[B, H, S_q, S_k], True where a key may be attended to."""
    sinks: Array | None = None
    """[H]."""
    rounded_keys: bool = False
    """k and v may be rounded to q's dtype before they are multiplied: what bounds are of."""
    q_lengths: Sequence[int] | None = None
    """[B]: queries of an entry; rows after them are 0 in every result."""
    kv_lengths: Sequence[int] | None = None
    """[B]: keys of an entry."""
    q_scales: Array | None = None
    """[B, H, S_q]: what each query is multiplied by."""
    k_scales: Array | None = None
    """[B, H_kv, S_k]: what each key is multiplied by."""
    v_scales: Array | None = None
    score_mod: Function | None = None
    """The user's function: (score, b, h, q_idx, kv_idx) → a new score."""
    mask_mod: Function | None = None
    """(b, h, q_idx, kv_idx) → whether the key is visible."""

    def of_pairs(
        self, causal: bool, b: int, h: int, i: Array, j: Array, d: Array
    ) -> tuple[npt.NDArray[np.bool_], Floats, Floats, float]:
        """(which keys j are attended to by queries i, what their scores lose by the distance d, the
        bias, the sink) of a head."""
        attended = visible(d, causal, self.window)
        if self.prefix_lengths is not None:
            attended |= j < self.prefix_lengths[b]
        if self.mask is not None:
            attended &= self.mask[b, h][np.ix_(i, j)]
        slope = 0.0 if self.alibi_slopes is None else float(self.alibi_slopes[b, h])
        bias = np.zeros(d.shape)
        if self.bias is not None:
            bias = self.bias[b, h][np.ix_(i, j)].astype(np.float64)
        sink = -np.inf if self.sinks is None else float(self.sinks[h])
        return attended, slope * np.abs(d), bias, sink

    def masked(
        self, attended: npt.NDArray[np.bool_], b: int, h: int, i: Array, j: Array, *lengths: int
    ) -> npt.NDArray[np.bool_]:
        """Without the keys that mask_mod hides from queries i; ``lengths``: q_len, kv_len."""
        if self.mask_mod is None:
            return attended
        at = b, h, i[:, None], j[None]
        seen = called(self.mask_mod, *at, q_len=lengths[0], kv_len=lengths[1])
        result: npt.NDArray[np.bool_] = attended & seen.astype(bool)
        return result

    def changer(
        self, b: int, h: int, i: Array, j: Array, *lengths: int
    ) -> Callable[[Floats], Changed] | None:
        """What score_mod makes of the scores of queries i and keys j; None without one."""
        mod = self.score_mod
        if mod is None:
            return None
        at = b, h, i[:, None], j[None]
        return lambda x: changed(mod, x, *at, q_len=lengths[0], kv_len=lengths[1])


PLAIN = Variant()


@dataclass(frozen=True)
class AttentionResult:
    """Leading shape [B, H, S_q], or [rows] where rows were asked for."""

    out: Floats
    """[…, D_v]"""
    lse: Floats
    """[…]; natural logarithm of Σexp(score)."""
    pv: Floats
    """P|V|, […, D_v]: the probabilities times the values' magnitudes."""
    products: Floats
    """max of |scale|·Σ_d|q_d·k_d| over the visible keys, […]; not counting keys whose score is
    −inf."""
    largest: Floats
    """max over d of |scale·q_d|·max|k_d|, over the visible keys, […]: no term of a product is
    larger. Where keys may be rounded max √(Σ_d(scale·q_d·k_d)² / D_qk) over the visible keys."""
    values: Floats
    """Σ_j|v_j| / ℓ over the visible keys, […, D_v], with ℓ = Σexp(score − largest score). With
    scales 2·max_j|scale_j|·Σ_j|v_j| / ℓ, v_j without them."""
    spread: Floats
    """What independent errors of weights amount to, as a part of the largest of them, […, D_v]: the
    smaller of P|V| and |out| + 3·√Σ_j(P_j·v_j)²."""
    changes: Floats
    """max of |capped product| + |slope·d| + |bias| as far as a score has them, and |sink|, […],
    over keys whose weight is not 0 in float32."""


@dataclass(frozen=True)
class MergeResult:
    """Leading shape [B, H, rows]."""

    out: Floats
    lse: Floats
    magnitude: Floats
    """Σ_n e^(s_n − s)·|o_n|."""
    sizes: Floats
    """max of |s_n| over the parts whose weight is not 0 in float32, […]."""


@dataclass(frozen=True)
class GemmResult:
    """Shape of C, or [rows, N] where rows were asked for."""

    out: Floats
    magnitude: Floats
    """|alpha|·Σ|A||B| + |beta·C| + |bias| + |residual|."""
    products: Floats | None = None
    """|alpha|·Σ|A||B| alone; None where the magnitude has no other term."""


def attention(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    scale: float,
    rows: Rows = None,
    variant: Variant = PLAIN,
) -> AttentionResult:
    """softmax(scores)·v of q [B,H,S_q,D_qk], k [B,H_kv,S_k,D_qk], v [B,H_kv,S_k,D_v], any float
    dtype.

    Query head h uses KV head h // (H / H_kv). With d = j − i − (S_k − S_q), of the entry's own
    lengths, the score of key j for query i is softcap·tanh(scale·q·k/softcap) − slope·|d| + bias,
    and the key is visible iff the mask allows it and (j < prefix, or −left ≤ d ≤ right, and d ≤ 0
    where causal). Queries, keys and values are multiplied by their scales. A sink is a key of value
    0. A row without a visible key, or whose every score is −inf, gives zeros and an LSE of −inf.
    Hidden keys never contribute. ``rows``: numbers (b·H + h)·S_q + i.
    """
    B, H, S_q, _ = q.shape
    H_kv, S_k, D_v = v.shape[1:]
    numbers = np.arange(B * H * S_q) if rows is None else np.asarray(rows, np.int64)
    n = len(numbers)
    out, pv, values, spread = (np.zeros((n, D_v)) for _ in range(4))
    lse, products, largest, changes = (np.zeros(n) for _ in range(4))
    heads, queries = np.divmod(numbers, max(S_q, 1))
    for head in np.unique(heads):
        b, h = divmod(int(head), H)
        n_q = S_q if variant.q_lengths is None else variant.q_lengths[b]
        n_k = S_k if variant.kv_lengths is None else variant.kv_lengths[b]
        indices = np.flatnonzero((heads == head) & (queries < n_q))
        i, j = queries[indices], np.arange(n_k)
        d = j - i[:, None] - (n_k - n_q)
        attended, slopes, bias, sink = variant.of_pairs(causal, b, h, i, j, d)
        attended = variant.masked(attended, b, h, i, j, n_q, n_k)
        g = h // (H // H_kv)
        K, V = (x[b, g, :n_k].astype(np.float64) for x in (k, v))
        ones = np.ones(n_k)
        k_scales, v_scales = (
            ones if x is None else x[b, g, :n_k].astype(np.float64)
            for x in (variant.k_scales, variant.v_scales)
        )
        K *= k_scales[:, None]
        alike, which = np.unique(attended, axis=0, return_inverse=True)
        patterns = [np.flatnonzero(which.reshape(-1) == n) for n in range(len(alike))]
        # What is not finite must not be multiplied where it is hidden: queries that see the same
        # keys are computed together, over these alone. Else all are, over what any of them sees.
        together = np.isfinite(K).all() and np.isfinite(V * v_scales[:, None]).all()
        step = max(TOGETHER // max(n_k, 1), 1)
        some = [np.arange(n, min(n + step, len(i))) for n in range(0, len(i), step)]
        for of in some if together else patterns:
            keys, at = attended[of].any(axis=0), indices[of]
            Q = q[b, h, i[of]].astype(np.float64)
            if variant.q_scales is not None:
                Q *= variant.q_scales[b, h, i[of], None].astype(np.float64)
            with np.errstate(invalid="ignore", over="ignore"):
                o = _softmax_rows(
                    scale * (Q @ K[keys].T),
                    abs(scale) * (np.abs(Q) @ np.abs(K[keys]).T),
                    V[keys],
                    None if variant.v_scales is None else v_scales[keys],
                    variant.softcap,
                    slopes[of][:, keys],
                    bias[of][:, keys],
                    sink,
                    attended[of][:, keys],
                    variant.changer(b, h, i[of], j[keys], n_q, n_k),
                )
                out[at], lse[at], pv[at], products[at], values[at], spread[at], changes[at] = o
        for of, keys in zip(patterns, alike, strict=True):
            sizes = np.abs(q[b, h, i[of]].astype(np.float64))
            if variant.q_scales is not None:
                sizes *= np.abs(variant.q_scales[b, h, i[of], None].astype(np.float64))
            with np.errstate(invalid="ignore", over="ignore"):
                if variant.rounded_keys:
                    squares = (sizes**2 @ K[keys].T ** 2).max(axis=1, initial=0)
                    largest[indices[of]] = abs(scale) * np.sqrt(squares / sizes.shape[1])
                    continue
                of_keys = np.abs(K[keys]).max(axis=0, initial=0)
                largest[indices[of]] = abs(scale) * (sizes * of_keys).max(axis=1, initial=0)
    lead = (B, H, S_q) if rows is None else (n,)
    return AttentionResult(
        out.reshape(*lead, D_v),
        lse.reshape(lead),
        pv.reshape(*lead, D_v),
        products.reshape(lead),
        largest.reshape(lead),
        values.reshape(*lead, D_v),
        spread.reshape(*lead, D_v),
        changes.reshape(lead),
    )


def visible(d: Array, causal: bool, window: tuple[int | None, int | None]) -> npt.NDArray[np.bool_]:
    """Which distances from the diagonal are in the band."""
    left, right = window
    attended = np.ones(d.shape, bool)
    if causal:
        attended &= d <= 0
    if left is not None:
        attended &= d >= -left
    if right is not None:
        attended &= d <= right
    return attended


def _softmax_rows(
    x: Floats,
    magnitude: Floats,
    V: Floats,
    v_scales: Floats | None,
    cap: float | None,
    slopes: Floats,
    bias: Floats,
    sink: float,
    seen: npt.NDArray[np.bool_],
    change: Callable[[Floats], Changed] | None = None,
) -> tuple[Floats, Floats, Floats, Floats, Floats, Floats, Floats]:
    """The formula for queries of which each sees some of V's keys, from x = scale·q·kᵀ and
    |scale|·|q||k|: out, LSE and the bound's ingredients. The sink is the last column. V is without
    its scales."""
    stored = V
    if v_scales is not None:
        V = V * v_scales[:, None]
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        capped = x if cap is None else cap * np.tanh(x / cap)
        own = capped - slopes + bias
        sizes = (0 if cap is None else np.abs(capped)) + np.abs(slopes) + np.abs(bias)
        if change is not None:
            new = change(own)
            own, growth = new.scores, np.abs(new.slope)
            magnitude, sizes = magnitude * growth, sizes * growth + np.abs(own)
        scores = _with_sink(np.where(seen, own, -np.inf), sink)
        V = np.concatenate([V, np.zeros((1, V.shape[1]))])
        largest = scores.max(axis=1)
        nothing = np.isneginf(largest)
        weights = np.exp(scores - np.where(nothing, 0, largest)[:, None])
        total = np.where(nothing, 1, weights.sum(axis=1))
        lse = largest + np.log(total)
        out = weights @ V / total[:, None]
        pv = weights @ np.abs(V) / total[:, None]
        spread = np.abs(out) + 3 * np.sqrt(weights**2 @ V**2) / total[:, None]
        spread = np.fmin(spread, pv)
        if cap is not None:  # an infinite score is capped exactly
            magnitude = np.where(np.isinf(x), 0, magnitude)
        products = np.where(np.isneginf(scores), 0, _with_sink(magnitude, 0)).max(axis=1)
        values = seen @ np.abs(V[:-1]) / total[:, None]
        if v_scales is not None:
            largest_scale = np.where(seen, np.abs(v_scales), 0).max(axis=1, initial=0)
            values = 2 * largest_scale[:, None] * (seen @ np.abs(stored)) / total[:, None]
        sizes = _with_sink(sizes, abs(sink))
        changes = np.where(weights >= WEIGHS, sizes, 0).max(axis=1)
    out[nothing], pv[nothing], values[nothing], spread[nothing] = 0, 0, 0, 0
    return out, lse, pv, products, values, spread, changes


def _with_sink(x: Floats, value: float) -> Floats:
    return np.concatenate([x, np.full((len(x), 1), float(value))], axis=1)


def merge_states(outs: Array, lses: Array) -> MergeResult:
    """Σ_n e^(s_n − s)·o_n with s = ln Σ_n e^(s_n), of outs [N,B,H,rows,D_v] and lses [N,B,H,rows].
    Parts with s_n = −inf never contribute; where all are −inf, out is 0 and s −inf."""
    s = lses.astype(np.float64)
    o = np.where(np.isneginf(s)[..., None], 0, outs.astype(np.float64))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        largest = s.max(axis=0, initial=-np.inf)
        nothing = np.isneginf(largest)
        weights = np.exp(s - np.where(nothing, 0, largest))
        total = np.where(nothing, 1, weights.sum(axis=0))
        out = (weights[..., None] * o).sum(axis=0) / total[..., None]
        magnitude = (weights[..., None] * np.abs(o)).sum(axis=0) / total[..., None]
        sizes = np.where(weights >= WEIGHS, np.abs(s), 0).max(axis=0, initial=0)
        return MergeResult(out, largest + np.log(total), magnitude, np.where(nothing, 0, sizes))


def gemm(
    a: Array,
    b: Array,
    c: Array | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    a_transposed: bool = False,
    b_transposed: bool = False,
    rows: Rows = None,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    batch_group: int = 1,
    head_group: int = 1,
    a_scales: Array | None = None,
    b_scales: Array | None = None,
) -> GemmResult:
    """alpha·Σ op(A)·op(B) + beta·C + bias + residual of A [B,H,M,K], B [B,H/g,K,N] as they lie in
    memory, bias [B',H',N], C and residual [B',H',M,N], any float dtype.

    op swaps the last two axes where the operand is transposed; matrix h of A meets matrix h // g of
    B. C of batch b' and head h' sums the products of batches b and heads h with b // batch_group =
    b' and h // head_group = h'. beta = 0 does not read C; alpha = 0 or K = 0 does not read A and B.
    Rows of op(A) are multiplied by ``a_scales`` [B,H,M], columns of op(B) by ``b_scales``
    [B,H/g,N]; or their elements, by [B,H,M,K] and [B,H/g,N,K]. ``rows``: numbers (b'·H' + h')·M +
    i.
    """
    A, B = (x.swapaxes(2, 3) if t else x for x, t in ((a, a_transposed), (b, b_transposed)))
    batch, heads, M, K = A.shape
    N = B.shape[3]
    if beta != 0 and c is None:
        raise ValueError("beta is not 0: C is needed")
    shared = heads // max(B.shape[1], 1)
    lead = (batch // batch_group, heads // head_group, M)
    numbers = np.arange(lead[0] * lead[1] * M) if rows is None else np.asarray(rows, np.int64)
    out, magnitude, products = (np.zeros((len(numbers), N)) for _ in range(3))
    results, at = np.divmod(numbers, max(M, 1))
    with np.errstate(invalid="ignore", over="ignore"):
        for result in np.unique(results):
            i, j = divmod(int(result), lead[1])
            indices = np.flatnonzero(results == result)
            if alpha != 0 and K > 0:
                for k, n in np.ndindex(batch_group, head_group):
                    entry, h = i * batch_group + k, j * head_group + n
                    left, right = (
                        A[entry, h, at[indices]].astype(np.float64),
                        B[entry, h // shared].astype(np.float64),
                    )
                    if a_scales is not None:
                        of_rows = a_scales[entry, h, at[indices]]
                        left = left * (of_rows[:, None] if of_rows.ndim == 1 else of_rows)
                    if b_scales is not None:
                        right = right * b_scales[entry, h // shared].T
                    out[indices] += left @ right
                    magnitude[indices] += np.abs(left) @ np.abs(right)
                out[indices] *= alpha
                magnitude[indices] *= abs(alpha)
                products[indices] = magnitude[indices]
            for factor, x in ((beta, c), (1.0, residual)):
                if factor != 0 and x is not None:
                    added = factor * x[i, j, at[indices]].astype(np.float64)
                    out[indices] += added
                    magnitude[indices] += np.abs(added)
            if bias is not None:
                out[indices] += bias[i, j].astype(np.float64)
                magnitude[indices] += np.abs(bias[i, j].astype(np.float64))
    return GemmResult(
        *(x.reshape(*lead, N) if rows is None else x for x in (out, magnitude, products))
    )


def sample_rows(total: int, limit: int, seed: int = 0) -> npt.NDArray[np.int64] | None:
    """At most ``limit`` of ``total`` row numbers, sorted, the first and the last among them; None
    where all fit."""
    if total <= limit:
        return None
    inner = np.random.default_rng(seed).choice(total - 2, max(limit - 2, 0), replace=False) + 1
    return np.sort(np.concatenate([[0, total - 1], inner]))
