"""The oracle: what the operations mean, in float64, written as plainly as their formulas.

It shares no code with the reference implementation. Beside each result it gives what the bounds in
``tolerances`` are made of. Everything here takes and gives host arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Rows = Sequence[int] | npt.NDArray[np.integer[Any]] | None
"""Row numbers of a result whose leading axes are flattened; None means all of them."""


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
    """max of |scale|·Σ_d|q_d·k_d| over the visible keys, […]; not counting keys whose score is −inf."""
    values: Floats
    """Σ_j|v_j| / ℓ over the visible keys, […, D_v], with ℓ = Σexp(score − largest score)."""


@dataclass(frozen=True)
class GemmResult:
    """Shape of C, or [rows, N] where rows were asked for."""

    out: Floats
    magnitude: Floats
    """|alpha|·|A||B| + |beta·C|."""


def attention(q: Array, k: Array, v: Array, causal: bool, scale: float, rows: Rows = None) -> AttentionResult:
    """softmax(scale·q·kᵀ)·v of q [B,H,S_q,D_qk], k [B,H_kv,S_k,D_qk], v [B,H_kv,S_k,D_v], any float dtype.

    Query head h uses KV head h // (H / H_kv). Causal: key j is visible to query i iff j ≤ i + (S_k − S_q). A row that
    sees no key, or whose every score is −inf, gives zeros and an LSE of −inf. What is masked never contributes.
    ``rows``: numbers (b·H + h)·S_q + i.
    """
    B, H, S_q, _ = q.shape
    H_kv, S_k, D_v = v.shape[1:]
    numbers = np.arange(B * H * S_q) if rows is None else np.asarray(rows, np.int64)
    n = len(numbers)
    out, pv, values = (np.zeros((n, D_v)) for _ in range(3))
    lse, products = np.full(n, -np.inf), np.zeros(n)
    heads, queries = np.divmod(numbers, max(S_q, 1))
    for head in np.unique(heads):
        b, h = divmod(int(head), H)
        here = np.flatnonzero(heads == head)
        K = k[b, h // (H // H_kv)].astype(np.float64)
        V = v[b, h // (H // H_kv)].astype(np.float64)
        visible = np.clip(queries[here] + 1 + S_k - S_q, 0, S_k) if causal else np.full(len(here), S_k)
        for count in np.unique(visible):
            if count == 0:
                continue
            at = here[visible == count]
            Q = q[b, h, queries[at]].astype(np.float64)
            o = _softmax_rows(Q, K[:count], V[:count], scale)
            out[at], lse[at], pv[at], products[at], values[at] = o
    lead = (B, H, S_q) if rows is None else (n,)
    return AttentionResult(
        out.reshape(*lead, D_v), lse.reshape(lead), pv.reshape(*lead, D_v), products.reshape(lead),
        values.reshape(*lead, D_v),
    )


def _softmax_rows(Q: Floats, K: Floats, V: Floats, scale: float) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """The formula, for queries that see all of K: out, LSE and the bound's ingredients."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scores = scale * (Q @ K.T)
        largest = scores.max(axis=1)
        nothing = np.isneginf(largest)
        weights = np.exp(scores - np.where(nothing, 0, largest)[:, None])
        total = np.where(nothing, 1, weights.sum(axis=1))
        lse = largest + np.log(total)
        out = weights @ V / total[:, None]
        pv = weights @ np.abs(V) / total[:, None]
        products = np.where(np.isneginf(scores), 0, abs(scale) * (np.abs(Q) @ np.abs(K).T)).max(axis=1)
        values = np.abs(V).sum(axis=0) / total[:, None]
    out[nothing], pv[nothing], values[nothing] = 0, 0, 0
    return out, lse, pv, products, values


def gemm(
    a: Array, b: Array, c: Array | None = None, alpha: float = 1.0, beta: float = 0.0,
    a_transposed: bool = False, b_transposed: bool = False, rows: Rows = None,
) -> GemmResult:
    """alpha·op(A)·op(B) + beta·C of A [B,H,M,K], B [B,H/g,K,N], C [B,H,M,N] as they lie in memory, any float dtype.

    op swaps the last two axes where the operand is transposed; matrix h of A meets matrix h // g of B. beta = 0 does
    not read C; alpha = 0 or K = 0 gives beta·C and does not read A and B. ``rows``: numbers (b·H + h)·M + i.
    """
    A, B = (x.swapaxes(2, 3) if t else x for x, t in ((a, a_transposed), (b, b_transposed)))
    batch, heads, M, K = A.shape
    N = B.shape[3]
    if beta != 0 and c is None:
        raise ValueError("beta is not 0: C is needed")
    group = heads // max(B.shape[1], 1)
    if rows is None:
        lead: tuple[int, ...] = (batch, heads, M)
        A, B = A.astype(np.float64), np.repeat(B.astype(np.float64), max(group, 1), axis=1)
        product, magnitude = _products(A, B) if alpha != 0 and K > 0 else (np.zeros((*lead, N)),) * 2
        old = np.zeros((*lead, N)) if c is None or beta == 0 else c.astype(np.float64)
    else:
        numbers = np.asarray(rows, np.int64)
        product, magnitude, old = (np.zeros((len(numbers), N)) for _ in range(3))
        matrices, at = np.divmod(numbers, max(M, 1))
        for matrix in np.unique(matrices):
            i, h = divmod(int(matrix), heads)
            here = np.flatnonzero(matrices == matrix)
            if alpha != 0 and K > 0:
                left, right = A[i, h, at[here]].astype(np.float64), B[i, h // group].astype(np.float64)
                product[here], magnitude[here] = _products(left, right)
            if beta != 0 and c is not None:
                old[here] = c[i, h, at[here]]
    with np.errstate(invalid="ignore", over="ignore"):
        return GemmResult(alpha * product + beta * old, abs(alpha) * magnitude + np.abs(beta * old))


def _products(A: Floats, B: Floats) -> tuple[Floats, Floats]:
    """AB and |A||B|."""
    with np.errstate(invalid="ignore", over="ignore"):
        return A @ B, np.abs(A) @ np.abs(B)


def sample_rows(total: int, limit: int, seed: int = 0) -> npt.NDArray[np.int64] | None:
    """At most ``limit`` of ``total`` row numbers, sorted, the first and the last among them; None where all fit."""
    if total <= limit:
        return None
    inner = np.random.default_rng(seed).choice(total - 2, max(limit - 2, 0), replace=False) + 1
    return np.sort(np.concatenate([[0, total - 1], inner]))
