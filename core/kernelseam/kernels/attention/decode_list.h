// The work list of decode.h: items (up to ROWS rows of a sequence and KV head) with their tiles of keys, cut into equal parts.
#pragma once
#include "attention/cut.h"

// A sequence in the list: tiles of keys [first, last) that some of its queries see. With fewer than a tile for each warp it takes as long as
// with those, and has their places.
struct Entry {
  Sequence own;
  int first, last, row_tiles;
  KS_DEVICE int tiles() const { return max_of(last - first, Config::WARPS); }
  KS_DEVICE int places() const { return tiles() + ITEM_COST; }
};

// A part of an item, tiles [tile, end): `left` places of the block's share come after it.
struct Piece {
  Entry entry;
  int batch, head, row_tile, tile, end, left;

  // To the block's part of the next item; false where its share has ended. entry_of(batch): a sequence in the list.
  template<class EntryOf> KS_DEVICE bool advance(int kv_heads, const EntryOf& entry_of) {
    if (left <= ITEM_COST) return false;
    if (++row_tile == entry.row_tiles) {
      row_tile = 0;
      if (++head == kv_heads) {
        head = 0;
        do entry = entry_of(++batch);
        while (entry.row_tiles == 0);
      }
    }
    const int taken = min_of(entry.tiles(), left - ITEM_COST);
    tile = entry.first, end = tile + taken, left -= ITEM_COST + taken;
    return true;
  }
};

KS_DEVICE int warp_sum(int x) {
#pragma unroll
  for (int m = 1; m < WARP; m *= 2) x += shuffle_xor(x, m);
  return known_uniform(x);
}
KS_DEVICE int warp_max(int x) {
#pragma unroll
  for (int m = 1; m < WARP; m *= 2) x = max_of(x, shuffle_xor(x, m));
  return known_uniform(x);
}
