"""A model of the tile kernels over keys and values of 8 bits whose blocks have scales (stored.h),
and faults that can be injected into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from kernelseam.dtypes import E4M3, DType
from kernelseam.oracle.formulas import Array, Variant

from calibration.tile_model import BLOCK, LOG2_E, Single

FAULTS = {
    "no-unit": "weights are multiplied by scales as they are, whatever the range of their dtype",
    "unit-kept": "what was summed before is not rescaled where the unit grows",
    "scaled-sum": "the sum of weights is multiplied by the scales of v too",
    "next-block": "a key takes the scale of the next block",
    "swapped": "k and v take each other's scales",
}


@dataclass(frozen=True, eq=False)
class Stored:
    """One head, q [S_q, D], k and v [S_k, D] of 8 bits, and the scale of every key and value."""

    q: Array
    k: Array
    v: Array
    k_scales: Single
    v_scales: Single
    block: int

    @property
    def variant(self) -> Variant:
        return Variant(k_scales=self.k_scales[None, None], v_scales=self.v_scales[None, None])


def drawn(rng: np.random.Generator) -> Stored:
    """Scales of v from 10⁻¹⁴ to 10⁴, those of one head within 10⁶ of each other; those of k such
    that scores are of any size up to some hundreds."""
    dtype = (DType.float16, DType.bfloat16)[int(rng.integers(2))]
    kind = E4M3[int(rng.integers(2))]
    S_q, S_k, D = (
        int(rng.integers(1, 17)),
        int(2 ** rng.uniform(0, 11)),
        int(rng.choice((16, 64, 128))),
    )
    block = int(rng.choice((1, 16, 64, 100)))
    blocks = -(-S_k // block)
    q, k, v = (rng.standard_normal((n, D)) for n in (S_q, S_k, S_k))
    k_scales = 10 ** rng.uniform(-2, 1) * 2 ** rng.uniform(0, 3, blocks)
    v_scales = 10 ** (rng.uniform(-8, 4) - rng.uniform(0, 6) * rng.random(blocks))
    of_key = np.arange(S_k) // block
    return Stored(
        q.astype(dtype.numpy),
        k.astype(kind.numpy),
        v.astype(kind.numpy),
        k_scales[of_key].astype(np.float32),
        v_scales[of_key].astype(np.float32),
        block,
    )


def attention(
    x: Stored,
    causal: bool,
    scale: float,
    *,
    fault: str = "",
    exp2: Callable[[Single], Single] = np.exp2,
) -> tuple[Array, Single]:
    """Out [S_q, D_v] in q's dtype and LSE [S_q]: scores, state and sums in float32; weights times
    scale/2^unit rounded to q's dtype, as a kernel multiplies them."""
    S_q, S_k = len(x.q), len(x.k)
    Q, K, V = (np.asarray(y, np.float32) for y in (x.q, x.k, x.v))
    k_scales, v_scales = x.k_scales, x.v_scales
    if fault == "swapped":
        k_scales, v_scales = v_scales, k_scales
    if fault == "next-block":
        k_scales, v_scales = (np.roll(y, -x.block) for y in (k_scales, v_scales))
    factor = np.float32(scale * LOG2_E)
    out, total = np.zeros((S_q, V.shape[1]), np.float32), np.zeros(S_q, np.float32)
    top, unit = np.full(S_q, -np.inf, np.float32), -120.0
    i = np.arange(S_q)[:, None] + S_k - S_q
    for first in range(0, S_k, BLOCK):
        at = slice(first, min(first + BLOCK, S_k))
        j = np.arange(S_k)[at]
        visible = i >= j if causal else np.ones((S_q, len(j)), bool)
        if not visible.any():
            continue
        s = np.where(visible, (Q @ K[at].T) * k_scales[at] * factor, np.float32(-np.inf))
        now = np.maximum(top, s.max(axis=1))
        base = np.where(np.isneginf(now), 0, now).astype(np.float32)
        p, fade = exp2(s - base[:, None]), np.exp2(top - base)
        of_values = v_scales[at]
        total = total * fade + (p * of_values if fault == "scaled-sum" else p).sum(axis=1)
        most = np.abs(of_values[visible.any(axis=0)]).max()
        grown = max(unit, np.floor(np.log2(max(most, 1e-36))) + 1)
        if fault == "no-unit":
            unit = grown = 0.0
        if fault != "unit-kept" and unit > -120:
            fade = fade * np.float32(2.0 ** (unit - grown))
        unit = grown
        weights = (p * (of_values * np.float32(2.0**-unit))).astype(x.q.dtype).astype(np.float32)
        out = out * fade[:, None] + np.where(visible, weights, 0) @ V[at]
        top = now
    whole = np.float32(2.0**unit) / np.where(total == 0, 1, total)
    out = np.where((total == 0)[:, None], 0, out * whole[:, None])
    lse = (top + np.log2(total)) * np.log(2)
    return out.astype(x.q.dtype), lse.astype(np.float32)
