"""What the reference attention is held to: its formula, one query at a time, in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}


def formula(
    q: Array, k: Array, v: Array, *, sink: float = -math.inf, **options: Any
) -> tuple[Array, Array]:
    """(out [S_q, D_v], lse [S_q]) of one head, row by row in float64: q [S_q, D], k [S_k, D], v
    [S_k, D_v]; the options are those of ``scores``."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), sink)
    for i in range(len(q)):
        seen, x, _ = scores(q, k, i, **options)
        top = np.append(x, sink).max()
        if top != -math.inf:
            total = np.exp(np.append(x, sink) - top).sum()
            out[i], lse[i] = np.exp(x - top) @ v[seen] / total, top + np.log(total)
    return out, lse


def scores(
    q: Array,
    k: Array,
    i: int,
    *,
    scale: float,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    prefix: int = 0,
    softcap: float | None = None,
    slope: float = 0.0,
    bias: Array | None = None,
    mask: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Of query i: the keys that it sees, as bools [S_k], their scores, and the scores' derivatives
    by scale·q·k. Bias and mask are [S_q, S_k] or larger."""
    S_q, S_k = len(q), len(k)
    left, right = window or (None, None)
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
    derivative = np.ones(len(x))
    if softcap is not None:
        t = np.tanh(x / softcap)
        x, derivative = softcap * t, 1 - t**2
    x = x - slope * np.abs(d[seen])
    if bias is not None:
        x = x + bias[i, :S_k][seen].astype(np.float64)
    return seen, x, derivative


def gradients(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    out: Array,
    lse: Array,
    *,
    scale: float,
    sink: float = -math.inf,
    **options: Any,
) -> tuple[Array, Array, Array, Array, float]:
    """(dq, dk, dv, dx [S_q, S_k], dsink) of one head, row by row in float64 over the keys that a
    row sees, from what the forward left."""
    q, k, v, dout, out, lse = (x.astype(np.float64) for x in (q, k, v, dout, out, lse))
    dq, dk, dv, dx, dsink = (
        np.zeros(q.shape),
        np.zeros(k.shape),
        np.zeros(v.shape),
        np.zeros((len(q), len(k))),
        0.0,
    )
    for i in range(len(q)):
        seen, x, derivative = scores(q, k, i, scale=scale, **options)
        if lse[i] == -math.inf:
            continue
        delta = dout[i] @ out[i]
        p = np.exp(x - lse[i])
        of_x = np.where(p == 0, 0, p * (v[seen] @ dout[i] - delta))
        of_product = np.where(p == 0, 0, scale * derivative * of_x)
        dq[i] = of_product @ k[seen]
        dk[seen] += of_product[:, None] * q[i]
        dv[seen] += p[:, None] * dout[i]
        dx[i, seen] = of_x
        dsink -= np.exp(sink - lse[i]) * delta
    return dq, dk, dv, dx, dsink


def close(actual: Array, expected: Array, magnitude: float = 1.0) -> None:
    """Within float32's sums (float64's where it is both) and the rounding of the result."""
    kind = actual.dtype.name
    sums = 1e-12 if kind == "float64" else 2e-5
    actual = actual.astype(np.float64)
    np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected))
    np.testing.assert_array_equal(actual[~np.isfinite(expected)], expected[~np.isfinite(expected)])
    actual, expected = actual[np.isfinite(expected)], expected[np.isfinite(expected)]
    assert (abs(actual - expected) <= 2 * ROUNDING[kind] * abs(expected) + sums * magnitude).all()
