// Three warps that copy V, where no boxes of it are loaded (row_copies.h): the producer says that a stage is empty and where its rows lie. In
// blocks with masked keys each thread sets non-finite values among what it copied to zero, as value_filter.h has it; rows beyond a sequence's
// end are not copied.
#pragma once
#include "sm90/attention/value_filter.h"

constexpr int COPYING_WARPS = FILTER_THREADS / WARP;

template<class PagedKeys> KS_DEVICE void copy_values(SharedStorage& storage, const Rings& rings, const PagedKeys& keys, int warp) {
  int slot = 0;
#pragma unroll 1
  for (PipelineState<STAGES> v{0, 0};; v.advance()) {
    slot = PagedKeys::following_slot(slot);  // as the producer's
    barrier_wait(shared_address(&storage.v_loaded[v.stage]), v.parity);
    const auto block = storage.v_block[v.stage];
    if (block.tile < 0) return;
    char* const values = storage.v.tiles[v.stage];
    const T* const from = keys.v.base + storage.work_tiles[block.tile].kv_head * keys.v.head;
    const typename PagedKeys::template Copies<VBlock, DV> rows{shared_address(values), from, keys.v.row, storage.loader.places[slot]};
    rows.template copy<COPYING_WARPS>(warp, block.rows);
    if (block.masked) {
      async_copies_wait();
      bool filtered = false;
      rows.template each_chunk<COPYING_WARPS>(warp, [&](int place) {
        uint4& x = *(uint4*)(values + place);
        const uint4 y{finite_part(x.x), finite_part(x.y), finite_part(x.z), finite_part(x.w)};
        if (y.x == x.x && y.y == x.y && y.z == x.z && y.w == x.w) return;
        x = y, filtered = true;
      });
      if (filtered) storage.v_filtered[block.tile] = 1;
      barrier_arrive(rings.v.full(v));
    } else {
      async_copies_arrive(rings.v.full(v));
    }
  }
}
