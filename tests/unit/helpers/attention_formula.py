"""The formula of attention that tests compare with: of whole heads, by the operations of whatever
library their arrays are of, which may differentiate it; and one query at a time in NumPy, where
hidden keys and values may be NaN."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
WIDE = {"numpy": "f8", "cupy": "f8"}
ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}


@np.errstate(invalid="ignore")
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    prefix_lengths: Any = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
) -> tuple[Any, Any]:
    """(out [..., H, S_q, D_v], lse [..., H, S_q]) of q [..., H, S_q, D], k [..., H_kv, S_k, D] and
    v [..., H_kv, S_k, D_v]: arrays of NumPy, torch or JAX, computed in float64, of JAX in float32.
    prefix_lengths [...], alibi_slopes [..., H], sinks [H] or [..., H, S_q, 1]; bias and mask
    broadcast."""
    library = type(q).__module__.partition(".")[0]
    xp = importlib.import_module({"jax": "jax.numpy", "jaxlib": "jax.numpy"}.get(library, library))

    def here(x: Any) -> Any:
        return xp.as_tensor(x, device=q.device) if library == "torch" else xp.asarray(x)

    def wide(x: Any) -> Any:
        return here(x).double() if library == "torch" else here(x).astype(WIDE.get(library, "f4"))

    (S_q, D), S_k = q.shape[-2:], k.shape[-2]
    shape = (*k.shape[:-2], q.shape[-3] // k.shape[-3], S_q)
    grouped = wide(q).reshape(*shape, D)
    keys, values = (wide(x)[..., None, :, :] for x in (k, v))
    x = (grouped @ keys.swapaxes(-1, -2)).reshape(*q.shape[:-1], S_k)
    x = x * ((D**-0.5 if D else 1.0) if scale is None else scale)
    if softcap:
        x = softcap * xp.tanh(x / softcap)
    d = here(np.arange(S_k) - np.arange(S_q)[:, None] - (S_k - S_q))
    if alibi_slopes is not None:
        x = x - wide(alibi_slopes)[..., None, None] * abs(d)
    if bias is not None:
        x = x + wide(bias)
    left, right = window or (None, None)
    seen = here(np.ones((S_q, S_k), bool))
    if causal:
        seen = seen & (d <= 0)
    if left is not None:
        seen = seen & (d >= -left)
    if right is not None:
        seen = seen & (d <= right)
    if prefix_lengths is not None:
        seen = seen | (here(np.arange(S_k)) < here(prefix_lengths)[..., None, None, None])
    if mask is not None:
        seen = seen & here(mask)
    x = xp.where(seen, x, -math.inf)
    zeros = xp.zeros_like(x.sum(-1))
    if sinks is not None:
        of_rows = sinks if sinks.ndim == q.ndim else sinks[..., None, None]
        x = xp.concatenate([x, wide(of_rows) + zeros[..., None]], -1)
    top = xp.amax(x, -1) if S_k or sinks is not None else zeros - math.inf
    base = xp.where(top == -math.inf, 0.0, top)
    p = xp.exp(x - base[..., None])
    total = p.sum(-1)
    whole = xp.where(total == 0, 1.0, total)
    weights = (p / whole[..., None])[..., :S_k].reshape(*shape, S_k)
    if library == "numpy" and not np.isfinite(values).all():  # of which hidden ones do not count
        every = np.broadcast_to(seen, (*q.shape[:-1], S_k)).reshape(*shape, S_k, 1)
        parts = np.where(every, weights[..., None] * values[..., None, :, :], 0)
        out = parts.sum(-2)
    else:
        out = weights @ values
    lse = xp.where(total == 0, -math.inf, xp.log(whole) + base)
    return out.reshape(*q.shape[:-1], v.shape[-1]), lse


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
