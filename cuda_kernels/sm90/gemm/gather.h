// The loading warpgroup where A's rows are gathered (GATHERED): TMA has no list of rows, so its threads copy A, 8 of them a row of a slice,
// 16 rows at a time, into the swizzle that TMA would have written; one of them loads B by TMA. A stage is full when both are there. A consumer orders
// its products behind what cp.async wrote by a proxy fence.
#pragma once
#include "sm90/gemm/epilogue.h"

// An argument of the kernel, passed whole.
struct GatheredRows { int a_row, K; };

struct GatheringProducer {
  SharedStorage& storage;
  const Maps& maps;
  const Ring<STAGES>& ring;
  const Arguments& a;
  const Scheduler& scheduler;
  const GatheredRows& gathered;
  int thread;
  PipelineState<STAGES> state{0, 1};

  static_assert(!Config::GATHERED || (CLUSTER == 1 && SPLIT == 1 && !Config::SCALE_K && Config::STORE == ROWS), "all its warps load");
  static constexpr int PASSES = BM / 16, CHUNK = 16 / sizeof(T);

  KS_DEVICE void load_b(const TileCoord& p, int k) const {
    const u32 full = ring.full(state), to = shared_address(storage.stages[state.stage]) + A_BYTES;
    barrier_arrive_expect_tx(full, B_BYTES);
    if (Config::B_TRANSPOSED) {
#pragma unroll
      for (int i = 0; i < B_BOXES; i++)
        tma_load(to + i * (B_BYTES / B_BOXES), maps.b, full, k, product_column(a, p, i * (BN / B_BOXES)), 0, p.batch * a.b_batch);
    } else {
#pragma unroll
      for (int i = 0; i < PANELS; i++) tma_load(to + i * ROWS_BYTES, maps.b, full, product_column(a, p, 64 * i), k, 0, p.batch * a.b_batch);
    }
  }

  KS_DEVICE void run(int first, int step) {
    const int row = thread / 8, chunk = thread % 8;
#pragma unroll 1
    for (int t = first; t < scheduler.total; t += step) {
      const TileCoord p = scheduler.tile(t, 0);
      const T* from[PASSES];  // of rows behind the group's last that one: what comes of them is not stored
#pragma unroll
      for (int i = 0; i < PASSES; i++)
        from[i] = (const T*)a.a + (i64)a.indices.row_of_a(min_of(p.row + row + 16 * i, p.end - 1)) * gathered.a_row + CHUNK * chunk;
#pragma unroll 1
      for (int s = 0; s < a.slices; s++, state.advance()) {
        ring.wait_empty(state);
        if (thread == 0) load_b(p, s * BK);
        const u32 to = shared_address(storage.stages[state.stage]) + row * 128 + (chunk ^ row % 8) * 16;
        const int left = gathered.K - s * BK - CHUNK * chunk;  // of K: behind it zeros
        const int bytes = max_of(min_of(left, CHUNK), 0) * (int)sizeof(T);
#pragma unroll
        for (int i = 0; i < PASSES; i++) async_copy_bytes(to + 16 * 128 * i, from[i] + (left > 0 ? s * BK : 0), bytes);
        async_copies_arrive(ring.full(state));
      }
    }
  }
};
