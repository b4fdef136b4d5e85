// The store of the epilogue: a tile is rounded, written to shared memory in the 128-byte swizzle, and then, by STORE,
//   ROWS: each warp stores its own rows, in chunks of 16 bytes, neighbouring lanes one row;
//   TMA:  a warp of the producer warpgroup for each consumer stores boxes of 64 rows by TMA. The consumer goes on as soon as a
//         buffer is free (a ring: full after one arrival a warp, empty when TMA has read it); but loads queue behind stores.
// Where the epilogue is an expression (expression.h), what it is of may be stored, too, before it and in the same way.
#pragma once
#include "sm90/gemm/heads.h"

typedef conditional<Config::HEADS, HeadsResult, MatrixResult>::type Result;

// The thread that issues a consumer's TMA stores.
struct EpilogueStore {
  SharedStorage& storage;
  const Maps& maps;
  const Ring<SLOTS>& out_ring;
  const Arguments& a;
  const Scheduler& scheduler;
  const Result& result;
  int rank, group;
  PipelineState<SLOTS> out_state{0, 0};
  int batches = 0, last = -1;

  // A tile's panels; store(from, panel, row) issues the stores of one.
  template<int PANELS, class Store> KS_DEVICE void panels(const TileCoord& p, Store store) {
#pragma unroll 1
    for (int panel = 0; panel < PANELS; panel += BATCH)
#pragma unroll 1
      for (int i = 0; i < MT; i++, out_state.advance()) {
        out_ring.wait_full(out_state);
        const int row = p.row + 64 * (first_rows_of(group) + i);
        if (of_group(p, row, p.column + C_COLUMNS * panel, C_COLUMNS * BATCH))  // else the consumer has stored them
#pragma unroll
        for (int n = 0; n < BATCH; n++) store(shared_address(storage.out[group][out_state.stage * BATCH + n]), panel + n, row);
        tma_store_commit();
        tma_store_wait_read<SLOTS - 1>();  // the batch SLOTS − 1 before this one was read: the next slot's
        if (++batches >= SLOTS) barrier_arrive(out_ring.barriers + 8 * (SLOTS + (out_state.stage + 1) % SLOTS));
      }
  }

  KS_DEVICE void run(int first, int step) {
    const u64 policy = Config::C_FIRST ? evict_first() : 0;
    const OwnTiles own = own_tiles(group, first, step);
#pragma unroll 1
    for (int t = own.first; t < scheduler.total; t += own.step) {
      const TileCoord p = scheduler.tile(t, rank);
      if (leaves_out(p, group) || !stores(p)) continue;
      if constexpr (Config::PREACTIVATION) {
        const Matrix sums = sums_matrix(a, p);
        panels<SUM_PANELS>(p, [&](u32 from, int panel, int row) {
#pragma unroll
          for (int b = 0; b < C_COLUMNS; b += Result::BOX_BYTES / sizeof(TC))
            tma_store(maps.sums, from + b * (64 * (int)sizeof(TC)), product_column(a, p, C_COLUMNS * panel + b), row, sums.x2, sums.x3);
        });
      }
      const Matrix c = result.matrix(a, p);
      const TensorMap* own = &maps.c;
      if constexpr (OF_LISTS) own = maps_of_list(a, p, last, 2, 3) + 2;
      const Maps to{maps.a, maps.b, *own, maps.residual, maps.a1, maps.a2, maps.c1, maps.c2, maps.sums};
      panels<C_PANELS>(p, [&](u32 from, int panel, int row) {
        result.store_boxes(to, a, from, c, result_column(p) + C_COLUMNS * panel, BN / PER_COLUMN - C_COLUMNS * panel, row, policy);
      });
    }
    tma_store_wait<0>();
  }
};
