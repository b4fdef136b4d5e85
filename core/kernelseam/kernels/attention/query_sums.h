// Where dq is summed over keys by many blocks: float32 tiles of STEP queries and DQ columns for each head, zeroed beforehand.
// A tile is a block of accumulators for each warp, one after the other, as the platform lays them out: so that what a warp
// adds goes to whole lines of memory. Nobody but its own kernels knows the order.
//
// Tiles of packed sequences: one that begins at row r of all and has n rows takes ⌈n / STEP⌉ from number ⌊r / STEP⌋ + its own
// number on, each for all heads. The next begins behind them: ⌊(r + n) / STEP⌋ + 1 ≥ ⌊r / STEP⌋ + ⌈n / STEP⌉.
#pragma once
#include "generated/config.h"
#include "tile/tile.h"

constexpr bool ATOMIC = Config::QUERY_ROWS > 0;
constexpr int WARPS = Config::WARPS, COLUMN_WARPS = Config::COLUMN_WARPS, STEP = Config::STEP, QUERY_ROWS = ATOMIC ? Config::QUERY_ROWS : 16;
constexpr int QUERY_COLUMN_WARPS = ATOMIC ? WARPS * QUERY_ROWS / STEP : 1;
constexpr int UNIT = 16 * (COLUMN_WARPS > QUERY_COLUMN_WARPS ? COLUMN_WARPS : QUERY_COLUMN_WARPS);
constexpr int DQ = (Config::DQK + UNIT - 1) / UNIT * UNIT;
constexpr int QUERY_COLUMNS = DQ / QUERY_COLUMN_WARPS;
static_assert(!ATOMIC || QUERY_ROWS * QUERY_COLUMNS * WARPS == STEP * DQ, "warps divide dq");

// The first row and column of a warp's part of a tile.
KS_DEVICE int sums_row() { return warp_index() / QUERY_COLUMN_WARPS * QUERY_ROWS; }
KS_DEVICE int sums_column() { return warp_index() % QUERY_COLUMN_WARPS * QUERY_COLUMNS; }

// A warp's part of a sequence's first tile of the first head; `tiles`: of the longest sequence.
template<bool IS_PACKED, class X> KS_DEVICE X* warp_sums(X* sums, int batch, int q_first, int tiles, int heads) {
  const i64 first = IS_PACKED ? q_first / STEP + batch : (i64)batch * tiles;
  return sums + first * heads * (STEP * DQ) + warp_index() * (QUERY_ROWS * QUERY_COLUMNS);
}
// From there to another tile and head.
KS_DEVICE i64 sums_offset(int tile, int head, int heads) { return ((i64)tile * heads + head) * (STEP * DQ); }
