"""What the reference attention is held to: its formula, one query at a time, in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}


def formula(
    q: Array, k: Array, v: Array, *, scale: float, causal: bool = False,
    window: tuple[int | None, int | None] | None = None, prefix: int = 0, softcap: float | None = None,
    slope: float = 0.0, bias: Array | None = None, mask: Array | None = None, sink: float = -math.inf,
) -> tuple[Array, Array]:
    """(out [S_q, D_v], lse [S_q]) of one head, row by row in float64: q [S_q, D], k [S_k, D], v [S_k, D_v], bias and
    mask [S_q, S_k] or larger."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    S_q, S_k = len(q), len(k)
    out, lse = np.zeros((S_q, v.shape[1])), np.full(S_q, sink)
    left, right = window or (None, None)
    for i in range(S_q):
        d = np.arange(S_k) - i - (S_k - S_q)
        seen = np.ones(S_k, bool)
        if causal:
            seen &= d <= 0
        if left is not None:
            seen &= d >= -left
        if right is not None:
            seen &= d <= right
        seen |= np.arange(S_k) < prefix
        if mask is not None:
            seen &= mask[i, :S_k]
        x = scale * (k[seen] @ q[i])
        if softcap is not None:
            x = softcap * np.tanh(x / softcap)
        x = x - slope * np.abs(d[seen])
        if bias is not None:
            x = x + bias[i, :S_k][seen].astype(np.float64)
        top = np.append(x, sink).max()
        if top != -math.inf:
            total = np.exp(np.append(x, sink) - top).sum()
            out[i], lse[i] = np.exp(x - top) @ v[seen] / total, top + np.log(total)
    return out, lse


def close(got: Array, want: Array, magnitude: float = 1.0) -> None:
    """Within float32's sums (float64's where it is both) and the rounding of the result."""
    kind = got.dtype.name
    sums = 1e-12 if kind == "float64" else 2e-5
    got = got.astype(np.float64)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    np.testing.assert_array_equal(got[~np.isfinite(want)], want[~np.isfinite(want)])
    got, want = got[np.isfinite(want)], want[np.isfinite(want)]
    assert (abs(got - want) <= 2 * ROUNDING[kind] * abs(want) + sums * magnitude).all()
