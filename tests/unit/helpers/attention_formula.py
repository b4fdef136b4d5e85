"""The formula of attention that tests compare with, by the operations of whatever library its
arrays are of, which may differentiate it."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
from kernelseam.oracle.formulas import Variant
from kernelseam.oracle.gradients import attention_bwd

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
    shape = (*k.shape[:-2], q.shape[-3] // max(k.shape[-3], 1), S_q)
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


def gradients(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    bias_shape: tuple[int, ...] | None = None,
    **options: Any,
) -> dict[str, Array]:
    """dq, dk, dv, with a ``bias_shape`` dbias, and with sinks dsinks, of q [B, H, S_q, D] and so
    on: the oracle's, which test_parity_oracle_bwd.py holds to differences of its forward.
    ``options``: as ``attention`` takes them, and kv_lengths."""
    plane = *q.shape[:3], k.shape[2]
    shapes = {"bias": plane, "mask": plane, "alibi_slopes": plane[:2]}
    options |= {n: np.broadcast_to(options[n], s) for n, s in shapes.items() if n in options}
    scale = (q.shape[-1] ** -0.5 if q.shape[-1] else 1.0) if scale is None else scale
    made = attention_bwd(q, k, v, dout, causal, scale, Variant(**options), bias_shape)
    return {name: x.value for name, x in made.items()}


def close(actual: Array, expected: Array, magnitude: float = 1.0) -> None:
    """Within float32's sums (float64's where it is both) and the rounding of the result."""
    kind = actual.dtype.name
    sums = 1e-12 if kind == "float64" else 2e-5
    actual = actual.astype(np.float64)
    np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected))
    np.testing.assert_array_equal(actual[~np.isfinite(expected)], expected[~np.isfinite(expected)])
    actual, expected = actual[np.isfinite(expected)], expected[np.isfinite(expected)]
    assert (abs(actual - expected) <= 2 * ROUNDING[kind] * abs(expected) + sums * magnitude).all()
