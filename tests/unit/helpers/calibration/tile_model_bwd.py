"""A tile kernel's gradients in NumPy: products and sums in float32, p and ds rounded to the inputs'
dtype.

It calibrates the bounds, and faults injected into it show that each is detected by some case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from kernelseam.oracle.formulas import PLAIN, Array, Variant

from calibration.tile_model import LOG2_E, Single

FAULTS = {
    "no-delta": "Σ dout·out is not subtracted",
    "delta-of-the-first-row": "Σ dout·out is that of another row",
    "no-scale-dq": "dq lacks the scale",
    "no-scale-dk": "dk lacks the scale",
    "heads-not-summed": "dk and dv are those of a group's last head",
    "wrong-kv-head": "query head h takes KV head h mod H_kv",
    "causal-off-by-one": "a query sees one key too many",
    "causal-one-short": "a query does not see its own key",
    "causal-top-left": "the mask is aligned at the top left",
    "window-one-wider": "a band is one key wider to the left",
    "window-one-short": "a band is one key short to the right",
    "prefix-forgotten": "keys before the prefix are not seen",
    "mask-forgotten": "keys that the mask hides are seen",
    "no-cap": "scores are not capped",
    "no-cap-slope": "1 − tanh² is left out",
    "cap-slope-in-dbias": "1 − tanh² is in dbias too",
    "no-slopes": "scores lack slope·|d|",
    "no-bias": "scores lack the bias",
    "bias-not-summed": "dbias is that of the first entry, head, query or key where the bias "
    "repeats",
    "sinks-sign": "dsinks has the other sign",
    "sinks-without-lse": "dsinks lacks e^(−lse)",
    "last-key": "the last key is left out",
    "last-query": "the last query is left out",
    "lengths-one-less": "every entry has one key less",
    "lse-base-2": "the LSE is taken for one to base 2",
    "half-scores": "scores are rounded to the inputs' dtype",
}


def attention_bwd(
    x: Mapping[str, Array],
    causal: bool,
    scale: float,
    variant: Variant = PLAIN,
    bias_shape: tuple[int, ...] | None = None,
    *,
    fault: str = "",
    exp2: Callable[[Single], Single] = np.exp2,
) -> dict[str, Array]:
    """Gradients by name of q, k, v, dout, out and lse in ``x``, of their dtypes; dbias of the
    bias's."""
    q, k, v, dtype = x["q"], x["k"], x["v"], x["q"].dtype
    (B, H, S_q, _), G, S_k = q.shape, k.shape[1], k.shape[2]
    group = max(H // max(G, 1), 1)
    dq, dk, dv = (np.zeros(y.shape, np.float32) for y in (q, k, v))
    plane, dsinks = np.zeros((B, H, S_q, S_k), np.float32), np.zeros(H, np.float32)
    for b, h in np.ndindex(B, H):
        n_q = S_q if variant.q_lengths is None else variant.q_lengths[b]
        n_k = S_k if variant.kv_lengths is None else variant.kv_lengths[b]
        n_k -= fault == "lengths-one-less" and n_k > 0
        g = h % G if fault == "wrong-kv-head" else h // group
        Q, dO, out = (y[b, h, :n_q].astype(np.float32) for y in (q, x["dout"], x["out"]))
        K, V = (y[b, g, :n_k].astype(np.float32) for y in (k, v))
        lse = x["lse"][b, h, :n_q].astype(np.float32)
        s, seen, flat = _scores(Q @ K.T, b, h, n_q, n_k, causal, scale, variant, fault)
        if fault == "half-scores":
            s = s.astype(dtype).astype(np.float32)
        base = np.where(
            np.isneginf(lse), np.inf, lse * np.float32(1 if fault == "lse-base-2" else LOG2_E)
        )
        p = np.where(
            seen, exp2((s * np.float32(LOG2_E) - base[:, None]).astype(np.float32)), 0
        ).astype(np.float32)
        delta = (dO * out).sum(axis=1)
        if fault == "delta-of-the-first-row":
            delta = np.broadcast_to(delta[:1], delta.shape)
        dx = np.where(p == 0, 0, p * (dO @ V.T - (0 if fault == "no-delta" else delta[:, None])))
        ds = dx if fault == "no-cap-slope" else dx * flat
        p, dx, ds = (y.astype(np.float32) for y in (p, dx, ds))
        p16, ds16 = (y.astype(dtype).astype(np.float32) for y in (p, ds))
        dq[b, h, :n_q] = ds16 @ K * np.float32(1 if fault == "no-scale-dq" else scale)
        if fault == "heads-not-summed":
            dk[b, g], dv[b, g] = 0, 0
        dk[b, g, :n_k] += ds16.T @ Q * np.float32(1 if fault == "no-scale-dk" else scale)
        dv[b, g, :n_k] += p16.T @ dO
        plane[b, h, :n_q, :n_k] = dx * flat if fault == "cap-slope-in-dbias" else dx
        if variant.sinks is not None:
            sink = np.float32(variant.sinks[h])
            over = np.where(np.isneginf(lse), np.inf, 0 if fault == "sinks-without-lse" else lse)
            weight = exp2((sink - over) * LOG2_E)
            dsinks[h] += (1 if fault == "sinks-sign" else -1) * (
                weight.astype(np.float32) * delta
            ).sum()
    gradients: dict[str, Array] = {
        "dq": dq.astype(dtype),
        "dk": dk.astype(dtype),
        "dv": dv.astype(dtype),
    }
    if bias_shape is not None:
        axes = tuple(
            i for i, (n, m) in enumerate(zip(plane.shape, bias_shape, strict=True)) if m == 1 != n
        )
        summed = plane.sum(axis=axes, keepdims=True)
        if fault == "bias-not-summed":
            summed = plane[tuple(slice(1) if i in axes else slice(None) for i in range(4))]
        gradients["dbias"] = summed.astype(x["bias"].dtype)
    if variant.sinks is not None:
        gradients["dsinks"] = dsinks
    return gradients


def _scores(
    product: Single,
    b: int,
    h: int,
    n_q: int,
    n_k: int,
    causal: bool,
    scale: float,
    v: Variant,
    fault: str,
) -> tuple[Single, Array, Single]:
    """Scores, visibility of keys, and 1 − tanh²."""
    i, j = np.arange(n_q)[:, None], np.arange(n_k)
    d = j - i - (0 if fault == "causal-top-left" else n_k - n_q)
    left, right = v.window
    seen = np.ones(d.shape, bool)
    if causal:
        seen &= d <= {"causal-off-by-one": 1, "causal-one-short": -1}.get(fault, 0)
    if left is not None:
        seen &= d >= -left - (fault == "window-one-wider")
    if right is not None:
        seen &= d <= right - (fault == "window-one-short")
    if v.prefix is not None and fault != "prefix-forgotten":
        seen |= j < v.prefix[b]
    if v.mask is not None and fault != "mask-forgotten":
        seen &= v.mask[b, h, :n_q, :n_k]
    seen &= (j < n_k - (fault == "last-key")) & (i < n_q - (fault == "last-query"))
    x, flat = product * np.float32(scale), np.ones(d.shape, np.float32)
    if v.softcap is not None and fault != "no-cap":
        t = np.tanh(x / np.float32(v.softcap))
        x, flat = np.float32(v.softcap) * t, 1 - t * t
    if v.alibi is not None and fault != "no-slopes":
        x = x - np.float32(v.alibi[b, h]) * np.abs(d).astype(np.float32)
    if v.bias is not None and fault != "no-bias":
        x = x + v.bias[b, h, :n_q, :n_k].astype(np.float32)
    return x.astype(np.float32), seen, flat
