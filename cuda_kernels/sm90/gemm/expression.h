// The epilogue as an expression (generated/epilogue.h) of a thread's accumulators, in place: of a consumer's rows row + 64·i + 8·half it has
// neighbouring columns, 2q and 2q + 1 of every 8. Of HALVES the two of a pair are BN/4 accumulators apart. Of NEIGHBOURS they are side
// by side, and what becomes of them is where the first was: column q of every 4 of the result.
#pragma once
#include "sm90/gemm/block.h"

// Elements that are computed together: what more of them load and keep would be spilled.
constexpr int ELEMENTS_AT_ONCE = 8;

KS_DEVICE void apply_epilogue(float (&acc)[MT][BN / 2], const EpilogueArguments& given, const TileCoord& p, int row, int columns, int q) {
  const Epilogue own = given.captured();
  const auto tile = own.tile(given.results.number(p.batch, p.head));
  const int column = result_column(p), row0 = row + given.results.rows_before(p.head);
  Epilogue::Row rows[MT][2];
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int half = 0; half < 2; half++) rows[i][half] = own.row(tile, row0 + 64 * i + 8 * half);
  constexpr int APART = Config::PAIRS == HALVES ? BN / 4 : 1, EACH = Config::PAIRS == NEIGHBOURS ? 1 : 2;
  constexpr int EIGHTS = Config::PAIRS == HALVES ? BN / 16 : BN / 8, AT_ONCE = max_of(ELEMENTS_AT_ONCE / (2 * MT * EACH), 1);
#pragma unroll
  for (int first = 0; first < EIGHTS; first += AT_ONCE) {
    if (column + 4 * EACH * first >= columns) break;  // also keeps the compiler from computing all at once
#pragma unroll
    for (int c = first; c < min_of(first + AT_ONCE, EIGHTS); c++)
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        const auto at = own.column(tile, column + EACH * (4 * c + q) + e);
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            float& x = acc[i][4 * c + 2 * half + e];
            if constexpr (Config::PAIRS != 0) x = own.value(x, (&x)[APART], tile, rows[i][half], at);
            else x = own.value(x, tile, rows[i][half], at);
          }
      }
  }
}
