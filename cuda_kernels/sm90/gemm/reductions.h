// Sums and maxima in the epilogue (gemm/reductions.h), of a thread's elements as expression.h meets them. A part is of a strip: 16 rows,
// which a warp has of a tile, and all of its columns, or STRIP_COLUMNS of them where some number is of a block's. Rows' parts, or a
// strip's, are kept until its last column; columns' leave as soon as their elements are there.
//
// Registers: two float32 for each 64 rows and each sum or maximum, and FOUR.
#pragma once
#include "gemm/reductions.h"
#include "sm90/gemm/block.h"

template<class E, int I = 0> constexpr bool of_blocks() {
  if constexpr (I < Config::REDUCTIONS) return E::REDUCED_COLUMNS[I] > 1 || of_blocks<E, I + 1>();
  return false;
}
constexpr int STRIP_ROWS = 16, STRIP_COLUMNS = !of_blocks<Epilogue>() ? BN / PER_COLUMN : BN / PER_COLUMN % 64 == 0 ? 64 : 32;
constexpr int FOUR = 4;  // parts of columns that leave together

template<int COUNT> struct Reduced {
  typedef EpilogueParts<COUNT> Parts;
  static constexpr int KEPT = max_of(COUNT, 1);
  float of[KEPT][MT][2], columns[KEPT][FOUR];

  KS_DEVICE void clear_columns() {
#pragma unroll
    for (int r = 0; r < COUNT; r++)
#pragma unroll
      for (int n = 0; n < FOUR; n++) columns[r][n] = 0.f;
  }

  template<int I> static KS_DEVICE float join(float x, float y) { return joined<Epilogue::MAXIMUM[I]>(x, y); }
  static constexpr bool by_row(int r) { return Epilogue::REDUCED_ROWS[r] == 1; }
  static constexpr bool by_column(int r) { return !by_row(r) && Epilogue::REDUCED_COLUMNS[r] == 1; }

  // Takes an element, of row 64·i + 8·half and of part n of FOUR, and returns what becomes of it.
  template<int I = 0, class Row, class Column>
  KS_DEVICE float take(float x, const Epilogue& own, const Epilogue::Tile& tile, const Row& row, const Column& column, bool there, int i,
                       int half, int n) {
    if constexpr (I < COUNT) {
      const float y = own.template reduced<I>(x, tile, row, column);
      float& part = by_column(I) ? columns[I][n] : of[I][i][by_row(I) ? half : 0];
      if (there) part = join<I>(part, Epilogue::MAXIMUM[I] ? magnitude(y) : y);
      return take<I + 1>(own.template rest<I>(x, tile, row, column), own, tile, row, column, there, i, half, n);
    }
    return x;
  }

  // Writes the parts of columns: column(n) and row(n) are those of part n, of 8 rows that lanes 4 apart have. Lanes exchange halves of them until
  // each has one: number 2·(lane / 16) + lane / 8 % 2.
  template<int I = 0, class At> KS_DEVICE void write_columns(const Parts& to, const EpilogueBlock& block, int lane, At at) {
    if constexpr (I < COUNT) {
      if constexpr (by_column(I)) {
        float x[FOUR];
#pragma unroll
        for (int n = 0; n < FOUR; n++) x[n] = columns[I][n];
        const bool second = lane & 16, odd = lane & 8;
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const float sent = shuffle_xor(second ? x[n] : x[n + 2], 16);
          x[n] = join<I>(second ? x[n + 2] : x[n], sent);
        }
        const float sent = shuffle_xor(odd ? x[0] : x[1], 8);
        float part = join<I>(odd ? x[1] : x[0], sent);
        part = join<I>(part, shuffle_xor(part, 4));
        const auto place = at(lane >> 3);
        if (!(lane & 4) && place.row < block.rows && place.column < block.columns)
          to.parts[I][((i64)block.matrix * to.row_strips + place.row / STRIP_ROWS) * ((i64)to.column_strips * STRIP_COLUMNS) + place.column] = part;
      }
      write_columns<I + 1>(to, block, lane, at);
    }
  }

  // Writes those of rows and of strips, whose first column is `column`, and begins the next ones. row: this thread's first.
  template<int I = 0> KS_DEVICE void write_strips(const Parts& to, const EpilogueBlock& block, int row, int column, int lane) {
    if constexpr (I < COUNT) {
      const int strip = column / STRIP_COLUMNS;
      if constexpr (!by_column(I)) {
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int half = 0; half < (by_row(I) ? 2 : 1); half++) {
            float& part = of[I][i][half];
#pragma unroll
            for (int m = 1; m < (by_row(I) ? 4 : WARP); m *= 2) part = join<I>(part, shuffle_xor(part, m));
            const int r = row + 64 * i + 8 * half;
            if (by_row(I)) {
              if ((lane & 3) == 0 && r < block.rows && column < block.columns)
                to.parts[I][((i64)block.matrix * to.column_strips + strip) * ((i64)to.row_strips * STRIP_ROWS) + r] = part;
            } else if (lane == 0 && r < block.rows && column < block.columns) {  // lane 0 has the strip's first row
              to.parts[I][((i64)block.matrix * to.row_strips + r / STRIP_ROWS) * to.column_strips + strip] = part;
            }
            part = 0.f;
          }
      }
      write_strips<I + 1>(to, block, row, column, lane);
    }
  }
};
