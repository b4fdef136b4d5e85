// The loading thread: finds tiles, fetches Q, K and V.
#pragma once
#include "sm90/attention/block.h"

struct Producer {
  Shared& at;
  const Maps& maps;
  const Rings& rings;
  Cursor<Q_STAGES * GROUPS> q{0, 1};
  Cursor<STAGES> k{0, 1}, v{0, 1};
  int tile = 0;  // how many tiles there were before

  KS_DEVICE void load_q(const Work& w) {
#pragma unroll 1
    for (int g = 0; g < GROUPS; g++, q.advance()) {
      rings.q.wait_empty(q);
      barrier_expect(rings.q.full(q), Q_BYTES);  // with it the tile is known to the consumer
      tile_load<64, DQK>(shared_address(at.q) + q.stage * Q_BYTES, maps.q, rings.q.full(q), w.q_first + w.row + 64 * g, w.head,
                         KS_Q_VIEW == PACKED ? 0 : w.batch);
    }
  }
  KS_DEVICE void stop() {
    at.works[tile % KNOWN].end = 0;
#pragma unroll 1
    for (int g = 0; g < GROUPS; g++, q.advance()) rings.q.wait_empty(q), barrier_arrive(rings.q.full(q));
    if (CLEANS) {
      rings.v.wait_empty(v);
      at.v_block[v.stage].tile = -1;
      barrier_arrive(shared_address(&at.v_landed[v.stage]));
    }
  }
  KS_DEVICE void load_k(const Work& w, int block) {
    rings.k.wait_empty(k);
    barrier_expect(rings.k.full(k), K_BYTES);
    tile_load<BN, DQK>(shared_address(at.k[k.stage]), maps.k, rings.k.full(k), w.k_first + block * BN, w.kv_head,
                       KS_KV_VIEW == PACKED ? 0 : w.batch);
    k.advance();
  }
  // `index`: which tile the block of keys is for. Where keys are hidden, the cleaners say when V is full.
  KS_DEVICE void load_v(const Work& w, int block, int index) {
    rings.v.wait_empty(v);
    u32 full = rings.v.full(v);
    if constexpr (CLEANS) {
      const u32 landed = shared_address(&at.v_landed[v.stage]);
      const bool hides = block < w.open_begin || block >= w.open_end;
      at.v_block[v.stage] = {w.S_k - block * BN, index % KNOWN, hides};
      if (hides) full = landed;
      else barrier_arrive(landed);
    }
    barrier_expect(full, V_BYTES);
    tile_load<BN, DV>(shared_address(at.v[v.stage]), maps.v, full, w.k_first + block * BN, w.kv_head,
                      KS_KV_VIEW == PACKED ? 0 : w.batch);
    v.advance();
  }

  // Per step K of a block, then V of the one before. With EARLY a tile's first K goes ahead of the last V before it.
  KS_DEVICE void run(TileOrder<BM, BN>& order, const Operands& a) {
    // Coordinates are read where they were put for the consumers: this thread has few registers.
    auto known = [&](int index) -> const Work& { return at.works[index % KNOWN]; };
    auto first_k = [&](int index) { load_k(known(index), known(index).end - 1); };
    auto find = [&](int t) {
      if (!order.find(t, at.works[tile % KNOWN])) return false;
      if (CLEANS) at.removed[tile % KNOWN] = 0;
      tile++;
      return true;
    };
    int t = block_index();
    bool more = find(t);
    if (more) first_k(0), load_q(known(0));
#pragma unroll 1
    while (more) {
      const int index = tile - 1, begin = known(index).begin;
      int block = known(index).end - 1;
      auto step = [&] {
        load_k(known(index), block - 1);
        load_v(known(index), block, index);
        block--;
      };
      t = KS_DYNAMIC ? (int)atomicAdd(a.counter, 1u) + (int)gridDim.x : t + (int)gridDim.x;
      if (KS_EARLY) {
        if (block > begin) step();
        more = find(t);
        if (more) load_q(known(index + 1));
      }
#pragma unroll 1
      while (block > begin) step();
      if (KS_EARLY && more) first_k(index + 1);
      load_v(known(index), block, index);
      if (!KS_EARLY) {
        more = find(t);
        if (more) first_k(index + 1), load_q(known(index + 1));
      }
    }
    stop();
    if (KS_DYNAMIC) {  // the last block leaves the counter as it was
      __threadfence();
      if (atomicAdd(a.counter + 1, 1u) == gridDim.x - 1) a.counter[0] = 0, a.counter[1] = 0;
    }
  }
};
