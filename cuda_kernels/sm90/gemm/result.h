// Where a tile's result goes, as the roles ask for it: the rows of C here, the heads of three operands in heads.h. A result says
//   ORDERED, weight_row:  which row of B, and element of the bias, makes a column of the tile; as numbered where not ORDERED,
//                         else UNIT_ROWS together
//   apply_rotary:         of heads that are rotated: what is done to the sums before they are rounded
//   BOX_BYTES:            of a row of a box that TMA stores: the swizzle of the epilogue's buffers is as wide, of 128 or 64
//   matrix, store_boxes:  where a tile's are among the maps' last axes; stores 64 rows of a panel, which lie at `from` and of which
//                         `left` columns are the tile's, by TMA
//   rows, store:          the 16 rows that a warp stores itself, from number `first` on; 16 bytes of row r of them
#pragma once
#include "sm90/gemm/block.h"

// But for what is behind the `left` first elements, and the first `skipped`.
KS_DEVICE void store_chunk(TC* to, const Chunk<TC>& x, int left, int skipped = 0) {
  if (left >= Chunk<TC>::N && skipped <= 0) {
    *(Chunk<TC>*)to = x;
  } else {
#pragma unroll
    for (int e = 0; e < Chunk<TC>::N; e++)
      if (e < left && e >= skipped) to[e] = x.v[e];
  }
}

// Where rows that warps store go: the first, elements from one to the next, the end of the columns and their first.
struct StoredRows {
  TC* base;
  int row, columns, first = 0;
};

// Those of a list's product.
KS_DEVICE StoredRows rows_of_list(const Arguments& a, const GroupScheduler& s, const TileCoord& p) {
  return {listed((TC*)a.c, p.matrix), s.groups.of_list(p.matrix, ROW_OF_C), s.groups.of_list(p.matrix, OF_N)};
}
template<class Tiles> StoredRows rows_of_list(const Arguments&, const Tiles&, const TileCoord&);  // never called

struct MatrixResult {
  static constexpr bool ORDERED = false;
  // Half panels where the last is half a one; else, of a gate of 8 bits, a tile's 96 columns.
  static constexpr int ROW_BYTES = BN / PER_COLUMN * sizeof(TC), UNIT_ROWS = BN;
  static constexpr int BOX_BYTES = Config::STORE == ROWS || ROW_BYTES % 128 == 0 ? 128 : ROW_BYTES % 64 == 0 ? 64 : ROW_BYTES;

  KS_DEVICE int weight_row(int column) const { return column; }

  KS_DEVICE void apply_rotary(const float (&)[MT][BN / 2], const TileCoord&, int, int, int) const {}

  KS_DEVICE Matrix matrix(const Arguments& a, const TileCoord& p) const { return c_matrix(a, p); }
  KS_DEVICE void store_boxes(const Maps& maps, const Arguments&, u32 from, Matrix c, int column, int left, int row, u64 policy) const {
#pragma unroll
    for (int b = 0; b < C_COLUMNS; b += BOX_BYTES / sizeof(TC)) {
      const u32 box = from + b * (64 * (int)sizeof(TC));
      if (b && b >= left) return;
      if (Config::C_FIRST) tma_store(maps.c, box, column + b, row, c.x2, c.x3, policy);
      else tma_store(maps.c, box, column + b, row, c.x2, c.x3);
    }
  }

  struct Rows { int first, end, index; };
  KS_DEVICE Rows rows(const Arguments& a, const TileCoord& p, int first) const {
    const int end = end_of_rows(a, p);
    return {first, end, Config::SCATTERED ? a.indices.row_of_c(min_of(first + (lane() & 15), end - 1)) : 0};
  }
  // Every lane must come.
  KS_DEVICE void store(const Arguments&, const StoredRows& to, const Rows& rows, int r, int column, const Chunk<TC>& x) const {
    const int row = Config::SCATTERED ? shuffle(rows.index, r) : rows.first + r;
    if (rows.first + r < rows.end) store_chunk(to.base + (i64)row * to.row + column, x, to.columns - column, to.first - column);
  }
};
