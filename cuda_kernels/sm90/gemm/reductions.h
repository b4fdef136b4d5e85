// Sums and maxima in the epilogue (gemm/reductions.h), of a thread's elements as expression.h meets them. A part is of a strip: STRIP_ROWS
// rows, and all of a tile's columns, or KEPT_COLUMNS of them where some number is of a block's. Rows' parts, or a strip's, are kept until its
// last column; columns' leave with each KEPT_COLUMNS. The four warps' parts of columns and strips are joined in shared memory.
//
// Registers: two float32 for each 64 rows and each sum or maximum, and FOUR.
#pragma once
#include "sm90/gemm/block.h"

template<class E, int I = 0> constexpr bool of_blocks() {
  if constexpr (I < Config::REDUCTIONS) return E::REDUCED_COLUMNS[I] > 1 || of_blocks<E, I + 1>();
  return false;
}
template<class E, int I = 0> constexpr bool by_columns() {
  if constexpr (I < Config::REDUCTIONS) return (E::REDUCED_ROWS[I] != 1 && E::REDUCED_COLUMNS[I] == 1) || by_columns<E, I + 1>();
  return false;
}
constexpr bool BY_COLUMN = by_columns<Epilogue>();  // some sum or maximum
constexpr int STRIP_COLUMNS = of_blocks<Epilogue>() ? KEPT_COLUMNS : BN / PER_COLUMN;
constexpr int FOUR = 4;  // parts of columns that leave together

// Of a part of E's reduction I, how many elements it is of along either axis, and where it lies by its place among the parts of a matrix.
template<class E, int I> struct Parts {
  static constexpr bool BY_ROW = E::REDUCED_ROWS[I] == 1, BY_COLUMN = !BY_ROW && E::REDUCED_COLUMNS[I] == 1;
  static constexpr int HIGH = BY_ROW ? 1 : STRIP_ROWS, WIDE = BY_COLUMN ? 1 : STRIP_COLUMNS;
  template<int COUNT> static KS_DEVICE i64 place(const EpilogueParts<COUNT>& of, int matrix, int row, int column) {
    if (BY_ROW) return ((i64)matrix * of.column_strips + column) * ((i64)of.row_strips * STRIP_ROWS) + row;
    return ((i64)matrix * of.row_strips + row) * ((i64)of.column_strips * (BY_COLUMN ? STRIP_COLUMNS : 1)) + column;
  }
};

// Where the launch itself adds up parts (joined_parts.h), a part that is not there yet is a word of 0, which no part is: one NaN stands for all.
KS_DEVICE void put_part(float* to, float part) {
  if (Config::ADDS_UP) store_relaxed((u32*)to, ~(part == part ? __float_as_uint(part) : 0x7fffffffu));
  else *to = part;
}

template<int COUNT> struct Reduced {
  typedef EpilogueParts<COUNT> To;
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
  KS_DEVICE float take(float x, const Epilogue& own, const Epilogue::Tile& tile, const Row& row, const Column& column, bool row_there,
                       bool column_there, int i, int half, int n) {
    if constexpr (I < COUNT) {
      const float y = own.template reduced<I>(x, tile, row, column);
      float& part = by_column(I) ? columns[I][n] : of[I][i][by_row(I) ? half : 0];
      const bool there = (by_row(I) || row_there) && (by_column(I) || column_there);  // else its part is not written
      if (there) part = join<I>(part, Epilogue::MAXIMUM[I] ? magnitude(y) : y);
      return take<I + 1>(own.template rest<I>(x, tile, row, column), own, tile, row, column, row_there, column_there, i, half, n);
    }
    return x;
  }

  // Keeps a warp's parts of columns; at(n): which of KEPT_COLUMNS of which 64 rows part n is, of 8 rows that lanes 4 apart have. Lanes exchange
  // halves of them until each has one: number 2·(lane / 16) + lane / 8 % 2.
  template<int I = 0, class At> KS_DEVICE void keep_columns(WarpParts* kept, int warp, int lane, At at) {
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
        if (!(lane & 4)) kept[kept_of<I>() + at(lane >> 3)].of[warp] = part;
      }
      keep_columns<I + 1>(kept, warp, lane, at);
    }
  }

  // Writes parts of rows, whose strip ends, and keeps a warp's of the strip; begins the next ones.
  template<int I = 0> KS_DEVICE void end_strip(WarpParts* kept, const To& to, const EpilogueBlock& block, int strip, int warp, int lane) {
    if constexpr (I < COUNT) {
      if constexpr (!by_column(I)) {
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int half = 0; half < (by_row(I) ? 2 : 1); half++) {
            float& part = of[I][i][half];
#pragma unroll
            for (int m = 1; m < (by_row(I) ? 4 : WARP); m *= 2) part = join<I>(part, shuffle_xor(part, m));
            const int row = block.row + 64 * i + 8 * half;
            if (by_row(I)) {
              if ((lane & 3) == 0 && row < block.rows && strip * STRIP_COLUMNS < block.columns)
                put_part(to.parts[I] + Parts<Epilogue, I>::place(to, block.matrix, row, strip), part);
            } else if (lane == 0) {
              kept[kept_of<I>() + i].of[warp] = part;
            }
            part = 0.f;
          }
      }
      end_strip<I + 1>(kept, to, block, strip, warp, lane);
    }
  }

  // Joins the warps' parts, of columns from `column` on and, where it ends, of their strip, and writes them. row: the consumer's first.
  template<bool STRIP_ENDS, int I = 0>
  KS_DEVICE void write(const WarpParts* kept, const To& to, const EpilogueBlock& block, int row, int column, int thread) const {
    if constexpr (I < COUNT) {
      constexpr int COLUMNS = by_column(I) ? KEPT_COLUMNS : by_row(I) || !STRIP_ENDS ? 0 : 1;
      const int strip_column = column / STRIP_COLUMNS;
#pragma unroll
      for (int first = 0; first < MT * COLUMNS; first += 128) {
        const int n = first + thread, r = row + n / max_of(COLUMNS, 1) * STRIP_ROWS;
        const int c = by_column(I) ? column + n % max_of(COLUMNS, 1) : strip_column * STRIP_COLUMNS;
        if (n >= MT * COLUMNS || r >= block.rows || c >= block.columns) continue;
        const float* const x = kept[kept_of<I>() + n].of;
        const i64 place = Parts<Epilogue, I>::place(to, block.matrix, r / STRIP_ROWS, by_column(I) ? c : strip_column);
        put_part(to.parts[I] + place, join<I>(join<I>(x[0], x[1]), join<I>(x[2], x[3])));
      }
      write<STRIP_ENDS, I + 1>(kept, to, block, row, column, thread);
    }
  }
};
