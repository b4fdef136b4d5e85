// The merge of parts of the keys within a cluster: block n has part n of one tile, in its shared memory (PartOutput), and each block merges
// as many of the tile's rows, read from all. With the parts' results o_n and log-sum-exps s_n, in base 2,
//   s = log2 Σ 2^(s_n),  o = Σ 2^(s_n − s)·o_n,
// added up in the order of the parts. A part that saw no key has s_n = −inf. No part with a key: zeros and −inf.
//
// A thread has four neighbouring columns of a row at a time, and reads those of all parts, of AT_ONCE in all, before it uses any.
#pragma once
#include "sm90/attention/consumer_thread.h"

template<class X> struct alignas(4 * sizeof(X)) Four { X v[4]; };

template<int PARTS> KS_DEVICE void merge_parts(const ConsumerThread& t, const WorkTile& w) {
  constexpr int ROWS = divide_up(BM, PARTS), CHUNKS = DV / 4, AT_ONCE = 8, SETS = AT_ONCE / PARTS;
  static_assert(DV % 4 == 0, "four columns at a time");
  const int first = cluster_rank() * ROWS, rows = min_of(t.rows_of(w) - w.row, BM);
  const int thread = (t.group * 4 + t.warp) * WARP + t.thread_lane;
  TO* const out = t.results(w);
#pragma unroll 1
  for (int i = thread; i < ROWS * CHUNKS; i += SETS * CONSUMERS) {
    float s[SETS][PARTS], x[SETS][PARTS][4];
#pragma unroll
    for (int k = 0; k < SETS; k++) {
      const int place = min_of(i + k * CONSUMERS, ROWS * CHUNKS - 1), row = min_of(first + place / CHUNKS, BM - 1);
#pragma unroll
      for (int n = 0; n < PARTS; n++) {
        s[k][n] = load_at(shared_address(t.part_sums() + row), n);
        load_four_at(shared_address(t.part_row(row) + place % CHUNKS * 4), n, x[k][n]);
      }
    }
#pragma unroll
    for (int k = 0; k < SETS; k++) {
      const int place = i + k * CONSUMERS, row = first + place / CHUNKS, column = place % CHUNKS * 4;
      if (place >= ROWS * CHUNKS || row >= rows) break;
      float top = s[k][0], sum = 0.f, y[4] = {};
#pragma unroll
      for (int n = 1; n < PARTS; n++) top = maximum(top, s[k][n]);
#pragma unroll
      for (int n = 0; n < PARTS; n++) {
        if (s[k][n] == -infinity()) continue;
        const float weight = exp2_fast(s[k][n] - top);
        sum += weight;
#pragma unroll
        for (int e = 0; e < 4; e++) y[e] = fmaf(weight, x[k][n][e], y[e]);
      }
      const float inverse = sum == 0.f ? 0.f : 1.f / sum;
      Four<TO> z;
#pragma unroll
      for (int e = 0; e < 4; e++) z.v[e] = convert<TO>(y[e] * inverse);
      *(Four<TO>*)(out + t.place_of(t.a.out, w.row + row) + column) = z;
      if (Config::LSE && column == 0) t.log_sum_exp(w, w.row + row) = sum == 0.f ? -infinity() : 0.69314718056f * (top + log2_fast(sum));
    }
  }
}

// By all consumers, behind a barrier of the cluster.
KS_DEVICE void merge_in_cluster(const ConsumerThread& t, int parts) {
  const WorkTile& w = t.storage.work_tiles[0];
  if (w.end == 0) return;  // no tile
  if (parts == 2) merge_parts<2>(t, w);
  else if (parts == 3) merge_parts<3>(t, w);
  else if (parts == 4) merge_parts<4>(t, w);
  else if (parts == 6) merge_parts<6>(t, w);
  else merge_parts<8>(t, w);
}
