// Where a tile's result goes, as the roles ask for it: the rows of C here, the heads of three operands in heads.h. A result says
//   ORDERED, weight_row:  which row of B, and element of the bias, makes a column of the tile; as numbered where not ORDERED,
//                         else UNIT_ROWS together
//   turn:                 what it does to the sums before they are rounded
//   BOX_COLUMNS:          of a box that TMA stores, 64 or 32: the swizzle of the epilogue's buffers is as wide
//   store_boxes:          stores 64 rows of a panel, which lie at `from`, by TMA
//   rows:                 the 16 rows that a warp stores itself; their store() takes 16 bytes
#pragma once
#include "sm90/gemm/block.h"

KS_DEVICE void store_chunk(T* to, const Chunk<T>& x, int left) {
  if (left >= Chunk<T>::N) {
    *(Chunk<T>*)to = x;
  } else {
#pragma unroll
    for (int e = 0; e < Chunk<T>::N; e++)
      if (e < left) to[e] = x.v[e];
  }
}

struct MatrixResult {
  static constexpr bool ORDERED = false;
  static constexpr int BOX_COLUMNS = 64, UNIT_ROWS = BN;

  KS_DEVICE int weight_row(int column) const { return column; }

  KS_DEVICE void turn(const float (&)[MT][BN / 2], const TileCoord&, int, int, int) const {}

  KS_DEVICE void store_boxes(const Maps& maps, const Arguments& a, u32 from, const TileCoord& p, int column, int row,
                             u64 policy) const {
    const Matrix c = matrix_of(a, a.c, p, p.head, 1, 1);
    if (KS_C_FIRST) tma_store(maps.c, from, column, row, c.x2, c.x3, policy);
    else tma_store(maps.c, from, column, row, c.x2, c.x3);
  }

  struct Rows {
    const Arguments& a;
    T* c;
    int row;
    KS_DEVICE void store(int r, int column, const Chunk<T>& x) const {
      if (row + r < a.M) store_chunk(c + (i64)(row + r) * a.c_row + column, x, a.N - column);
    }
  };
  KS_DEVICE Rows rows(const Arguments& a, const TileCoord&, T* c, int row) const { return {a, c, row}; }
};
