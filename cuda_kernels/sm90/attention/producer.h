// The producer: gets tiles from the scheduler and loads Q, K and V. A thread, or a warp of which one thread leads: the Keys policy says.
#pragma once
#include "sm90/attention/value_transpose.h"

struct Producer {
  SharedStorage& storage;
  const Maps& maps;
  const Rings& rings;
  Keys::Loader keys;
  const VisitedBlocks& visited;
  PipelineState<Q_STAGES * Q_BOXES> q{0, 1};
  PipelineState<STAGES> k{0, 1};
  PipelineState<V_STAGES> v{0, 1};
  int tile = 0;  // tiles so far
  BlockWord word;  // of LISTED blocks, the one of the block that was loaded last

  KS_DEVICE void load_q(const WorkTile& w) {
#pragma unroll 1
    for (int g = 0; g < Q_BOXES; g++, q.advance()) {
      rings.q.wait_empty(q);
      if (!keys.leads()) continue;
      barrier_arrive_expect_tx(rings.q.full(q), Q_BYTES / 64 * (BM / Q_BOXES));  // publishes the work tile to the consumer
      const u32 to = shared_address(storage.q) + q.stage * (ROW_GROUPS / Q_BOXES * Q_BYTES);
      const int batch = Config::Q_VIEW == PACKED ? 0 : w.batch;
      if constexpr (GROUP_HEADS > 1)
        grouped_tile_load<BOX_ROWS, QK_COLUMNS>(to, maps.q, rings.q.full(q), w.q_first + w.query + BM / Q_BOXES / GROUP_HEADS * g, w.group,
                                                batch);
      else
        tile_load<64, QK_COLUMNS, SIZE>(to, maps.q, rings.q.full(q), w.q_first + w.row + 64 * g, w.head, batch);
    }
  }
  KS_DEVICE void stop() {
    storage.work_tiles[tile % WORK_SLOTS].end = 0;
#pragma unroll 1
    for (int g = 0; g < Q_BOXES; g++, q.advance()) rings.q.wait_empty(q), barrier_arrive(rings.q.full(q));
    if (E4M3 || FILTERS_VALUES) {
      wait_empty_v();
      storage.v_block[v.stage].tile = -1;
      barrier_arrive(shared_address(&storage.v_loaded[v.stage]));
    }
  }
  KS_DEVICE const BlockWord* words(const WorkTile& w) const { return visited.of(w.batch, GROUP_HEADS > 1 ? w.group : w.head, w.row / BM); }
  // The block that a tile visits after this one.
  KS_DEVICE int following(const WorkTile& w, int block) {
    if constexpr (LISTED) return last_visited(words(w), word, w.begin, block);
    return block - 1;
  }
  // Whether all rows of a tile see all keys of a block that `masks` leave whole.
  KS_DEVICE bool whole(const WorkTile& w, int block, bool masks = true) const { return masks && block >= w.unmasked_begin && block < w.unmasked_end; }
  // A block whose keys are loaded: where they lie, and of LISTED ones whether the tile's rows see all of it.
  struct Loaded { Keys::Place place; bool whole; };
  // `first`: of the tile. `before`: the block before.
  KS_DEVICE Loaded load_k(const WorkTile& w, int left, const Loaded& before, bool first) {
    const int block = w.visited(left);
    if (LISTED && first) word = words(w)[block / 32];
    const bool by_masks = LISTED && (word.every >> block % 32 & 1), all = LISTED && whole(w, block, by_masks);
    const auto place = keys.find(w, block, first, before.place);
    const auto boxes = keys.boxes(w, block, place);
    rings.k.wait_empty(k);
    if constexpr (Keys::COPIED) {
      keys.template copy_keys<KBlock, DQK>(shared_address(storage.k[k.stage]), rings.k.full(k), k.stage, w, place);
    } else if (keys.leads()) {
      if (LISTED) storage.k_block[k.stage] = 4 * block + 2 * by_masks + all;
      barrier_arrive_expect_tx(rings.k.full(k), K_BYTES);
      keys.load<KBlock>(shared_address(storage.k[k.stage]), maps.k, rings.k.full(k), w, block, boxes);
    }
    k.advance();
    return {place, all};
  }
  KS_DEVICE void wait_empty_v() {
    barrier_wait(E4M3 ? rings.v_loaded.empty(v) : rings.v.barriers + 8 * (STAGES + v.stage), v.parity);
  }
  // `index`: the block's tile. Where keys are masked, the filter's warps mark V as full; of e4m3 those that transpose it, always.
  KS_DEVICE void load_v(const WorkTile& w, int left, int index, const Loaded& loaded) {
    const int block = w.visited(left);
    const auto boxes = keys.boxes(w, block, loaded.place);
    auto masked = [&] { return LISTED ? !loaded.whole : !whole(w, block); };
    wait_empty_v();
    if (keys.leads()) {
      u32 full = E4M3 ? rings.v_loaded.full(v) : rings.v.barriers + 8 * v.stage;
      if constexpr (E4M3) {
        storage.v_block[v.stage] = {w.S_k - block * BN, index % WORK_SLOTS, MASKS_KEYS && masked()};
      } else if constexpr (FILTERS_VALUES) {
        const u32 arrived = shared_address(&storage.v_loaded[v.stage]);
        const bool hides = masked();
        storage.v_block[v.stage] = {w.S_k - block * BN, index % WORK_SLOTS, hides};
        if (hides && !Keys::COPIED) full = arrived;
        else barrier_arrive(arrived);
      }
      if constexpr (!Keys::COPIED) {
        barrier_arrive_expect_tx(full, V_BYTES);
        keys.load<VBlock>(shared_address(storage.v.loaded(v.stage)), maps.v, full, w, block, boxes);
      }
    }
    v.advance();
  }

  // Per step K of a block, then V of the previous one. With EARLY a tile's first K precedes the previous tile's last V.
  KS_DEVICE void run(TileScheduler<BM, BN>& scheduler, const Operands& a, const OperandScales& scales) {
    // Coordinates are read from shared memory: a thread has few registers.
    auto work_tile = [&](int index) -> const WorkTile& { return storage.work_tiles[index % WORK_SLOTS]; };
    auto load_first_k = [&](int index, const Loaded& before) { return load_k(work_tile(index), work_tile(index).end - 1, before, true); };
    // Where each tile has a block of its own, none asks for another: the answer would hold up a short tile's loads. Beside more than two
    // consumers there is no register for it.
    const bool alone = GROUPS <= 2 && scheduler.count.total * scheduler.count.parts <= (int)gridDim.x;
    if (TWO_LISTS && Config::DYNAMIC && !alone) scheduler.list = scheduler.first_list(block_index());
    int t = scheduler.first(block_index());
    auto ask = [&] {
      if (alone) return;
      int next = -1;
      if (keys.leads()) next = Config::DYNAMIC ? (int)atomicAdd(a.counter + scheduler.list % 2, 1u) + scheduler.beginners(gridDim.x) : t + (int)gridDim.x;
      t = next;
    };
    auto find = [&] {
      WorkTile& w = storage.work_tiles[tile % WORK_SLOTS];
      if constexpr (!BY_WARP) return keys.agree(keys.leads() && scheduler.next(t, w));
      if (keys.agree(scheduler.next(keys.number(t), w))) return true;
      if (!TWO_LISTS || !scheduler.change_list(block_index())) return false;
      ask();
      return keys.agree(scheduler.next(keys.number(t), w));
    };
    auto next_tile = [&] {
      if ((tile > 0 && alone) || !find()) return false;
      keys.begin(storage.work_tiles[tile % WORK_SLOTS]);
      if (keys.leads()) {
        if constexpr (Config::Q_SCALES) {
          const WorkTile& w = storage.work_tiles[tile % WORK_SLOTS];
          storage.scales[tile % WORK_SLOTS] = {scales.q.at(w.batch, w.kv_head) * scales.k.at(w.batch, w.kv_head),
                                               scales.v.at(w.batch, w.kv_head)};
        }
        if (FILTERS_VALUES || E4M3) storage.v_filtered[tile % WORK_SLOTS] = 0;
      }
      tile++;
      return true;
    };
    bool more = next_tile();
    Loaded loaded{};  // the block whose V comes next
    if (more) loaded = load_first_k(0, loaded), load_q(work_tile(0));
#pragma unroll 1
    while (more) {
      const int index = tile - 1, begin = work_tile(index).begin;
      int block = work_tile(index).end - 1;
      auto step = [&] {
        const int behind = following(work_tile(index), block);
        const Loaded next = load_k(work_tile(index), behind, loaded, false);
        load_v(work_tile(index), block, index, loaded);
        loaded = next, block = behind;
      };
      auto load_next_q = [&] {
        if (!Config::EARLY) return;
        more = next_tile();
        if (more) load_q(work_tile(index + 1));
      };
      if (!Config::LATE) {
        ask();
        if (Config::EARLY && block > begin) step();
        load_next_q();
      }
#pragma unroll 1
      while (block > begin + (Config::LATE ? 2 : 0)) step();
      if (Config::LATE) {  // the answer comes during a step
        ask();
        if (block > begin + 1) step();
        load_next_q();
        if (block > begin) step();
      }
      const Loaded last = loaded;
      if (Config::EARLY && more) loaded = load_first_k(index + 1, loaded);
      load_v(work_tile(index), block, index, last);
      if (!Config::EARLY) {
        more = next_tile();
        if (more) loaded = load_first_k(index + 1, loaded), load_q(work_tile(index + 1));
      }
    }
    if (Keys::COPIED) rings.k.wait_empty(k), keys.stop(k.stage);
    if (!keys.leads()) return;
    stop();
    if (Config::DYNAMIC && !alone) {  // the last block resets the counter
      __threadfence();
      if (atomicAdd(a.counter + 2, 1u) == gridDim.x - 1) a.counter[0] = 0, a.counter[1] = 0, a.counter[2] = 0;
    }
  }
};
