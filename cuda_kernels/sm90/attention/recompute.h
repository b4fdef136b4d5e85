// Rows whose result has a NaN, once more. A weight of 0 hides no value that is not finite: 0 · NaN and 0 · inf are NaN. So a
// warp that finds NaN in what it stored looks at the values which its tile's blocks have and some row of its own must not see.
// Are these finite, then it is a NaN that the rows do see. Else the warp makes its rows again, each of the keys that it
// sees alone, and puts what it finds in place of each NaN. All of it is from global memory and rare, so short before fast.
#pragma once
#include "sm90/attention/not_finite.h"

struct Remake {
  const T *q, *k, *v;  // of the tile's head
  T* out;
  int q_row, k_row, v_row, out_row;
  float scale_log2, cap, cap_inverse;
  float sink;  // in base 2; −inf: none
  int lane;

  // Whether rows `from` … `to` − 1 of V are finite.
  KS_DEVICE bool finite_values(int from, int to) const {
    constexpr int PER = DV / 8;
    u32 most = 0;
#pragma unroll 1
    for (int i = lane; i < (to - from) * PER; i += WARP)
      most = largest(most, *(const uint4*)(v + (i64)(from + i / PER) * v_row + i % PER * 8));
    return __all_sync(~0u, finite_part(most) == most);
  }

  // The score of query `row` and key `key`, in base 2: of a quarter of the warp, each its own key.
  KS_DEVICE float score(int row, int key) const {
    const T *const x = q + (i64)row * q_row, *const y = k + (i64)key * k_row;
    float s = 0.f;
#pragma unroll 4
    for (int d = lane % 8; d < DQK; d += 8) s = fmaf(to_sum(x[d]), to_sum(y[d]), s);
    s += shuffle_xor(s, 1);
    s += shuffle_xor(s, 2);
    s += shuffle_xor(s, 4);
    if (!KS_SOFTCAP) return s * scale_log2;
    s *= cap_inverse;
    return cap * (fabsf(s) < 0.6f ? tanh_small(s) : tanh_large(s));
  }

  // A row by an online softmax over keys begin … end − 1, four at a time. Values that are not finite are summed as they are.
  KS_DEVICE void row(int row, int begin, int end) const {
    constexpr int MINE = (DV + WARP - 1) / WARP;
    float m = -infinity(), l = 0.f, o[MINE], odd[MINE];
#pragma unroll
    for (int i = 0; i < MINE; i++) o[i] = odd[i] = 0.f;
#pragma unroll 1
    for (int first = begin; first < end; first += 4) {
      const float x = score(row, min_of(first + lane / 8, end - 1));
#pragma unroll 1
      for (int key = first; key < min_of(first + 4, end); key++) {
        const float y = __shfl_sync(~0u, x, (key - first) * 8), now = fmaxf(m, y), base = now == -infinity() ? 0.f : now;
        const float fade = exp2_fast(m - base), p = exp2_fast(y - base);
        m = now, l = fmaf(l, fade, p);
#pragma unroll
        for (int i = 0; i < MINE; i++) {
          const int d = lane + i * WARP;
          const float z = d < DV ? to_sum(v[(i64)key * v_row + d]) : 0.f;
          o[i] = fmaf(p, finite(z) ? z : 0.f, o[i] * fade);
          odd[i] += finite(z) ? 0.f : z;
        }
      }
    }
    if (sink != -infinity()) {
      const float now = fmaxf(m, sink), fade = exp2_fast(m - now);
      l = fmaf(l, fade, exp2_fast(sink - now));
#pragma unroll
      for (int i = 0; i < MINE; i++) o[i] *= fade;
    }
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      const int d = lane + i * WARP;
      if (d >= DV) break;
      T& place = out[(i64)row * out_row + d];
      const float old = to_sum(place);
      if (old != old) place = convert<T>((l == 0.f ? 0.f : o[i] / l) + odd[i]);
    }
  }
};
