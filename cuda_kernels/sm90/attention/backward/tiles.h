// The tile scheduler: which tile of keys comes next, and the blocks of queries that it meets. The producer thread calls it; the
// consumers read the WorkTile in shared memory.
//
// Dense: under a mask or in order, tiles are handed out by a counter, `section` KV heads together. In any order a head's earliest
// keys come first: causal tiles are then the longest first. In order the last keys come first, as they are added first: a tile
// waits only for tiles that were handed out before, and under a mask those are ahead of it by the keys between them. Sections are
// wide, so that few tiles of a head run at once. Else head after head by stride. Packed: sequence after sequence.
#pragma once
#include "sm90/attention/backward/sums.h"
#include "sm90/ptx.h"

// A tile of keys, and the blocks [begin, end) of every head's queries that see one of them; steps: those of all heads of the group.
struct alignas(16) WorkTile {
  int batch, kv_head, tile, steps;  // steps −1: no more work
  int begin, end, S_q, S_k;
  int q_first, k_first;
};

// The number of a launch's tiles, computed on the host. An argument of the kernel, passed whole.
struct TileCount {
  int key_tiles, total, section, section_tiles, batch, kv_heads, head_group;
  SumBlocks blocks;
};

// Which queries see a key, and the other way round: key j is visible to query i iff −left ≤ j − i − shift ≤ right (causal: right = 0).
struct Band {
  int left, right;
  KS_DEVICE int reach() const { return KS_WINDOW ? right : 0; }
  // The first query that sees key j or a later one, and the one after the last that sees key j or an earlier one.
  KS_DEVICE int begin(int j, int shift) const { return KS_CAUSAL || KS_WINDOW ? max_of(j - shift - reach(), 0) : 0; }
  KS_DEVICE int end(int j, int shift, int S_q) const {
    return KS_WINDOW ? min_of(S_q, max_of(j - shift + left + 1, 0)) : S_q;
  }
  // How many tiles of `keys` keys the queries of the block that begins at i meet, from the first that they may; of all that is
  // before S_k.
  KS_DEVICE int tiles_met(int i, int shift, int S_k, int keys) const {
    const int end = KS_CAUSAL || KS_WINDOW ? min_of(i + STEP + shift + reach(), S_k) : S_k;
    return (u32)(end + keys - 1) / keys;
  }
};

template<int KEYS> struct TileScheduler {
  TileCount count;
  Sequences sequences;
  Band band;
  int at, before;  // packed: the current sequence, and the number of tiles before it

  // Tile t, which is not below the previous call's; false where there is none.
  KS_DEVICE bool next(int t, WorkTile& w) {
    if constexpr (KS_KV_VIEW == PACKED) {
      int tiles;
      for (;; at++) {
        if (at == count.batch) return false;
        tiles = divide_up(sequences.k_offsets[at + 1] - sequences.k_offsets[at], KEYS);
        if (t < before + tiles * count.kv_heads) break;
        before += tiles * count.kv_heads;
      }
      w.batch = at, w.kv_head = (t - before) / tiles, w.tile = (t - before) - w.kv_head * tiles;
      if (KS_IN_ORDER) w.tile = tiles - 1 - w.tile;
    } else {
      if (t >= count.total) return false;
      int head;
      if constexpr (KS_DYNAMIC) {
        const int section = (u32)t / (u32)count.section_tiles, rest = t - section * count.section_tiles;
        const int width = min_of(count.section, count.batch * count.kv_heads - section * count.section);
        w.tile = (u32)rest / (u32)width, head = section * count.section + (rest - w.tile * width);
        if (KS_IN_ORDER) w.tile = count.key_tiles - 1 - w.tile;
      } else {
        head = (u32)t / (u32)count.key_tiles, w.tile = t - head * count.key_tiles;
      }
      w.batch = (u32)head / (u32)count.kv_heads, w.kv_head = head - w.batch * count.kv_heads;
    }
    const Sequence s = sequences.at(w.batch);
    const int S_k = s.S_k, key = w.tile * KEYS, shift = S_k - s.S_q;
    w.S_q = s.S_q, w.S_k = S_k, w.q_first = s.q_first, w.k_first = s.k_first;
    w.begin = (u32)band.begin(key, shift) / STEP;
    w.end = (u32)(band.end(min_of(key + KEYS, S_k) - 1, shift, opaque(s.S_q)) + STEP - 1) / STEP;
    w.steps = key < S_k ? max_of(w.end - w.begin, 0) * count.head_group : 0;
    return true;
  }
};
