// Three warps that filter blocks of V with masked keys: 0 · NaN is NaN, so a weight of 0 does not mask a non-finite value. They
// set non-finite values and rows beyond a sequence's end to zero, and only then mark the stage as full.
#pragma once
#include "sm90/attention/non_finite.h"

constexpr int FILTER_THREADS = 96;

struct ValueFilter {
  uint4* block;
  int thread;

  // Whether this thread's part of the block is finite.
  KS_DEVICE bool finite() const {
    u32 most = 0;
#pragma unroll 8
    for (int i = thread; i < V_BYTES / 16; i += FILTER_THREADS) {
      most = max_magnitude(most, block[i]);
    }
    return finite_part(most) == most;
  }
  // Sets rows from `rows` on to zero.
  KS_DEVICE void zero_rows_from(int rows) const {
#pragma unroll 1
    for (int i = thread; i < V_BYTES / 16; i += FILTER_THREADS)
      if (VBlock::row_of(i) >= rows) block[i] = uint4{0, 0, 0, 0};
  }
  KS_DEVICE void zero_non_finite() const {
#pragma unroll 1
    for (int i = thread; i < V_BYTES / 16; i += FILTER_THREADS) {
      uint4& x = block[i];
      x = uint4{finite_part(x.x), finite_part(x.y), finite_part(x.z), finite_part(x.w)};
    }
  }
};

KS_DEVICE void filter_values(SharedStorage& storage, const Rings& rings, int thread) {
#pragma unroll 1
  for (PipelineState<STAGES> v{0, 0};; v.advance()) {
    barrier_wait(shared_address(&storage.v_loaded[v.stage]), v.parity);
    const auto block = storage.v_block[v.stage];
    if (block.tile < 0) return;
    const ValueFilter filter{(uint4*)storage.v.tiles[v.stage], thread};
    bool non_finite = false;
    if (block.masked) {
      if (RAGGED && block.rows < BN) filter.zero_rows_from(block.rows), async_proxy_fence();
      non_finite = !filter.finite();
    }
    if (named_barrier_any(FILTER, FILTER_THREADS, non_finite)) {
      filter.zero_non_finite();
      storage.v_filtered[block.tile] = 1;
      async_proxy_fence();
      named_barrier_sync(FILTER, FILTER_THREADS);
    }
    if (thread == 0) {
      if (block.masked) barrier_arrive(rings.v.full(v));
      barrier_arrive(rings.v.empty(v));  // v_block has been read
    }
  }
}
