// The store of the epilogue: a tile is rounded, written to shared memory in the 128-byte swizzle, and then, by KS_STORE,
//   ROWS: each warp stores its own rows, in chunks of 16 bytes, neighbouring lanes one row;
//   TMA:  a warp of the producer warpgroup for each consumer stores boxes of 64 rows by TMA. The consumer goes on as soon as a
//         buffer is free (a ring: full after one arrival a warp, empty when TMA has read it); but loads queue behind stores.
#pragma once
#include "sm90/gemm/block.h"

enum { ROWS = 0, TMA = 1 };

// The thread that issues a consumer's TMA stores.
struct EpilogueStore {
  SharedStorage& storage;
  const Maps& maps;
  const Ring<SLOTS>& out_ring;
  const Arguments& a;
  const TileScheduler& scheduler;
  int rank, group;

  KS_DEVICE void run(int first, int step) {
    const u64 policy = KS_C_FIRST ? evict_first() : 0;
    PipelineState<SLOTS> out_state{0, 0};
    int batches = 0;
#pragma unroll 1
    for (int t = first; t < scheduler.total; t += step) {
      const TileCoord p = scheduler.tile(t, rank);
      const Matrix c = matrix_of(a, a.c, p, p.head, 1, 1);
#pragma unroll 1
      for (int panel = 0; panel < C_PANELS; panel += BATCH)
#pragma unroll 1
        for (int i = 0; i < MT; i++, out_state.advance()) {
          out_ring.wait_full(out_state);
          const int row = p.row + 64 * (group * MT + i);
#pragma unroll
          for (int n = 0; n < BATCH; n++) {
            const u32 from = shared_address(storage.out[group][out_state.stage * BATCH + n]);
            if (KS_C_FIRST) tma_store(maps.c, from, p.column + C_COLUMNS * (panel + n), row, c.x2, c.x3, policy);
            else tma_store(maps.c, from, p.column + C_COLUMNS * (panel + n), row, c.x2, c.x3);
          }
          tma_store_commit();
          tma_store_wait_read<SLOTS - 1>();  // the batch SLOTS − 1 before this one was read: the next slot's
          if (++batches >= SLOTS) barrier_arrive(out_ring.barriers + 8 * (SLOTS + (out_state.stage + 1) % SLOTS));
        }
    }
    tma_store_wait<0>();
  }
};

KS_DEVICE void store_chunk(TC* to, const Chunk<TC>& x, int left) {
  if (left >= Chunk<TC>::N) {
    *(Chunk<TC>*)to = x;
  } else {
#pragma unroll
    for (int e = 0; e < Chunk<TC>::N; e++)
      if (e < left) to[e] = x.v[e];
  }
}
