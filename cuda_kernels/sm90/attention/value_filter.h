// Three warps that look after blocks of V which hold what some row may not see: 0 · NaN is NaN, so that a weight of 0 hides
// nothing. They put zeros in place of what is not finite, and of rows beyond a sequence's end, before the block counts as full.
#pragma once
#include "sm90/attention/not_finite.h"

constexpr int CLEANING = 96;  // threads

struct Cleaner {
  uint4* block;
  int me;

  // Whether all of the block is finite, as far as this thread has looked.
  KS_DEVICE bool finite() const {
    u32 most = 0;
#pragma unroll 8
    for (int i = me; i < V_BYTES / 16; i += CLEANING) {
      most = largest(most, block[i]);
    }
    return finite_part(most) == most;
  }
  // Rows from `rows` on become zeros.
  KS_DEVICE void cut(int rows) const {
#pragma unroll 1
    for (int i = me; i < V_BYTES / 16; i += CLEANING)
      if (i / 8 % BN >= rows) block[i] = uint4{0, 0, 0, 0};
  }
  KS_DEVICE void take_out() const {
#pragma unroll 1
    for (int i = me; i < V_BYTES / 16; i += CLEANING) {
      uint4& x = block[i];
      x = uint4{finite_part(x.x), finite_part(x.y), finite_part(x.z), finite_part(x.w)};
    }
  }
};

KS_DEVICE void clean(Shared& at, const Rings& rings, int me) {
#pragma unroll 1
  for (Cursor<STAGES> v{0, 0};; v.advance()) {
    barrier_wait(shared_address(&at.v_landed[v.stage]), v.parity);
    const auto told = at.v_block[v.stage];
    if (told.tile < 0) return;
    const Cleaner cleaner{(uint4*)at.v[v.stage], me};
    bool odd = false;
    if (told.hides) {
      if (RAGGED && told.rows < BN) cleaner.cut(told.rows), async_proxy_fence();
      odd = !cleaner.finite();
    }
    if (named_barrier_any(CLEANERS, CLEANING, odd)) {
      cleaner.take_out();
      at.removed[told.tile] = 1;
      async_proxy_fence();
      named_barrier_sync(CLEANERS, CLEANING);
    }
    if (me == 0) {
      if (told.hides) barrier_arrive(rings.v.full(v));
      barrier_arrive(rings.v.empty(v));  // what is told of the stage has been read
    }
  }
}
