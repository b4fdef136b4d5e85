// Joins N partial attentions of the same queries over different keys: with the results o_n and their log-sum-exps s_n,
//   s = ln Σ e^(s_n),  o = Σ e^(s_n − s)·o_n.
// A part that saw no key has s_n = −inf and does not count. No part with a key: zeros and −inf.
//
// One thread computes COLUMNS neighbouring columns of one row, and reads AT_ONCE parts together, results beside log-sum-exps: it waits for
// memory, which few threads would do for each part anew. Sums move to a new largest s_n as it comes. Nothing is shared between threads.
#include "generated/config.h"
#include "tile/tile.h"

typedef Config::T T;
typedef Config::OUT Out;
constexpr int COLUMNS = 4, PARTS = (Config::DV + COLUMNS - 1) / COLUMNS, AT_ONCE = 8;  // parts whose loads are under way together

template<class X> struct alignas(COLUMNS * sizeof(X)) Columns { X v[COLUMNS]; };
// Rows of parts lie as their caller likes.
KS_DEVICE void load(Columns<T>& to, const T* from, int column) {
  if (Config::DV % COLUMNS == 0 && (i64)from % sizeof(to) == 0) {
    to = *(const Columns<T>*)from;
    return;
  }
#pragma unroll
  for (int e = 0; e < COLUMNS; e++)
    if (Config::DV % COLUMNS == 0 || column + e < Config::DV) to.v[e] = from[e];
}

KS_KERNEL(Config::THREADS, 1)
merge_states(const T* outs, const float* lses, Out* out, float* lse, const int* offsets, i64 outs_part, i64 outs_batch,
             i64 outs_head, i64 lses_part, i64 lses_batch, i64 lses_head, i64 out_batch, i64 out_head, i64 lse_batch,
             i64 lse_head, int outs_row, int out_row, int parts, int num_heads, int rows, int total, int sequences) {
  earlier_kernels_wait();
  const i64 index = (i64)block_index() * Config::THREADS + thread_index();
  if (index / PARTS >= total) return;
  const int line = (int)(index / PARTS), column = (int)(index % PARTS) * COLUMNS;
  const int row = line % rows, head = line / rows % num_heads, batch = line / rows / num_heads;
  if (Config::PACKED && (row < offsets[0] || row >= offsets[sequences])) return;

  const float* const s = lses + batch * lses_batch + head * lses_head + row;
  const T* const o = outs + batch * outs_batch + head * outs_head + (i64)row * outs_row + column;
  float top = -infinity(), sum = 0.f, y[COLUMNS] = {};
  bool lost = false;  // a NaN, which a maximum would pass over
#pragma unroll 1
  for (int n = 0; n < parts; n += AT_ONCE) {
    float x[AT_ONCE];
    Columns<T> loaded[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      x[k] = -infinity();
      if (n + k < parts) x[k] = s[(n + k) * lses_part], load(loaded[k], o + (n + k) * outs_part, column);
    }
    float next = top;
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) next = maximum(next, x[k]), lost = lost || x[k] != x[k];
    const float correction = next == top ? 1.f : exp2_fast(1.44269504f * (top - next));
    top = next, sum *= correction;
#pragma unroll
    for (int e = 0; e < COLUMNS; e++) y[e] *= correction;
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      if (x[k] == -infinity()) continue;
      const float weight = exp2_fast(1.44269504f * (x[k] - top));
      sum += weight;
#pragma unroll
      for (int e = 0; e < COLUMNS; e++)
        if (Config::DV % COLUMNS == 0 || column + e < Config::DV) y[e] += weight * to_sum(loaded[k].v[e]);
    }
  }
  const float inverse = sum == 0.f ? 0.f : 1.f / sum;
  Out* const to = (Config::POINTERS ? listed(out, (i64)batch * num_heads + head) : out + batch * out_batch + head * out_head) +
                  (i64)row * out_row + column;
  if constexpr (Config::VECTOR == 16 && Config::DV % COLUMNS == 0) {
    Columns<Out> z;
#pragma unroll
    for (int e = 0; e < COLUMNS; e++) z.v[e] = convert<Out>(y[e] * inverse);
    *(Columns<Out>*)to = z;
  } else {
#pragma unroll
    for (int e = 0; e < COLUMNS; e++)
      if (column + e < Config::DV) to[e] = convert<Out>(y[e] * inverse);
  }
  if (Config::LSE && column == 0) {
    const float total_lse = sum == 0.f ? -infinity() : top + 0.69314718056f * log2_fast(sum);
    lse[batch * lse_batch + head * lse_head + row] = lost ? sum : total_lse;
  }
}
