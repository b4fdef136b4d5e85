// Three warps that transpose blocks of V, of e4m3: wgmma takes factors of 8 bits along k alone, and k of P·V are the keys.
//
// ldmatrix transposes pairs of bytes: of 8 keys and 16 columns, a lane gets keys 2t and 2t + 1 (t = lane % 4) of columns 2c and
// 2c + 1 (c = lane / 4). Of two such, 8 keys apart, a byte permutation makes the four keys of one column, and stmatrix stores them
// as bytes 4t … 4t + 3 of that column's chunk of 16. So a chunk has its keys in the order
//   2t, 2t + 1, 8 + 2t, 9 + 2t   at   4t … 4t + 3,
// which is the order in which a lane's scores make an A fragment of P: nothing else has to be moved. Columns 2c and 2c + 1 trade
// places where c ≥ 4, so that the eight rows of a store lie in different banks.
//
// 0 · NaN is NaN, so a weight of 0 does not mask a NaN: in blocks with masked keys NaN is replaced by zero on the way (rows that do
// see it get it added at the end), and rows beyond a sequence's end are.
#pragma once
#include "sm90/attention/block.h"

constexpr int TRANSPOSING_WARPS = 3;

// Bytes of NaN in four numbers of e4m3, all ones each.
KS_DEVICE u32 nan_bytes(u32 x) { return (((x & 0x7f7f7f7f) + 0x01010101 & 0x80808080) >> 7) * 0xff; }

struct ValueTranspose {
  static constexpr int ROW = panel_row<DV, 1>, CHUNKS = ROW / 16;  // of V as it is loaded
  static constexpr int COLUMN = BN;                               // bytes of a column of V, transposed
  static_assert(!E4M3 || BN == 64 || BN == 128, "a column is a row of one panel");

  u32 from, to;  // this lane's row of ldmatrix, and of stmatrix
  int lane;

  KS_DEVICE ValueTranspose(u32 rows, u32 columns, int lane) : lane(lane) {
    const int r = lane % 8, key = lane / 8 % 2 * 8 + r, chunk = lane / 16;
    from = rows + key * ROW + (chunk ^ (ROW == 64 ? r / 2 % 4 : r)) * 16;
    const int d = lane / 16 * 16 + 2 * r + (r / 4 ^ lane / 8 % 2);
    to = columns + d * COLUMN + (COLUMN == 64 ? d / 2 % 4 : d % 8) * 16;
  }

  // The block's keys 16·k … 16·k + 15. `valid`: rows of the block that are of the sequence. Returns whether there was NaN.
  template<bool MASKED> KS_DEVICE bool keys(int k, int valid) const {
    constexpr int BATCH = 2, UNROLL = MASKED ? 1 : DV / 32 / BATCH;  // in registers at once
    const u32 here = RECOMPUTES_ADDRESSES ? opaque(from + k * 16 * ROW) : 0;  // kept from one k to the next; else one address for each chunk is
    const u32 low = lane < 16 ? 0x6420 : 0x7531, high = lane < 16 ? 0x7531 : 0x6420;
    u32 nan = 0, kept = ~0u;
    if (MASKED && RAGGED) {
      const int t = k * 16 + lane % 4 * 2;
      kept = (t < valid ? 0xffu : 0) | (t + 1 < valid ? 0xff00u : 0) | (t + 8 < valid ? 0xff0000u : 0) |
             (t + 9 < valid ? 0xff000000u : 0);
    }
#pragma unroll UNROLL
    for (int first = 0; first < DV / 32; first += BATCH) {
      u32 x[BATCH][4];
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const int chunk = 2 * (first + i);
        const u32 place = RECOMPUTES_ADDRESSES ? here ^ chunk % CHUNKS * 16 : (from ^ chunk % CHUNKS * 16) + k * 16 * ROW;
        ldmatrix_transposed(x[i], place + chunk / CHUNKS * (BN * ROW));
      }
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        u32 y[4] = {__byte_perm(x[i][0], x[i][1], low), __byte_perm(x[i][0], x[i][1], high),
                    __byte_perm(x[i][2], x[i][3], low), __byte_perm(x[i][2], x[i][3], high)};
        if constexpr (MASKED) {
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const u32 bad = nan_bytes(y[j] &= kept);
            y[j] &= ~bad, nan |= bad;
          }
        }
        stmatrix((to ^ k * 16) + (first + i) * 32 * COLUMN, y[0], y[1], y[2], y[3]);
      }
    }
    return nan;
  }
  // A warp's part of a block.
  template<bool MASKED> KS_DEVICE bool run(int warp, int valid) const {
    bool nan = false;
#pragma unroll 1
    for (int k = warp; k < BN / 16; k += TRANSPOSING_WARPS) nan |= keys<MASKED>(k, valid);
    return nan;
  }
};

KS_DEVICE void transpose_values(SharedStorage& storage, const Rings& rings, int warp) {
  PipelineState<STAGES> v{0, 1};
#pragma unroll 1
  for (PipelineState<V_STAGES> rows{0, 0};; rows.advance(), v.advance()) {
    rings.v_loaded.wait_full(rows);
    const auto block = storage.v_block[rows.stage];
    if (block.tile < 0) return;
    rings.v.wait_empty(v);
    const ValueTranspose transpose{shared_address(storage.v.loaded(rows.stage)), shared_address(storage.v.tiles[v.stage]), lane()};
    if (MASKS_KEYS && block.masked) {
      if (transpose.run<true>(warp, block.rows)) storage.v_filtered[block.tile] = 1;
    } else {
      transpose.run<false>(warp, BN);
    }
    async_proxy_fence();
    warp_barrier();
    if (lane() == 0) barrier_arrive(rings.v.full(v)), barrier_arrive(rings.v_loaded.empty(rows));
  }
}
