// Two parts of a sum, or of a maximum of absolute values, as one. A NaN is larger than any number.
#pragma once
#include "tile/tile.h"

KS_DEVICE float magnitude(float x) { return x < 0.f ? -x : x; }

template<bool MAXIMUM> KS_DEVICE float joined(float x, float y) {
  if constexpr (MAXIMUM) return y > x || y != y ? y : x;
  else return x + y;
}
