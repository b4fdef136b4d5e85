// Tests of pairs of half-precision elements for NaN and inf. Where V is of e4m3 nobody asks.
#pragma once
#include "sm90/attention/block.h"
#include "sm90/attention/finite.h"

// Of V and the result, where that is not float32, as of parts of the keys.
typedef conditional<sizeof(TO) == 2, TO, T>::type Half;
constexpr u32 EXPONENT = exponent_of<Half>;

// The larger of two pairs' magnitudes, element by element; NaN wins.
KS_DEVICE u32 max_magnitude(u32 a, u32 b, f16) {
  u32 r;
  asm("{\n.reg .b32 x;\nabs.f16x2 x, %2;\nmax.NaN.f16x2 %0, %1, x;\n}" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
KS_DEVICE u32 max_magnitude(u32 a, u32 b, bf16) {
  u32 r;
  asm("{\n.reg .b32 x;\nabs.bf16x2 x, %2;\nmax.NaN.bf16x2 %0, %1, x;\n}" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
KS_DEVICE u32 max_magnitude(u32 most, const uint4& x) {
  return max_magnitude(max_magnitude(max_magnitude(max_magnitude(most, x.x, Half()), x.y, Half()), x.z, Half()), x.w, Half());
}
// A pair with zeros in place of NaN and inf.
KS_DEVICE u32 finite_part(u32 pair) { return finite_part<Half>(pair); }
// Whether an element of a pair of magnitudes is NaN.
KS_DEVICE bool has_nan(u32 magnitudes) { return (magnitudes & 0xffff) > EXPONENT || magnitudes >> 16 > EXPONENT; }
