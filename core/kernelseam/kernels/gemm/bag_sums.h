// out[i] = the sum of row i of each of `parts` arrays of out's shape, one behind the other, and of the rows of x that `rows` lists from
// ends[i] up to ends[i + 1], in that order, in float32 (of double in double).
//
// A thread has 16 bytes of a result, neighbours those beside it, and reads AT_ONCE rows together: it only waits for memory. Rows come and
// results go once, rows + (parts + 1) · results of them in all. Where rows are not aligned, elements are read one by one.
#include "generated/config.h"
#include "tile/tile.h"

typedef Config::T T;
typedef decltype(to_sum(T())) Sum;
constexpr int N = Chunk<T>::N, AT_ONCE = 4;
constexpr bool ALIGNED = Config::VECTOR == 16;

// `columns`: how many there are from `from` on.
KS_DEVICE void load(Chunk<T>& to, const T* from, int columns) {
  if constexpr (ALIGNED) {
    to = *(const Chunk<T>*)from;
  } else {
#pragma unroll
    for (int e = 0; e < N; e++)
      if (e < columns) to.v[e] = from[e];
  }
}
KS_DEVICE void add(Sum (&sums)[N], const Chunk<T>& x, int columns) {
#pragma unroll
  for (int e = 0; e < N; e++)
    if (ALIGNED || e < columns) sums[e] += to_sum(x.v[e]);
}

KS_KERNEL(Config::THREADS, 1)
bag_sums(const T* x, const i64* rows, const i64* ends, const T* plus, T* out, i64 x_row, int results, int parts, int row_columns,
         int chunks) {
  earlier_kernels_wait();
  const unsigned index = (unsigned)block_index() * Config::THREADS + thread_index();
  const int result = (int)(index / (unsigned)chunks), column = (int)(index % (unsigned)chunks) * N, columns = row_columns - column;
  if (result >= results) return;
  const i64 place = (i64)result * row_columns + column, end = ends[result + 1];
  Sum sums[N] = {};
  for (int p = 0; p < parts; p++) {
    Chunk<T> loaded;
    load(loaded, plus + p * ((i64)results * row_columns) + place, columns);
    add(sums, loaded, columns);
  }
  for (i64 at = ends[result]; at < end; at += AT_ONCE) {
    Chunk<T> loaded[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++)
      if (at + k < end) load(loaded[k], x + rows[at + k] * x_row + column, columns);
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++)
      if (at + k < end) add(sums, loaded[k], columns);
  }
  Chunk<T> made;
#pragma unroll
  for (int e = 0; e < N; e++) made.v[e] = convert<T>(sums[e]);
  if constexpr (ALIGNED) {
    *(Chunk<T>*)(out + place) = made;
  } else {
#pragma unroll
    for (int e = 0; e < N; e++)
      if (e < columns) out[place + e] = made.v[e];
  }
}
