// Which tile of queries comes next, and which blocks of keys it meets. One thread of a block asks; the others are told.
//
// Dense: tile t of the launch is one of a head's q_tiles. Under a mask that cuts late keys, tiles differ in length and are
// handed out by a counter, the longest first: `section` heads walk their tiles together, as many as have their K and V in L2 at
// once, and the last section has so many that its short tiles fill the launch's end. Packed: sequence after sequence.
#pragma once
#include "attention/sequences.h"
#include "sm90/ptx.h"

// What the warps of a block are told of a tile. Blocks of keys go from the last to the first.
struct alignas(16) Work {
  int batch, head, kv_head, row;  // row: the tile's first query
  int begin, end;             // blocks that some query sees: at least one; end 0: no more work
  int open_begin, open_end;   // of these, those that all queries see whole
  int S_q, S_k, q_first, k_first;
};

// A launch's tiles, as the host counts them. An argument of the kernel, passed whole.
struct TileCount {
  int q_tiles, total, section, last_section, batch, heads, head_group;
};

template<int BM, int BN> struct TileOrder {
  TileCount count;
  Sequences sequences;
  Scores scores;
  int at, before;  // packed: the sequence of the last tile found, and the tiles before it

  // Tile t, no smaller than the one asked for before; false where there is none.
  KS_DEVICE bool find(int t, Work& w) {
    int tile, entry, head;
    if constexpr (KS_Q_VIEW == PACKED) {
      int tiles;
      for (;; at++) {
        if (at == count.batch) return false;
        tiles = divide_up(sequences.q_offsets[at + 1] - sequences.q_offsets[at], BM);
        if (t < before + tiles * count.heads) break;
        before += tiles * count.heads;
      }
      entry = at, head = (t - before) / tiles, tile = (t - before) - head * tiles;
      if (KS_CAUSAL) tile = tiles - 1 - tile;
    } else {
      if (t >= count.total) return false;
      int index;
      if constexpr (KS_CAUSAL) {
        const int fore = count.batch * count.heads - count.last_section, per = count.section * count.q_tiles;
        const bool last = t >= fore * count.q_tiles;
        const int first = last ? fore : t / per * count.section;
        const int width = last ? count.last_section : min_of(count.section, fore - first);
        const int turn = (t - first * count.q_tiles) / width;
        index = t - first * count.q_tiles - turn * width + first, tile = count.q_tiles - 1 - turn;
      } else {
        index = t / count.q_tiles, tile = t - index * count.q_tiles;
      }
      entry = index / count.heads, head = index - entry * count.heads;
    }
    w.batch = entry, w.head = head, w.kv_head = head / count.head_group;
    const int row = w.row = tile * BM;
    const Sequence s = sequences.at(entry);
    w.S_q = s.S_q, w.S_k = s.S_k, w.q_first = s.q_first, w.k_first = s.k_first;
    scores.S_q = s.S_q, scores.S_k = s.S_k;
    const int last_row = min_of(row + BM, s.S_q) - 1;
    const int begin = scores.begin(row) / BN, end = divide_up(scores.end(last_row), BN);
    w.begin = begin < end ? begin : 0, w.end = begin < end ? end : 1;  // at least one block, if wholly hidden
    w.open_begin = divide_up(scores.all_begin(last_row), BN), w.open_end = scores.all_end(row) / BN;
    return true;
  }
};
