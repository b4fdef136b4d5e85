// The second launch of a GEMM with sums or maxima in its epilogue: out [matrix, row, column] from the parts [matrix, row, column] that
// the tiles' warps wrote (reductions.h), which are finer along some of these axes. In one order.
//
// A block makes ELEMENTS neighbours of out: several where their parts lie side by side, else one. Its threads share the parts of each,
// and join their own in shared memory, half of them with the other half until one is left.
//
// Shared memory: a float32 for each thread. Registers: a few.
#include "generated/config.h"
#include "tile/tile.h"
#include "gemm/joined.h"

constexpr int THREADS = WARP * Config::WARPS, ELEMENTS = Config::ELEMENTS, SHARES = THREADS / ELEMENTS;
static_assert(SHARES * ELEMENTS == THREADS && (SHARES & (SHARES - 1)) == 0, "halves of threads");

// Strides in elements. total: of out, whose rows and columns are `rows` and `columns`. of_*: parts that a number is of along each axis;
// part_rows, part_columns: how many there are, so that the last number may be of fewer.
KS_KERNEL(THREADS, 1)
gemm_reduce(const float* parts, float* out, i64 parts_matrix, i64 parts_row, i64 parts_column, i64 out_matrix, i64 out_row,
            i64 out_column, i64 total, int rows, int columns, int of_matrices, int of_rows, int of_columns, int part_rows, int part_columns) {
  float* const shared = (float*)shared_memory<THREADS * 4>();
  earlier_kernels_wait();
  next_kernel_launch();
  const int me = thread_index(), share = me / ELEMENTS;
  const i64 index = (i64)block_index() * ELEMENTS + me % ELEMENTS;
  const i64 line = index / columns, matrix = line / rows;
  const int column = (int)(index - line * columns), row = (int)(line - matrix * rows);
  float x = 0.f;
  if (index < total) {
    const int row0 = row * of_rows, column0 = column * of_columns;
    const int high = min_of(of_rows, part_rows - row0), wide = min_of(of_columns, part_columns - column0);
    const int count = of_matrices * high * wide;
#pragma unroll 4
    for (int i = share; i < count; i += SHARES) {
      const int r = i / wide, c = i - r * wide, m = r / high;
      const float* const from = parts + (matrix * of_matrices + m) * parts_matrix;
      x = joined<Config::MAXIMUM>(x, from[(row0 + r - m * high) * parts_row + (column0 + c) * parts_column]);
    }
  }
  shared[me] = x;
#pragma unroll 1
  for (int n = SHARES / 2; n > 0; n /= 2) {
    block_barrier();
    if (share < n) shared[me] = joined<Config::MAXIMUM>(shared[me], shared[me + n * ELEMENTS]);
  }
  if (share == 0 && index < total) out[matrix * out_matrix + row * out_row + column * out_column] = shared[me];
}
