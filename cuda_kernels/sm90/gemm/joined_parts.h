// Sums and maxima whose parts (reductions.h) the launch itself adds up, where all of its tiles run at once: a second launch takes longer.
// The consumers of the last tile that a number is of wait for its parts, which blocks of lower numbers, that start earlier, write. A part is
// one word, 0 until it is there and after it was read, so that nothing is counted and no other memory has to be seen. Always in one order.
//
// Registers: up to 32, when the accumulators have been stored.
#pragma once
#include "sm90/gemm/reductions.h"

struct JoinedParts {
  const Arguments& a;
  const TileCoord& p;
  int matrix, thread;  // which, and the number among all of the tile's consumers

  static_assert(!Config::ADDS_UP || !PING_PONG, "consumers that share a tile");

  template<int I = 0> KS_DEVICE void run() const {
    if constexpr (I < Config::REDUCTIONS) {
      if (a.reduced.matrices[I] == 1 || matrix == a.reduced.matrices[I] - 1) add_up<I>();
      run<I + 1>();
    }
  }

  template<int I> KS_DEVICE void add_up() const {
    typedef Parts<Epilogue, I> Of;
    constexpr int HIGH = Epilogue::REDUCED_ROWS[I] / Of::HIGH, WIDE = Epilogue::REDUCED_COLUMNS[I] / Of::WIDE;  // parts of a number; 0: all
    constexpr int LANES = Of::BY_COLUMN ? 1 : !Of::BY_ROW ? WARP : WIDE ? 1 : 2;  // that share a number
    constexpr int TOGETHER = !Of::BY_ROW ? 8 : WIDE ? min_of(WIDE, 8) : BN > 128 || Config::BLOCKS > 1 ? 16 : 32;  // parts that each of them loads
    const int rows = Of::BY_ROW ? a.M : a.parts.row_strips, columns = Of::BY_COLUMN ? a.N / PER_COLUMN : a.parts.column_strips;
    const int high = HIGH ? HIGH : rows, wide = WIDE ? WIDE : columns, row = p.row / Of::HIGH, column = result_column(p) / Of::WIDE;
    const OwnNumbers down = own_numbers(high, row, row + BM / Of::HIGH, rows);
    const OwnNumbers across = own_numbers(wide, column, column + BN / PER_COLUMN / Of::WIDE, columns);
    const int numbers = down.count * across.count;
#pragma unroll 1
    for (int all = thread / WARP * WARP / LANES; all < numbers; all += 128 * SHARERS / LANES) {  // of a warp
      const int n = all + thread % WARP / LANES;
      const int line = n / (Of::BY_ROW ? down.count : across.count), rest = n - line * (Of::BY_ROW ? down.count : across.count);
      const int r = down.first + (Of::BY_ROW ? rest : line), c = across.first + (Of::BY_ROW ? line : rest);
      const int many = min_of(high, rows - r * high), broad = min_of(wide, columns - c * wide), count = n < numbers ? many * broad : 0;
      float x = 0.f;
#pragma unroll 1
      for (int m = matrix + 1 - a.reduced.matrices[I]; m <= matrix; m++)
#pragma unroll 1
        for (int first = thread % LANES; first < count; first += LANES * TOGETHER) {
          auto at = [&](int j) {
            const int i = first + LANES * j, i_row = Of::BY_COLUMN ? i : Of::BY_ROW || WIDE == 0 ? 0 : i / broad;  // whole rows follow one another
            return (u32*)a.parts.parts[I] + Of::place(a.parts, m, r * high + i_row, c * wide + i - i_row * broad);
          };
          u32 part[TOGETHER];
#pragma unroll
          for (int j = 0; j < TOGETHER; j++) part[j] = first + LANES * j < count ? 0 : ~0u;
          for (bool waits = true; waits;) {  // all that are not there yet are asked for at once
#pragma unroll
            for (int j = 0; j < TOGETHER; j++)
              if (part[j] == 0) part[j] = load_relaxed(at(j));
            waits = false;
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) waits |= part[j] == 0;
          }
#pragma unroll
          for (int j = 0; j < TOGETHER; j++) {
            x = joined<Epilogue::MAXIMUM[I]>(x, __uint_as_float(~part[j]));
            if (first + LANES * j < count) store_relaxed(at(j), 0);  // for the next launch
          }
        }
#pragma unroll
      for (int lane = 1; lane < LANES; lane *= 2) x = joined<Epilogue::MAXIMUM[I]>(x, shuffle_xor(x, lane));
      if (thread % LANES == 0 && n < numbers) a.reduced.numbers[I][matrix * a.reduced.matrix[I] + r * a.reduced.row[I] + c * a.reduced.column[I]] = x;
    }
  }
};
