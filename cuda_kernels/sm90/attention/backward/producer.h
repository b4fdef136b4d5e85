// The producer thread: gets tiles from the scheduler, loads K and V once a tile, q, dout and their rows' values once a step.
#pragma once
#include "sm90/attention/backward/block.h"

struct Producer {
  SharedStorage& storage;
  const Maps& maps;
  const Rings& rings;
  const Operands& a;
  TileScheduler<KEYS> scheduler;
  PipelineState<KV_STAGES> kv{0, 1};
  PipelineState<STAGES> q{0, 1};
  PipelineState<O_STAGES> o{0, 1};

  // In order the first tile is taken from the counter, too: whoever holds it runs. STAGGERED, the counter is not asked: a block that comes
  // late would leave its tile to one whose own still waits for it.
  KS_DEVICE int first_tile() const { return Config::IN_ORDER && !STAGGERED ? (int)atomicAdd(a.counter, 1u) : (int)block_index(); }
  KS_DEVICE int next_tile(int t) const {
    if constexpr (STAGGERED) return t + (int)gridDim.x;
    return (int)atomicAdd(a.counter, 1u) + (Config::IN_ORDER ? 0 : (int)gridDim.x);
  }

  // q of a step, and beside it what every row subtracts; so dout. `block`: of row values (sums.h); `row`: the step's first. Row values are of
  // the kernel before, which began when the operands were there: those of the first step, its keys too, are asked for while it runs.
  KS_DEVICE void load_q(const WorkTile& w, int head, int block, int row, ListedBlock listed, bool begins) {
    rings.q.wait_empty(q);
    if constexpr (LISTED) storage.listed[q.stage] = {listed, head};
    const u32 full = rings.q.full(q);
    barrier_arrive_expect_tx(full, Q_BYTES + ROW_BYTES);
    tile_load<STEP, QK_COLUMNS>(shared_address(storage.q[q.stage]), maps.q, full, row, head, Config::Q_VIEW == PACKED ? 0 : w.batch);
    if (begins) load_k(w), earlier_kernels_wait();
    bulk_load(shared_address(storage.lse[q.stage]), a.lse + (i64)block * STEP, ROW_BYTES, full);
    q.advance();
  }
  KS_DEVICE void load_dout(const WorkTile& w, int head, int block, int row) {
    rings.dout.wait_empty(o);
    const u32 full = rings.dout.full(o);
    barrier_arrive_expect_tx(full, O_BYTES + ROW_BYTES);
    tile_load<STEP, V_COLUMNS>(shared_address(storage.dout[o.stage]), maps.dout, full, row, head, Config::Q_VIEW == PACKED ? 0 : w.batch);
    bulk_load(shared_address(storage.delta[o.stage]), a.delta + (i64)block * STEP, ROW_BYTES, full);
    o.advance();
  }
  template<int COLUMNS> KS_DEVICE void load_keys(const WorkTile& w, const Ring<KV_STAGES>& ring, const char* to, const TensorMap& map) {
    ring.wait_empty(kv);
    const u32 full = ring.full(kv);
    barrier_arrive_expect_tx(full, tile_bytes<KEYS, COLUMNS>);
    const int head = LISTED ? w.kv_head : w.banded.key_head;
    tile_load<KEYS, COLUMNS>(shared_address(to), map, full, w.k_first + w.tile * KEYS, head, Config::KV_VIEW == PACKED ? 0 : w.batch);
  }
  // Publishes the work tile to the consumers.
  KS_DEVICE void load_k(const WorkTile& w) { load_keys<QK_COLUMNS>(w, rings.k, storage.k[kv.stage], maps.k); }
  KS_DEVICE void load_v(const WorkTile& w) {
    load_keys<V_COLUMNS>(w, rings.v, storage.v[kv.stage], maps.v);
    kv.advance();
  }

  // Coordinates of the tile are read from shared memory: this thread has few registers.
  KS_DEVICE void run() {
    const SumBlocks& blocks = scheduler.count.blocks;
    storage.walk[0] = storage.walk[1] = 0;
    int t = first_tile();
#pragma unroll 1
    for (; scheduler.next(t, storage.work_tiles[work_slot(kv)]); t = next_tile(t)) {
      const WorkTile& w = storage.work_tiles[work_slot(kv)];
      if (w.steps == 0) {
        earlier_kernels_wait();  // as where row values are loaded: here are none, and zeros are stored
        load_k(w);
        load_v(w);
        continue;
      }
      int head = w.kv_head * scheduler.count.head_group, m = w.first;
      auto listed = [&] { return ListedBlock{LISTED ? w.list[m] : 0}; };
      ListedBlock own = listed();
      auto place = [&] { return LISTED ? own.block() : m; };
      auto block = [&] { return blocks.first(w.batch, w.q_first) + head * blocks.head_blocks + place(); };
      auto begins = [&] { return m == w.first && head == w.kv_head * scheduler.count.head_group; };
#pragma unroll 1
      for (;;) {
        load_q(w, head, block(), w.q_first + place() * STEP, own, begins());
        load_dout(w, head, block(), w.q_first + place() * STEP);
        if (begins()) load_v(w);
        if (w.walk().next(m) && ++head == (w.kv_head + 1) * scheduler.count.head_group) break;
        own = listed();
      }
    }
    rings.k.wait_empty(kv);
    storage.work_tiles[work_slot(kv)].steps = -1;
    barrier_arrive(rings.k.full(kv));
    __threadfence();
    if (atomicAdd(a.counter + 1, 1u) == gridDim.x - 1) a.counter[0] = 0, a.counter[1] = 0;  // the last block resets the counter
  }
};
