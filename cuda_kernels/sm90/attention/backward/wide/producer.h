// The producer thread: gets tiles from the scheduler, loads K and V once a tile, q, dout and their rows' values once a step.
#pragma once
#include "sm90/attention/backward/wide/block.h"

struct Producer {
  SharedStorage& storage;
  const Maps& maps;
  const Rings& rings;
  const Operands& a;
  TileScheduler<KEYS> scheduler;
  PipelineState<1> kv{0, 1};
  u32 steps = 0;  // that were loaded: where q and dout go follows

  // Asked for each time: this thread has few registers.
  static KS_DEVICE int rank() { return cluster_rank(); }
  KS_DEVICE int clusters() const { return gridDim.x / CLUSTER; }
  // The next number of the counter, from the first tile on: in order, whoever holds one runs. The first block asks, and tells the other.
  // One message a tile, as of K and V: the phase of the one follows from that of the other. `before`: the last tile; STAGGERED, as
  // backward/producer.h says.
  KS_DEVICE int count_tile(int before) {
    const u32 parity = kv.parity ^ 1;
    if (rank() == 0) {
      const int t = STAGGERED ? before + clusters() : (int)atomicAdd(a.counter, 1u);
      barrier_wait(rings.tile.empty({0, 0}), parity ^ 1);
      store_async(shared_address(&storage.tile), t, rings.tile.full({0, 0}), 1);
      return t;
    }
    barrier_arrive_expect_tx(rings.tile.full({0, 0}), 4);
    barrier_wait(rings.tile.full({0, 0}), parity);
    const int t = *(volatile int*)&storage.tile;
    barrier_arrive_at(rings.tile.empty({0, 0}), 0);
    return t;
  }
  // The stage of part n of a ring, and the phase to wait for.
  template<int STAGES> static KS_DEVICE PipelineState<STAGES> nth(u32 n) { return {(int)(n % STAGES), n / STAGES % 2 ^ 1}; }

  // A part of q's or dout's columns: the blocks of the cluster alternate at its panels, each for both.
  template<int COLUMNS> KS_DEVICE void load_part(u32 to, const TensorMap& map, u32 full, int column, int row, int head, int batch) {
#pragma unroll
    for (int c = 0; c < COLUMNS; c += CLUSTER * 64) {
      const int panel = c / 64 + rank();
      if (panel * 64 < COLUMNS)
        tma_load_multicast(to + panel * PANEL_BYTES, map, full, column + panel * 64, row, head, batch, (1 << CLUSTER) - 1);
    }
  }
  // q of a step, and beside it what every row subtracts. `block`: of row values (sums.h); `row`: the step's first.
  KS_DEVICE void load_q(const WorkTile& w, int head, int block, int row) {
#pragma unroll
    for (int h = 0; h < Q_PARTS; h++) {
      const auto q = nth<Q_STAGES>(steps * Q_PARTS + h);
      constexpr int COLUMNS = part_columns(QK_COLUMNS);
      rings.q.wait_empty(q);
      const u32 full = rings.q.full(q);
      barrier_arrive_expect_tx(full, PART_BYTES<QK_COLUMNS> + (h == 0 ? 2 * ROW_BYTES : 0));
      load_part<COLUMNS>(shared_address(storage.q[q.stage]), maps.q, full, h * COLUMNS, row, head, Config::Q_VIEW == PACKED ? 0 : w.batch);
      if (h == 0) {
        if (steps == 0) earlier_kernels_wait();  // for row values, not for the operands
        bulk_load(shared_address(storage.lse[q.stage]), a.lse + (i64)block * STEP, ROW_BYTES, full);
        bulk_load(shared_address(storage.delta[q.stage]), a.delta + (i64)block * STEP, ROW_BYTES, full);
      }
    }
  }
  KS_DEVICE void load_dout(const WorkTile& w, int head, int row) {
#pragma unroll
    for (int h = 0; h < O_PARTS; h++) {
      const auto o = nth<O_STAGES>(steps * O_PARTS + h);
      constexpr int COLUMNS = part_columns(V_COLUMNS);
      rings.dout.wait_empty(o);
      const u32 full = rings.dout.full(o);
      barrier_arrive_expect_tx(full, PART_BYTES<V_COLUMNS>);
      load_part<COLUMNS>(shared_address(storage.dout[o.stage]), maps.dout, full, h * COLUMNS, row, head, Config::Q_VIEW == PACKED ? 0 : w.batch);
    }
    steps++;
  }
  // Publishes the work tile to the consumers.
  KS_DEVICE void load_kv(const WorkTile& w) {
    rings.kv.wait_empty(kv);
    const u32 full = rings.kv.full(kv);
    constexpr bool ALL = PIECES == CLUSTER * GROUPS;  // of the consumers multiply a panel of dq
    barrier_arrive_expect_tx(full, K_BYTES + V_BYTES + (ALL || rank() == 0 ? OTHER_BYTES : KEY_PANEL_BYTES));
    const int first = w.k_first + w.tile * KEYS, row = first + rank() * BLOCK_KEYS, batch = Config::KV_VIEW == PACKED ? 0 : w.batch;
    tile_load<BLOCK_KEYS, QK_COLUMNS>(shared_address(storage.k), maps.k, full, row, w.banded.key_head, batch);
    tile_load<BLOCK_KEYS, V_COLUMNS>(shared_address(storage.v), maps.v, full, row, w.banded.key_head, batch);
#pragma unroll
    for (int c = 0; c < GROUPS; c++)
      if (ALL || c == 0 || rank() == 0)
        tma_load(shared_address(storage.other_k) + c * KEY_PANEL_BYTES, maps.k, full, (rank() * GROUPS + c) * 64,
                 first + (rank() ^ 1) * BLOCK_KEYS, w.banded.key_head, batch);
    kv.advance();
  }

  // Coordinates of the tile are read from shared memory: this thread has few registers.
  KS_DEVICE void run() {
    const SumBlocks& blocks = scheduler.count.blocks;
    storage.walk[0] = storage.walk[1] = 0;
    int t = count_tile((int)block_index() / CLUSTER - clusters());
#pragma unroll 1
    for (; scheduler.next(t, storage.work_tiles[kv.parity]); t = count_tile(t)) {
      const WorkTile& w = storage.work_tiles[kv.parity];
      if (w.steps == 0) {
        earlier_kernels_wait();  // as backward/producer.h says
        load_kv(w);
        continue;
      }
      int head = w.kv_head * scheduler.count.head_group, m = w.first;
#pragma unroll 1
      for (;;) {
        load_q(w, head, blocks.first(w.batch, w.q_first) + head * blocks.head_blocks + m, w.q_first + m * STEP);
        if (m == w.first && head == w.kv_head * scheduler.count.head_group) load_kv(w);
        load_dout(w, head, w.q_first + m * STEP);
        if (w.walk().next(m) && ++head == (w.kv_head + 1) * scheduler.count.head_group) break;
      }
    }
    rings.kv.wait_empty(kv);
    storage.work_tiles[kv.parity].steps = -1;
    barrier_arrive(rings.kv.full(kv));
    if (rank() == 0) {  // the last cluster resets the counter
      __threadfence();
      if (atomicAdd(a.counter + 1, 1u) == clusters() - 1) a.counter[0] = 0, a.counter[1] = 0;
    }
  }
};
