// Recomputes rows whose result has a NaN. A weight of 0 does not mask a non-finite value: 0 · NaN and 0 · inf are NaN. So a
// warp that stored NaN checks the values of its tile's blocks that are masked for some of its rows. If these are finite, the
// NaN comes from visible values and stays. Otherwise the warp recomputes each row from its visible keys alone and replaces
// each NaN. It reads global memory and is rare: the code is short rather than fast.
#pragma once
#include "sm90/attention/non_finite.h"

struct Recompute {
  const T *q, *k, *v;  // of the tile's head
  TO* out;
  int q_row, k_row, v_row, out_row;
  Scores scores;
  float sink;  // in base 2; −inf: none
  int lane;

  // Whether rows `from` … `to` − 1 of V are finite.
  KS_DEVICE bool finite_values(int from, int to) const {
    constexpr int PER = DV / 8;
    u32 most = 0;
#pragma unroll 1
    for (int i = lane; i < (to - from) * PER; i += WARP)
      most = max_magnitude(most, *(const uint4*)(v + (i64)(from + i / PER) * v_row + i % PER * 8));
    return __all_sync(~0u, finite_part(most) == most);
  }

  // The score of query `row` and key `key`, in base 2. Each quarter of the warp has a key of its own.
  KS_DEVICE float score(int row, int key) const {
    const T *const x = q + (i64)row * q_row, *const y = k + (i64)key * k_row;
    float s = 0.f;
#pragma unroll 4
    for (int d = lane % 8; d < DQK; d += 8) s = fmaf(to_sum(x[d]), to_sum(y[d]), s);
    s += shuffle_xor(s, 1);
    s += shuffle_xor(s, 2);
    s += shuffle_xor(s, 4);
    return scores.apply(s, 0, row, key);
  }

  // A row by an online softmax over its keys, four at a time. Values that are not finite are summed as they are.
  KS_DEVICE void row(int row, KeyRange keys) const {
    constexpr int PER_LANE = (DV + WARP - 1) / WARP;
    float m = -infinity(), l = 0.f, o[PER_LANE], non_finite[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) o[i] = non_finite[i] = 0.f;
#pragma unroll 1
    for (int first = keys.begin; first < keys.end; first += 4) {
      const float x = score(row, min_of(first + lane / 8, keys.end - 1));
#pragma unroll 1
      for (int key = first; key < min_of(first + 4, keys.end); key++) {
        if (!Scores::BANDED && !scores.visible(0, row, key)) continue;
        const float y = __shfl_sync(~0u, x, (key - first) * 8), now = fmaxf(m, y), base = now == -infinity() ? 0.f : now;
        const float correction = exp2_fast(m - base), p = exp2_fast(y - base);
        m = now, l = fmaf(l, correction, p);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
          const int d = lane + i * WARP;
          const float z = d < DV ? to_sum(v[(i64)key * v_row + d]) : 0.f;
          o[i] = fmaf(p, finite(z) ? z : 0.f, o[i] * correction);
          non_finite[i] += finite(z) ? 0.f : z;
        }
      }
    }
    if (sink != -infinity()) {
      const float now = fmaxf(m, sink), correction = exp2_fast(m - now);
      l = fmaf(l, correction, exp2_fast(sink - now));
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) o[i] *= correction;
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int d = lane + i * WARP;
      if (d >= DV) break;
      TO& place = out[(i64)row * out_row + d];
      const float old = to_sum(place);
      if (old != old) place = convert<TO>((l == 0.f ? 0.f : o[i] / l) + non_finite[i]);
    }
  }
};
