// Sums of a tile that blocks of a cluster have parts of: in the ring of the first block, which adds them up.
#pragma once
#include "sm90/gemm/block.h"

struct SplitSums {
  SharedStorage& storage;
  const Arguments& a;
  int split_rank, number;  // the block's, and the thread's among the consumers'

  static constexpr int THREADS = A_ROWS == BM ? CONSUMERS : A_ROWS / 16 * WARP;  // that have rows of C

  // Where four of a thread's accumulators, from e on, of block 1, 2, … lie in the first block's ring: behind the source tiles.
  KS_DEVICE u32 partial_place(int from, int e) const {
    const int row = ((from - 1) * MT * (BN / 2) + e) / 4 * THREADS * 16;  // of their bytes
    static_assert(SPLIT == 1 || STAGE_BYTES % (THREADS * 16) == 0, "such a row lies in one stage");
    const int stage = (part_slices(a.slices) + a.source_stages() + row / STAGE_BYTES) % STAGES;
    return shared_address(storage.stages[stage]) + row % STAGE_BYTES + number * 16;
  }
  // Adds up a cluster's sums in its first block; false in the others, which are done.
  KS_DEVICE bool add_up(float (&acc)[MT][BN / 2]) const {
    cluster_barrier();  // the first block's ring has been read
    if (split_rank && number < THREADS)
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int e = 0; e < BN / 2; e += 4) {
          const float* const x = &acc[i][e];
          store_at(partial_place(split_rank, i * (BN / 2) + e), 0, x[0], x[1], x[2], x[3]);
        }
    cluster_barrier();
    if (split_rank) return false;
    if (number >= THREADS) return true;
#pragma unroll 1
    for (int from = 1; from < SPLIT; from++)
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int e = 0; e < BN / 2; e += 4) {
          float x[4];
          load_four(partial_place(from, i * (BN / 2) + e), x);
#pragma unroll
          for (int n = 0; n < 4; n++) acc[i][e + n] += x[n];
        }
    return true;
  }
};
