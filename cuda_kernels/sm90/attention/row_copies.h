// A block's rows from wherever they lie in global memory to shared memory, by warps whose lanes copy 16 bytes each (cp.async): eight lanes a row
// of a panel, each with some neighbouring rows, into the swizzle that TMA would have written.
#pragma once
#include "sm90/attention/keys.h"

constexpr int COPYING_WARPS = 2;  // of K, of which the producer's is one, and as many of V

// ROWS rows of WIDTH columns; zeros in the block's columns beyond these.
template<class T, int ROWS, class Block, int WIDTH> struct RowCopies {
  u32 to;
  const T* from;  // row 0 of what `places` counts
  int row_step;   // in elements, from a row to the next
  const int* places;

  // NEIGHBOURS: fewer where the producer has fewer registers for them.
  static constexpr int NEIGHBOURS = Config::GROUPS > 2 || (Config::GROUPS > 1 && (Config::IN_PARTS || Config::GROUP_HEADS > 1)) ? 2 : 4;
  static constexpr int AT_ONCE = 4 * NEIGHBOURS;
  static constexpr int CHUNK = 16 / sizeof(T), PANEL_COLUMNS = Block::ROW / (int)sizeof(T);
  static_assert(Block::ROW == 128 && Block::EIGHT_ROWS == 1024 && ROWS % AT_ONCE == 0, "eight chunks a row");

  struct alignas(4 * NEIGHBOURS) Places { int of[NEIGHBOURS]; };
  static KS_DEVICE int column() { return lane() % 8 * CHUNK; }
  // The lane's first row of AT_ONCE, and where its chunk of that lies, from which that of its n-th row differs by n · 16 in the swizzle.
  static KS_DEVICE int first_row() { return lane() / 8 * NEIGHBOURS; }
  static KS_DEVICE int first_place() { return first_row() * Block::ROW + (lane() ^ first_row()) % 8 * 16; }

  // Copies the rows below `rows`, of each of WARPS warps some; the others are zeros.
  template<int WARPS> KS_DEVICE void copy(int warp, int rows) const {
    const T* const source = from + column();
    const u32 place = to + first_place();
    const int* next = places + warp * AT_ONCE + first_row();
    Places of_next = *(const Places*)next;
#pragma unroll 1
    for (int first = warp * AT_ONCE; first < ROWS; first += WARPS * AT_ONCE) {
      const Places at = of_next;  // read before the copies ahead of it are issued
      next += WARPS * AT_ONCE;
      if (first + WARPS * AT_ONCE < ROWS) of_next = *(const Places*)next;
#pragma unroll
      for (int n = 0; n < NEIGHBOURS; n++) {
        const T* const row = source + (i64)at.of[n] * row_step;
        const bool there = first + first_row() + n < rows;
#pragma unroll
        for (int panel = 0; panel < Block::PANELS; panel++) {
          const bool inside = (panel + 1) * PANEL_COLUMNS <= WIDTH || panel * PANEL_COLUMNS + column() < WIDTH;
          async_copy((place ^ n * 16) + first * Block::ROW + n * Block::ROW + panel * Block::PANEL, row + panel * PANEL_COLUMNS, there && inside);
        }
      }
    }
  }
  // Calls act(place in the block) for each chunk that the lane copied.
  template<int WARPS, class Act> static KS_DEVICE void each_chunk(int warp, const Act& act) {
#pragma unroll 1
    for (int first = warp * AT_ONCE; first < ROWS; first += WARPS * AT_ONCE)
#pragma unroll 1
      for (int n = 0; n < NEIGHBOURS; n++)
#pragma unroll 1
        for (int panel = 0; panel < Block::PANELS; panel++) act((first_place() ^ n * 16) + (first + n) * Block::ROW + panel * Block::PANEL);
  }
};
