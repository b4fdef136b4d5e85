// States of an online softmax, joined: what warps and blocks of decode.h computed over parts of the keys.
#pragma once
#include "tile/tile.h"

constexpr int COLUMNS = 4;  // neighbouring columns that a thread joins

// A state of COLUMNS sums of one row.
struct Joined {
  float top = -infinity(), sum = 0.f;
  Chunk<float> y = {};
  // With N others of maxima m and sums l. Of one whose l is 0, which saw no key, x may be anything.
  template<int N> KS_DEVICE void add(const float (&m)[N], const float (&l)[N], const Chunk<float> (&x)[N]) {
    float now = top;
#pragma unroll
    for (int n = 0; n < N; n++) now = maximum(now, m[n]);
    const float base = now == -infinity() ? 0.f : now, mine = exp2_fast(top - base);  // exactly 1 where the maximum stays
    sum *= mine;
#pragma unroll
    for (int e = 0; e < COLUMNS; e++) y.v[e] *= mine;
#pragma unroll
    for (int n = 0; n < N; n++) {
      const float other = exp2_fast(m[n] - base);
      sum += l[n] * other;
#pragma unroll
      for (int e = 0; e < COLUMNS; e++) y.v[e] += l[n] == 0.f ? 0.f : x[n].v[e] * other;
    }
    top = now;
  }
};

// What the blocks of an item hand to the last of them. A state is a block's ROWS·DO sums, with (m, l) for each row; a
// block has two, of the item that it begins with and of that which it ends with.
struct Parts {
  float *sums, *scales;
  int* counters;
  int batch, blocks;
};
KS_DEVICE Parts in_lanes(Parts p) {
  return {in_lanes(p.sums), in_lanes(p.scales), in_lanes(p.counters), p.batch, p.blocks};
}
