// The store of the epilogue: a tile is rounded, written to shared memory in the 128-byte swizzle, and then, by STORE,
//   ROWS: each warp stores its own rows, in chunks of 16 bytes, neighbouring lanes one row;
//   TMA:  a warp of the producer warpgroup for each consumer stores boxes of 64 rows by TMA. The consumer goes on as soon as a
//         buffer is free (a ring: full after one arrival a warp, empty when TMA has read it); but loads queue behind stores.
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

  KS_DEVICE void run(int first, int step) {
    const u64 policy = Config::C_FIRST ? evict_first() : 0;
    PipelineState<SLOTS> out_state{0, 0};
    int batches = 0;
#pragma unroll 1
    for (int t = first; t < scheduler.total; t += step) {
      const TileCoord p = scheduler.tile(t, rank);
      const Matrix c = result.matrix(a, p);
#pragma unroll 1
      for (int panel = 0; panel < C_PANELS; panel += BATCH)
#pragma unroll 1
        for (int i = 0; i < MT; i++, out_state.advance()) {
          out_ring.wait_full(out_state);
          const int row = p.row + 64 * (group * MT + i);
          // Rows of the next group are behind the end of this one: the consumer has stored those before.
          if (!GROUPED_ROWS || row + 64 <= p.end)
#pragma unroll
          for (int n = 0; n < BATCH; n++) {
            const u32 from = shared_address(storage.out[group][out_state.stage * BATCH + n]);
            result.store_boxes(maps, a, from, c, p.column + C_COLUMNS * (panel + n), row, policy);
          }
          tma_store_commit();
          tma_store_wait_read<SLOTS - 1>();  // the batch SLOTS − 1 before this one was read: the next slot's
          if (++batches >= SLOTS) barrier_arrive(out_ring.barriers + 8 * (SLOTS + (out_state.stage + 1) % SLOTS));
        }
    }
    tma_store_wait<0>();
  }
};
