// The warps that copy rows which no boxes have (row_copies.h), beside the producer, which has half of K's: one K's other half, two V's. The
// producer says that a stage is empty and where its rows lie. In blocks with masked keys each thread sets non-finite values among what it copied
// of V to zero, as value_filter.h has it; rows beyond a sequence's end are not copied.
#pragma once
#include "sm90/attention/value_filter.h"

template<class PagedKeys> KS_DEVICE void copy_keys_beside(SharedStorage& storage, const Rings& rings, const PagedKeys& keys) {
  int slot = 0;
#pragma unroll 1
  for (PipelineState<STAGES> k{0, 0};; k.advance()) {
    slot = PagedKeys::following_slot(slot);  // as the producer's
    barrier_wait(shared_address(&storage.loader.k_begun[k.stage]), k.parity);
    const int kv_head = storage.loader.kv_head[k.stage];
    if (kv_head < 0) return;
    const typename PagedKeys::template Copies<KBlock, DQK> rows{shared_address(storage.k[k.stage]), keys.k.base + kv_head * keys.k.head, keys.k.row,
                                                                storage.loader.places[slot]};
    rows.template copy<COPYING_WARPS>(1, BN);
    async_copies_arrive(rings.k.full(k));
  }
}

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

// Of the producer's warpgroup, the warps behind its own.
template<class PagedKeys> KS_DEVICE void copy_rows(SharedStorage& storage, const Rings& rings, const PagedKeys& keys, int warp) {
  if (warp == 1) copy_keys_beside(storage, rings, keys);
  else copy_values(storage, rings, keys, warp - COPYING_WARPS);
}
