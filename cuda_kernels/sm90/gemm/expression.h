// The epilogue as an expression (generated/epilogue.h) of a thread's accumulators, in place: of a consumer's rows row + 64·i + 8·half it has
// neighbouring columns, 2q and 2q + 1 of every 8. Of HALVES the two of a pair are BN/4 accumulators apart. Of NEIGHBOURS they are side
// by side, and what becomes of them is where the first was: column q of every 4 of the result.
#pragma once
#include "sm90/gemm/joined_parts.h"

// Elements that are computed together: what more of them load and keep would be spilled, or is slower. (H200, 512×6144×4096 by 128×192, over
// the product alone: a gate of neighbours 1.2 % by 16 and 5.2 % by 8, gelu with a bias 9 and 8 %.)
constexpr int ELEMENTS_AT_ONCE = Config::PAIRS && !PING_PONG && !Config::REDUCTIONS ? 16 : 8;

struct Expression {
  const Epilogue own;
  const Epilogue::Tile tile;
  const EpilogueBlock block;  // its first row is this thread's; rows and columns: where they end
  const int lane;
  Epilogue::Row rows[MT][2];
  Reduced<Config::REDUCTIONS> reduced{};

  static constexpr int APART = Config::PAIRS == HALVES ? BN / 4 : 1, EACH = Config::PAIRS == NEIGHBOURS ? 1 : 2;
  static constexpr int EIGHTS = Config::PAIRS == HALVES ? BN / 16 : BN / 8, AT_ONCE = max_of(ELEMENTS_AT_ONCE / (2 * MT * EACH), 1);
  static constexpr int PANEL = C_COLUMNS / (4 * EACH), STRIP = STRIP_COLUMNS / (4 * EACH), KEPT = KEPT_COLUMNS / (4 * EACH);  // of so many eights
  static_assert(Config::REDUCTIONS == 0 || AT_ONCE * EACH * MT == FOUR, "parts of columns");
  static_assert(PANEL % AT_ONCE == 0 && (Config::REDUCTIONS == 0 || (KEPT % AT_ONCE == 0 && STRIP % KEPT == 0)), "computed together");

  KS_DEVICE Expression(const Arguments& a, const TileCoord& p, int row, int lane)
      : own(a.epilogue.captured()), tile(own.tile(number(a, p))),
        block{number(a, p), row, result_column(p), a.M, a.N / PER_COLUMN}, lane(lane) {
    const int row0 = row + a.epilogue.results.rows_before(p.head);
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) rows[i][half] = own.row(tile, row0 + 64 * i + 8 * half);
  }
  static KS_DEVICE int number(const Arguments& a, const TileCoord& p) { return a.epilogue.results.number(p.batch, p.head); }

  // Applies it to `panels` panels of the result, from number `panel` on. kept: where the consumer's warps keep parts of sums and maxima.
  KS_DEVICE void apply(float (&acc)[MT][BN / 2], const Arguments& a, WarpParts* kept, int consumer, int warp, int panel, int panels) {
#pragma unroll
    for (int n = 0; n < panels * PANEL; n += AT_ONCE) {
      const int first = panel * PANEL + n, behind = first + AT_ONCE;
      if (first >= EIGHTS) break;
      // The branch also keeps the compiler from computing all at once.
      const bool some = block.column + 4 * EACH * first < block.columns;
      if (!Config::REDUCTIONS && !some) break;
      if (some) apply_to_some(acc, a, kept, warp, first);
      if constexpr (Config::REDUCTIONS)
        if (behind % KEPT == 0) end_columns(a.parts, kept, consumer, warp, block.column + 4 * EACH * (behind - KEPT), behind % STRIP == 0);
    }
  }

  // Writes what was kept of KEPT_COLUMNS, from `column` on.
  KS_DEVICE void end_columns(const EpilogueParts<Config::REDUCTIONS>& to, WarpParts* kept, int consumer, int warp, int column, bool strip_ends) {
    const int row = block.row - 16 * warp - (lane >> 2), thread = WARP * warp + lane;
    if (strip_ends) reduced.end_strip(kept, to, block, column / STRIP_COLUMNS, warp, lane);
    if (KEPT_PARTS > 0 && (BY_COLUMN || strip_ends)) {
      named_barrier_sync(1 + consumer, 128);
      if (strip_ends) reduced.write<true>(kept, to, block, row, column, thread);
      else reduced.write<false>(kept, to, block, row, column, thread);
      named_barrier_sync(1 + consumer, 128);  // all have been read
    }
  }

  KS_DEVICE void apply_to_some(float (&acc)[MT][BN / 2], const Arguments& a, WarpParts* kept, int warp, int first) {
    if constexpr (Config::REDUCTIONS) reduced.clear_columns();
#pragma unroll
    for (int c = first; c < min_of(first + AT_ONCE, EIGHTS); c++)
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        const int n = block.column + EACH * (4 * c + (lane & 3)) + e;
        const auto at = own.column(tile, n);
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            float& x = acc[i][4 * c + 2 * half + e];
            if constexpr (Config::PAIRS != 0) x = own.value(x, (&x)[APART], tile, rows[i][half], at);
            else x = own.value(x, tile, rows[i][half], at);
            if constexpr (Config::REDUCTIONS)
              x = reduced.take(x, own, tile, rows[i][half], at, block.row + 64 * i + 8 * half < block.rows, n < block.columns, i, half,
                               ((c - first) * EACH + e) * MT + i);
          }
      }
    if constexpr (Config::REDUCTIONS)
      reduced.keep_columns(kept, warp, lane, [&](int n) {
        const int c = first % KEPT + n / (MT * EACH), e = n / MT % EACH, i = n % MT;
        return KEPT_COLUMNS * i + EACH * (4 * c + (lane & 3)) + e;
      });
  }
};
