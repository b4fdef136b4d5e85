"""The oracle of the projections: their formulas in float64.

Each result comes with its magnitude and the number of its terms, from which the GEMM's bound is
computed.
"""

from __future__ import annotations

import numpy as np

from kernelseam.oracle.formulas import Array, Floats, GemmResult
from kernelseam.oracle.rotary import rotate

Results = dict[str, tuple[GemmResult, int]]


def qkv_projection(
    x: Array,
    weight: Array,
    bias: Array | None,
    heads: int,
    kv_heads: int,
    dim: int,
    cos: Array | None = None,
    sin: Array | None = None,
    style: str = "",
    positions: Array | None = None,
) -> Results:
    """q [B, heads, S, dim], k and v [B, kv_heads, S, dim] of x [B, S, K] and weight [(heads +
    2·kv_heads)·dim, K]. q and k are rotated by the row of cos and sin [positions, n / 2] that
    ``positions`` [B, S] gives."""
    with np.errstate(invalid="ignore", over="ignore"):
        y, size = _linear(x, weight, bias)
        (B, S), total = x.shape[:2], heads + 2 * kv_heads
        y, size = (a.reshape(B, S, total, dim).transpose(0, 2, 1, 3).copy() for a in (y, size))
        if style and cos is not None and sin is not None and positions is not None:
            rotated = y[:, : heads + kv_heads], size[:, : heads + kv_heads]
            rotate(*rotated, (cos, sin), style, positions)
    parts = {
        "q": slice(heads),
        "k": slice(heads, heads + kv_heads),
        "v": slice(heads + kv_heads, None),
    }
    return {name: (GemmResult(y[:, of], size[:, of]), x.shape[2]) for name, of in parts.items()}


def output_projection(
    attn_out: Array, weight: Array, bias: Array | None, residual: Array | None
) -> Results:
    """out [B, 1, S, hidden] of attn_out [B, H, S, D], weight [hidden, H·D], bias [hidden] and
    residual [B, 1, S, hidden]."""
    rows = tokens(attn_out)
    with np.errstate(invalid="ignore", over="ignore"):
        y, size = _linear(rows, weight, bias, None if residual is None else residual[:, 0])
    return {"out": (GemmResult(y[:, None], size[:, None]), rows.shape[2])}


def qkv_projection_bwd(
    dq: Array, dk: Array, dv: Array, x: Array | None, weight: Array | None
) -> Results:
    """d_input [B, 1, S, K], d_weight [1, 1, N, K] and d_bias [N] of dq [B, H, S, D], dk and dv [B,
    H_kv, S, D], x [B, 1, S, K] and weight [1, 1, N, K]; without weight or x, without the gradient
    that needs it."""
    results = output_projection_bwd(tokens(dq, dk, dv)[:, None], x, weight, 1)
    return {n.replace("attn_out", "input"): result for n, result in results.items()}


def output_projection_bwd(
    d_output: Array, attn_out: Array | None, weight: Array | None, heads: int
) -> Results:
    """d_attn_out [B, H, S, D], d_weight [1, 1, hidden, H·D] and d_bias [hidden] of d_output [B, 1,
    S, hidden], attn_out and weight; without weight or attn_out, without the gradient that
    needs it."""
    d = d_output[:, 0].astype(np.float64)
    results: Results = {"d_bias": _sums(d)}
    if weight is not None:
        result, count = _product(d, weight[0, 0].astype(np.float64))
        split = (*d.shape[:2], heads, result.out.shape[2] // heads)
        out, size = (a.reshape(split).swapaxes(1, 2) for a in (result.out, result.magnitude))
        results["d_attn_out"] = (GemmResult(out, size), count)
    if attn_out is not None:
        results["d_weight"] = _outer(d, tokens(attn_out).astype(np.float64))
    return results


def tokens(*parts: Array) -> Array:
    """[B, H, S, D] of each part → [B, S, H·D of all]."""
    return np.concatenate(
        [x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], x.shape[1] * x.shape[3]) for x in parts],
        axis=2,
    )


def _linear(x: Array, weight: Array, *added: Array | None) -> tuple[Floats, Floats]:
    """x·weightᵀ and what is added, in this order, and the sum of magnitudes."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    y, size = x @ weight.T, np.abs(x) @ np.abs(weight).T
    for term in added:
        if term is not None:
            y, size = y + term.astype(np.float64), size + np.abs(term.astype(np.float64))
    return y, size


def _product(a: Floats, b: Floats) -> tuple[GemmResult, int]:
    with np.errstate(invalid="ignore", over="ignore"):
        return GemmResult(a @ b, np.abs(a) @ np.abs(b)), len(b)


def _outer(d: Floats, x: Floats) -> tuple[GemmResult, int]:
    """Σ over all tokens of dᵀ·x, [1, 1, columns of d, columns of x]."""
    result, count = _product(_rows(d).T, _rows(x))
    return GemmResult(result.out[None, None], result.magnitude[None, None]), count


def _sums(d: Floats) -> tuple[GemmResult, int]:
    d = _rows(d)
    return GemmResult(d.sum(axis=0), np.abs(d).sum(axis=0)), len(d)


def _rows(x: Floats) -> Floats:
    """All tokens."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])
