"""A model of a tile kernel whose q, k and v are all of 8 bits, and whose weights are rounded to 8
bits too, as matrix units for e4m3 take them; and faults that can be injected into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from kernelseam.dtypes import E4M3, DType
from kernelseam.oracle.formulas import Array, Variant
from kernelseam.oracle.tolerances import E4M3_UNIT, LARGEST_WEIGHT

from calibration.tile_model import BLOCK, LOG2_E, Single

KINDS = ("normal", "positive", "even", "ramp", "extreme", "one-sign", "peak")
FAULTS = {
    "dropped-key": "the last key is left out",
    "no-q-scale": "the scale of q is left out",
    "swapped": "q's and v's scales are swapped",
    "unscaled-weights": "weights are not scaled up before they are rounded: small ones vanish",
    "rounded-sum": "the sum of weights is that of weights truncated to 8 bits, times 15/16",
    "missed-rescale": "the output is not rescaled when the maximum grows",
    "truncated-weights": "weights are truncated to 2 bits after the point",
}


@dataclass(frozen=True, eq=False)
class Queries:
    """One head, q [S_q, D], k and v [S_k, D] of 8 bits, and the scale of each."""

    q: Array
    k: Array
    v: Array
    scales: tuple[float, float, float]

    @property
    def variant(self) -> Variant:
        q, k, v = (
            np.full((1, 1, len(x)), s, np.float32)
            for x, s in zip((self.q, self.k, self.v), self.scales, strict=True)
        )
        return Variant(q_scales=q, k_scales=k, v_scales=v)


def drawn(rng: np.random.Generator) -> Queries:
    """Data of one of the kinds: values of one sign, weights that are nearly or exactly the same,
    one key that outweighs each of many others, a ramp, and scores up to some hundreds."""
    kind, stored = str(rng.choice(KINDS)), E4M3[int(rng.integers(2))]
    S_q, S_k = int(rng.integers(1, 17)), int(2 ** rng.uniform(0, 12))
    D = int(rng.choice((16, 64, 128, 256)))
    q, k, v = (rng.standard_normal((n, D)) for n in (S_q, S_k, S_k))
    scales = 2.0 ** rng.uniform(-3, 3, 3)
    if kind == "positive":
        q, k, v = np.abs(q), np.abs(k), np.abs(v)
    elif kind == "one-sign":
        v = np.abs(v)
    elif kind == "peak":
        q[:, 0], k[:, 0], k[0, 0] = np.sqrt(D), 0, 8
        q[:, 1:] *= 0.1
        v = np.abs(v)
    elif kind == "even":
        q *= rng.choice((0.0, 0.01, 0.1))
        v += 1
    elif kind == "ramp":
        q[:, 0], k[:, 0] = np.sqrt(D), np.arange(S_k) / 16
    elif kind == "extreme":
        q, k = 8 * q, 4 * k
    q, k, v = (x / s for x, s in zip((q, k, v), scales, strict=True))
    limit = float(2**7)
    q, k, v = (np.clip(x, -limit, limit).astype(stored.numpy) for x in (q, k, v))
    return Queries(q, k, v, (float(scales[0]), float(scales[1]), float(scales[2])))


def attention(
    x: Queries,
    causal: bool,
    scale: float,
    *,
    fault: str = "",
    exp2: Callable[[Single], Single] = np.exp2,
) -> tuple[Array, Single]:
    """Out [S_q, D_v] in bfloat16 and LSE [S_q]: state and sums of weights in float32, weights times
    2⁸ (2⁷) rounded to 8 bits, and both products cut off as matrix units do."""
    S_q, S_k = len(x.q), len(x.k)
    stored = DType.of(x.q.dtype, stored=True)
    Q, K, V = (np.asarray(y, np.float32) for y in (x.q, x.k, x.v))
    of_q, of_k, of_v = x.scales
    if fault == "no-q-scale":
        of_q = 1.0
    if fault == "swapped":
        of_q, of_v = of_v, of_q
    factor = np.float32(scale * LOG2_E * of_q * of_k)
    most = np.float32(1 if fault == "unscaled-weights" else LARGEST_WEIGHT[stored])
    out, total = np.zeros((S_q, V.shape[1]), np.float32), np.zeros(S_q, np.float32)
    top = np.full(S_q, -np.inf, np.float32)
    i = np.arange(S_q)[:, None] + S_k - S_q
    end = S_k - (fault == "dropped-key")
    for first in range(0, end, BLOCK):
        at = slice(first, min(first + BLOCK, end))
        j = np.arange(S_k)[at]
        visible = i >= j if causal else np.ones((S_q, len(j)), bool)
        if not visible.any():
            continue
        s = np.where(visible, _cut(Q, K[at].T) * factor, np.float32(-np.inf))
        now = np.maximum(top, s.max(axis=1))
        base = np.where(np.isneginf(now), 0, now).astype(np.float32)
        p, fade = exp2(s - base[:, None]), np.exp2(top - base)
        weights = (p * most).astype(stored.numpy).astype(np.float32)
        if fault == "truncated-weights":
            mantissa, exponent = np.frexp(weights)
            weights = np.ldexp(np.floor(mantissa * 8) / 8, exponent).astype(np.float32)
        counted = weights * np.float32(15 / 16) / most if fault == "rounded-sum" else p
        total = total * fade + counted.sum(axis=1)
        if fault == "missed-rescale":
            fade = np.where(np.isneginf(top), fade, 1).astype(np.float32)
        out = out * fade[:, None] + _cut(weights, V[at])
        top = now
    whole = np.float32(of_v) / (most * np.where(total == 0, 1, total))
    out = np.where((total == 0)[:, None], 0, out * whole[:, None])
    lse = (top + np.log2(total)) * np.log(2)
    return out.astype(DType.bfloat16.numpy), lse.astype(np.float32)


def _cut(a: Single, b: Single) -> Single:
    """a·b by steps of 32, each sum cut off 13 bits below the largest number that it adds."""
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for k in range(0, a.shape[1], 32):
        left, right = a[:, k : k + 32], b[k : k + 32]
        largest = np.maximum(np.abs(total), (np.abs(left)[..., None] * np.abs(right)).max(axis=1))
        unit = np.exp2(np.floor(np.log2(np.maximum(largest, 1e-36)))) * np.float32(E4M3_UNIT)
        total = (np.trunc((total + left @ right) / unit) * unit).astype(np.float32)
    return total
