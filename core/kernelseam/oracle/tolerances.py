"""The largest error of a right result against the oracle, element by element. ``docs/accuracy.md``
derives these bounds.

With u the unit roundoff of a dtype (2⁻¹¹ float16, 2⁻⁸ bfloat16, 2⁻²⁴ float32, 2⁻⁵³ float64), η its
smallest subnormal (smallest normal where subnormals are flushed), ref the oracle's value on the
inputs as they were rounded:

* GEMM: 2·u_out·|ref| + 4·√(K+4)·u_acc·(|alpha|·Σ|A||B| + |beta·C| + |bias| + |residual|) + η_out,
  K being that of all products that are summed. √(K+4) holds for data of zero mean, whose rounding
  errors cancel; for other data K+4 stands in its place. With precision "tf32"
  2·u_tf32·|alpha|·Σ|A||B| more, u_tf32 = 2⁻¹⁰; with "tf32x3" 8 for 4. Of A and B of 8 bits
  8·2⁻¹³·|alpha|·Σ|A||B| more, 32·2⁻¹³ where the mean is not zero: matrix units add few bits of
  their products.
* attention: 2·u_out·|ref| + [u_P + c·u_32·(√S_k + √D_qk·max scale·|q||k| + max t)]·(P|V|)
  + η_P·Σ_j|v_j|/ℓ + η_out, t = |capped product| + |slope·d| + |bias| as far as a score has them
  (the product where it is capped), and |sink|.
* its LSE: c·u_32·(√S_k + √D_qk·max scale·|q||k| + max t + |ref|).
* of q of 8 bits [u_e4m3 + cut]·min(P|V|, |ref| + 3·√Σ(P_j·v_j)²) + 8·2⁻¹³·P|V| in place of
  u_P·(P|V|), 2⁻⁶ of e4m3's smallest subnormal (fnuz: 2⁻⁵) for η_P, and cut more in the LSE, with
  cut = 2⁻¹³·scale·(8·max|q||k| + 3·√D_qk·max|q_d·k_d|): probabilities may be rounded to e4m3, and
  matrix units add few bits of its products.
* of float32 with precision "tf32x3" 2·c for c; with "tf32" [2·u_tf32 + e^(2·cut) − 1]·min(P|V|,
  |ref| + 3·√Σ(P_j·v_j)²) more, and cut more in the LSE, with cut = 2·u_tf32·max scale·|q||k|.
* of keys and values that may be rounded to q's dtype first, [u + e^(2·cut) − 1]·min(P|V|, |ref| +
  3·√Σ(P_j·v_j)²) more, and cut more in the LSE, with cut = 3·u·max scale·√Σ(q_d·k_d)².
* N states merged: 2·u_out·|ref| + c·u_32·(√N + max|s_n|)·Σ_n e^(s_n − s)·|o_n| + η_out.
* their LSE: c·u_32·(√N + max|s_n| + |ref|).
* an attention's gradients: 2·u_out·|ref| + u_P·R + c·u_32·(E + L) + u_out·O + η·V + η_out, of the
  sums R, E, L, O and V of magnitudes that ``gradients.Gradient`` holds; with "tf32x3" 2·c for c,
  with "tf32" 2·u_tf32·(R + E + L) more.

Probabilities are rounded to the dtype of V before the second product (of q, where V alone is of
8 bits), hence u_P and η_P. Where the
inputs are float64, float64 takes float32's place inside an attention and in a merge: u_64 for u_32,
and LSEs are stored in it.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from kernelseam.dtypes import DType
from kernelseam.oracle.formulas import AttentionResult, Floats, GemmResult, MergeResult
from kernelseam.oracle.gradients import Gradient

GEMM_CONSTANT = 4.0
TF32_UNIT = 2.0**-10
"""What TF32, 10 bits behind the point, is off by at most: libraries leave the conversion to the
units, which truncate."""
E4M3_UNIT = 2.0**-13
"""What matrix units cut off products of 8 bits that they add up, as a part of the largest."""
E4M3, E4M3_ONE_SIGN = 8.0, 32.0
"""How many of it a sum of products loses, as a part of the products' magnitudes: an H200's lost up
to 3.1 of zero mean, and 11.3 of positive numbers."""
E4M3_LARGEST = 3.0
"""And how many where one term is much larger than the others, as a part of √terms·largest: all the
others are cut off at its unit, independently, with a root mean square of 1/√3, so that this is five
standard deviations."""
ROUNDED = 3.0
"""Of a sum whose terms are rounded independently, by up to u each, a root mean square of u/√3: five
standard deviations, as a part of u·√Σterms²."""
TF32X3 = 2.0
"""The bound of products of split numbers, as a multiple of float32's."""
LARGEST_WEIGHT = {DType.float8_e4m3fn: 2.0**6, DType.float8_e4m3fnuz: 2.0**5}
"""What a row's largest weight of 8 bits is scaled to, so that few of the others vanish."""
ATTENTION_CONSTANT = 8.0
"""c: calibrated, with room for other orders of summation and for hardware exponentials."""


def smallest(dtype: DType, flushed: bool = False) -> float:
    """η: the magnitude below which a result may be flushed to 0."""
    return dtype.smallest_normal if flushed else dtype.smallest_subnormal


def smallest_weight(dtype: DType, flushed: bool = False) -> float:
    """The magnitude below which a probability of this dtype may be flushed to 0: fast exponentials
    may flush float32's subnormals, and in 8 bits weights are up to 2⁶ or 2⁵, for 1."""
    if dtype.is_fp8:
        return dtype.smallest_subnormal * LARGEST_WEIGHT[dtype] ** -1
    return max(smallest(dtype, flushed), DType.float32.smallest_normal)


def overflows_at(dtype: DType) -> float:
    """The magnitude, or slightly less, from which a value rounds to infinity."""
    return float(ml_dtypes.finfo(dtype.numpy).max) * (1 + dtype.unit_roundoff / 2)


def gemm(
    result: GemmResult,
    K: int,
    dtype: DType,
    dtype_c: DType,
    *,
    zero_mean: bool = True,
    flushed: bool = False,
    precision: str | None = None,
) -> Floats:
    """The bound of each element of C. ``K``: an element's terms, those of all products that it
    sums; ``dtype`` is that of A and B, ``precision`` how they are multiplied."""
    growth = (math.sqrt(K + 4) if zero_mean else K + 4) * _split(precision)
    with np.errstate(invalid="ignore", over="ignore"):
        bound: Floats = (
            2 * dtype_c.unit_roundoff * np.abs(result.out)
            + GEMM_CONSTANT * growth * dtype.accumulator.unit_roundoff * result.magnitude
            + smallest(dtype_c, flushed)
        )
        coarse = 2 * TF32_UNIT if precision == "tf32" else 0.0
        if dtype.is_fp8:
            coarse = E4M3_UNIT * (E4M3 if zero_mean else E4M3_ONE_SIGN)
        if coarse:
            bound += coarse * (result.magnitude if result.products is None else result.products)
    return bound


def attention(
    result: AttentionResult,
    S_k: int,
    head_dim: int,
    dtype: DType,
    dtype_out: DType,
    *,
    flushed: bool = False,
    precision: str | None = None,
    rounded_keys: bool = False,
) -> tuple[Floats, Floats]:
    """The bounds of each element of out and of the LSE; ``dtype`` is that of q, ``precision`` how
    it is multiplied; ``rounded_keys``: k and v may be rounded to that dtype before."""
    growth = math.sqrt(S_k) + math.sqrt(head_dim) * result.products + result.changes
    with np.errstate(invalid="ignore", over="ignore"):
        unit = ATTENTION_CONSTANT * dtype.accumulator.unit_roundoff * _split(precision)
        inner = unit * growth[..., None]
        weights = dtype.unit_roundoff * result.pv
        cut = 0.0 * growth
        if precision == "tf32":
            cut = 2 * TF32_UNIT * result.products
            weights += (2 * TF32_UNIT + np.expm1(2 * cut[..., None])) * result.spread
        if rounded_keys:
            own = dtype.unit_roundoff
            cut = ROUNDED * own * math.sqrt(head_dim) * result.largest
            weights += (own + np.expm1(2 * cut[..., None])) * result.spread
        if dtype.is_fp8:
            largest = math.sqrt(head_dim) * result.largest
            cut = E4M3_UNIT * (E4M3 * result.products + E4M3_LARGEST * largest)
            weights = (dtype.unit_roundoff + cut[..., None]) * result.spread
            weights += E4M3 * E4M3_UNIT * result.pv
        out: Floats = (
            2 * dtype_out.unit_roundoff * np.abs(result.out)
            + weights
            + inner * result.pv
            + smallest_weight(dtype, flushed) * result.values
            + smallest(dtype_out, flushed)
        )
        lse: Floats = unit * (growth + np.abs(result.lse)) + cut
    return out, lse


def _split(precision: str | None) -> float:
    """What split numbers are bounded by, as a multiple of float32's bound."""
    return TF32X3 if precision == "tf32x3" else 1.0


def merge_states(
    result: MergeResult, parts: int, dtype: DType, dtype_out: DType, *, flushed: bool = False
) -> tuple[Floats, Floats]:
    """The bounds of each element of out and of the LSE; ``dtype`` is that of the parts."""
    with np.errstate(invalid="ignore", over="ignore"):
        unit = ATTENTION_CONSTANT * dtype.accumulator.unit_roundoff
        growth = math.sqrt(parts) + result.sizes
        out: Floats = (
            2 * dtype_out.unit_roundoff * np.abs(result.out)
            + unit * growth[..., None] * result.magnitude
            + smallest(dtype_out, flushed)
        )
        lse: Floats = unit * (growth + np.abs(result.lse))
    return out, lse


def gradient(
    result: Gradient,
    dtype: DType,
    dtype_out: DType,
    *,
    flushed: bool = False,
    precision: str | None = None,
) -> Floats:
    """The bound of each element of one gradient; ``dtype`` is that of q, k and v, ``precision`` how
    they are multiplied."""
    unit = ATTENTION_CONSTANT * dtype.accumulator.unit_roundoff * _split(precision)
    coarse = 2 * TF32_UNIT if precision == "tf32" else 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        bound: Floats = (
            2 * dtype_out.unit_roundoff * np.abs(result.value)
            + dtype.unit_roundoff * (result.rounded + result.outs)
            + coarse * result.rounded
            + (unit + coarse) * (result.single + result.lses)
            + smallest_weight(dtype, flushed) * result.vanished
            + smallest(dtype_out, flushed)
        )
    return bound
