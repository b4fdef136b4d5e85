// Three warps that look after blocks of V which hold what some row may not see: 0 · NaN is NaN, so that a weight of 0 hides
// nothing. They put zeros in place of what is not finite, and of rows beyond a sequence's end.
#pragma once
#include "sm90/attention/block.h"

// Whether one of two 16-bit numbers is NaN or inf.
KS_DEVICE bool not_finite(u32 pair, f16) { return (pair & 0x7c00u) == 0x7c00u || (pair & 0x7c000000u) == 0x7c000000u; }
KS_DEVICE bool not_finite(u32 pair, bf16) { return (pair & 0x7f80u) == 0x7f80u || (pair & 0x7f800000u) == 0x7f800000u; }
KS_DEVICE u32 finite_part(u32 pair) {
  const bool low = not_finite(pair & 0xffffu, T()), high = not_finite(pair & 0xffff0000u, T());
  return pair & (low ? 0xffff0000u : ~0u) & (high ? 0xffffu : ~0u);
}

KS_DEVICE void clean(Shared& at, const Rings& rings, int me) {
  Cursor<STAGES> v{0, 0};
#pragma unroll 1
  for (;; v.advance()) {
    barrier_wait(shared_address(&at.v_landed[v.stage]), v.parity);
    const auto block = at.v_block[v.stage];
    if (block.tile < 0) return;
    if (block.hides) {
      bool found = false;
#pragma unroll 2
      for (int i = me; i < V_BYTES / 16; i += 96) {
        uint4& place = ((uint4*)at.v[v.stage])[i];
        const uint4 x = place;
        const bool beyond = i / 8 % BN >= block.rows;
        const bool odd = not_finite(x.x, T()) || not_finite(x.y, T()) || not_finite(x.z, T()) || not_finite(x.w, T());
        if (beyond) place = uint4{0, 0, 0, 0};
        else if (odd) place = uint4{finite_part(x.x), finite_part(x.y), finite_part(x.z), finite_part(x.w)}, found = true;
      }
      if (found) at.removed[block.tile] = 1;
      async_proxy_fence();
    }
    named_barrier_sync(CLEANERS, 96);
    if (me == 0) {
      if (block.hides) barrier_arrive(rings.v.full(v));
      barrier_arrive(rings.v.empty(v));  // what is told of the stage has been read
    }
  }
}
