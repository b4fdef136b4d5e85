// Sums and maxima in a GEMM's epilogue: of elements of the result before they are rounded. Every warp writes what its part of a
// tile makes of them to the workspace, as float32; reduce.h adds these parts up, in one order.
//
// By rows, where a number of the result is of one row: a part for each row of the warp's. By columns: one for each column. Else one
// for all of the warp's elements: the host takes tiles whose warps' rows and columns divide what shares a number.
//
// Registers: a float32 for each row, or column, that a lane has elements of.
#pragma once
#include "tile/tile.h"
#include "gemm/joined.h"
#include "generated/config.h"
#include "generated/epilogue.h"

// Where the parts lie. By rows [matrix, strip of columns, row], by columns [matrix, strip of rows, column], else [matrix, strip of
// rows, strip of columns]; a strip is what a warp has, and rows and columns are those of whole strips.
template<int COUNT> struct EpilogueParts {
  float* parts[COUNT];
  int row_strips, column_strips;  // of a matrix
};
template<> struct EpilogueParts<0> {};

// The warp's elements: of the matrix of a number, from row `row` and column `column` on; rows and columns of them that there are.
struct EpilogueBlock { int matrix, row, column, rows, columns; };

// Takes reduction I and those behind it, and what becomes of the elements between them. COLUMNS_OF: columns of accumulators that are
// one of the result, of which the first has the element.
// Accumulators are R×C.
template<class E, int R, int C, int COLUMNS_OF, int I, class Own, class Tile, class Acc, int COUNT>
KS_DEVICE void take_reductions(const Own& own, const Tile& tile, Acc& acc, const EpilogueBlock& block, const EpilogueParts<COUNT>& to) {
  if constexpr (I < COUNT) {
    constexpr bool MAXIMUM = Own::MAXIMUM[I];
    float* const parts = to.parts[I];
    const int strip_row = block.row / R, strip_column = block.column / (C / COLUMNS_OF);
    auto joined_with = [&](float part, int i, int j, float x) {
      const int n = j / COLUMNS_OF;
      if (j % COLUMNS_OF != 0 || i >= block.rows || n >= block.columns) return part;
      const float y = own.template reduced<I>(x, tile, own.row(tile, block.row + i), own.column(tile, block.column + n));
      return joined<MAXIMUM>(part, MAXIMUM ? magnitude(y) : y);
    };
    auto join = [](float x, float y) { return joined<MAXIMUM>(x, y); };
    if constexpr (Own::REDUCED_ROWS[I] == 1) {
      typename E::template Row<R> rows;
      E::fill(rows, 0.f);
      E::row_fold(rows, acc, joined_with);
      E::row_join(rows, join);
      float* const at = parts + ((i64)block.matrix * to.column_strips + strip_column) * ((i64)to.row_strips * R) + block.row;
      E::each_row(rows, [&](int i, float x) {
        if (i < block.rows) at[i] = x;
      });
    } else if constexpr (Own::REDUCED_COLUMNS[I] == 1) {
      typename E::template Column<C> columns;
      E::column_fold(columns, acc, joined_with);
      E::column_join(columns, join);
      float* const at = parts + ((i64)block.matrix * to.row_strips + strip_row) * ((i64)to.column_strips * (C / COLUMNS_OF)) + block.column;
      E::each_column(columns, [&](int j, float x) {
        if (j % COLUMNS_OF == 0 && j / COLUMNS_OF < block.columns) at[j / COLUMNS_OF] = x;
      });
    } else {
      float part = 0.f;
      E::map(acc, [&](int i, int j, float x) {
        part = joined_with(part, i, j, x);
        return x;
      });
#pragma unroll
      for (int m = 1; m < WARP; m *= 2) part = join(part, shuffle_xor(part, m));
      if (lane() == 0) parts[((i64)block.matrix * to.row_strips + strip_row) * to.column_strips + strip_column] = part;
    }
    E::map(acc, [&](int i, int j, float x) {
      return own.template rest<I>(x, tile, own.row(tile, block.row + i), own.column(tile, block.column + j / COLUMNS_OF));
    });
    take_reductions<E, R, C, COLUMNS_OF, I + 1>(own, tile, acc, block, to);
  }
}
