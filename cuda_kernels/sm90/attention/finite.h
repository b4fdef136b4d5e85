// Pairs of half-precision elements without NaN and inf.
#pragma once
#include "attention/scores.h"
#include "sm90/ptx.h"

template<class T> constexpr u32 exponent_of = Same<T, f16>::value ? 0x7c00 : 0x7f80;  // of all ones

// A pair with zeros in place of NaN and inf.
template<class T> KS_DEVICE u32 finite_part(u32 pair) {
  constexpr u32 EXPONENT = exponent_of<T>;
  const bool low = (pair & EXPONENT) != EXPONENT, high = (pair >> 16 & EXPONENT) != EXPONENT;
  return pair & ((low ? 0xffffu : 0) | (high ? 0xffff0000u : 0));
}
template<class T> KS_DEVICE uint4 finite_part(const uint4& x) {
  return {finite_part<T>(x.x), finite_part<T>(x.y), finite_part<T>(x.z), finite_part<T>(x.w)};
}
