// Work of a decoding with latent attention: what the blocks of latent.h share, and latent_merge.h joins.
//
// An item is a query of a sequence with up to ROWS of the heads that share a KV head. Its keys are tiles of BN, and ITEM_COST places before
// them stand for the time that it takes beside its tiles. All places of all items are one list, of which each block takes an equal
// part: it finds where its part begins by a prefix sum over the sequences' lengths, in device memory.
#pragma once
#include "attention/sequences.h"

constexpr int ROWS = 64, BN = 64, ITEM_COST = KS_ITEM_COST;

KS_DEVICE int warp_sum(int x) {
#pragma unroll
  for (int m = 1; m < WARP; m *= 2) x += shuffle_xor(x, m);
  return x;
}

// An argument of both kernels, passed whole.
struct List {
  const int* lengths;
  int S_q, S_k, batch, kv_heads, head_group, head_tiles, blocks;

  KS_DEVICE int keys(int b) const { return max_of(KS_LENGTHS ? min_of(lengths[b], S_k) : S_k, 0); }
  KS_DEVICE int items_of_entry() const { return kv_heads * S_q * head_tiles; }
  KS_DEVICE int tiles(int b) const { return max_of(divide_up(keys(b), BN), 1); }
  KS_DEVICE int places(int b) const { return b < batch ? (tiles(b) + ITEM_COST) * items_of_entry() : 0; }

  // Every lane must come.
  KS_DEVICE int total() const {
    int sum = 0;
#pragma unroll 1
    for (int b = lane(); b < batch + lane(); b += WARP) sum += warp_sum(places(b));
    return sum;
  }
  // The place of an entry's first item.
  KS_DEVICE int places_before(int entry) const {
    int sum = 0;
#pragma unroll 1
    for (int b = lane(); b < entry + lane(); b += WARP) sum += warp_sum(b < entry ? places(b) : 0);
    return sum;
  }
};

// The list's places, cut: the first `more` blocks take one place more than `each`. No block has less than an item with two tiles, but
// where there is no more.
struct Cut {
  int blocks, each, more;
  KS_DEVICE Cut(int total, int most) {
    blocks = min_of(most, max_of(total / (ITEM_COST + 2), 1));
    each = total / blocks, more = total - blocks * each;
  }
  KS_DEVICE int begin(int block) const { return block * each + min_of(block, more); }
  // The block that takes a place.
  KS_DEVICE int taker(int place) const {
    const int longer = more * (each + 1);
    return place < longer ? place / (each + 1) : more + (place - longer) / each;
  }
};

// The parts of an item that blocks left: that of the first block of them is its state 1, those of the others their states 0.
KS_DEVICE int state_of(int block, int first_block) { return 2 * block + (block == first_block); }

// A block's way through its part of the list. `item`: within the entry; tiles [begin, end) of it, of `tiles`.
struct Piece {
  int entry, item, begin, end, tiles;
  KS_DEVICE bool whole() const { return begin == 0 && end == tiles; }
};
struct Walk {
  const List& list;
  int left;  // places of the block's part that come after the piece
  Piece piece;

  // Every lane must come. False where the block has nothing.
  KS_DEVICE bool start(int block) {
    const int total = list.total();
    const Cut cut(total, list.blocks);
    if (block >= cut.blocks) return false;
    const int first = cut.begin(block);
    left = cut.begin(block + 1) - first;
    int before = 0;
#pragma unroll 1
    for (int b = 0; b < list.batch; b += WARP) {
      const int here = list.places(b + lane());
      int end = here, all = here;  // the sums of lanes to this one, and of all
#pragma unroll
      for (int m = 1; m < WARP; m *= 2) {
        const int other = shuffle_xor(all, m);
        if (lane() & m) end += other;
        all += other;
      }
      if (first >= before + all) {
        before += all;
        continue;
      }
      const int offset = first - (before + end - here);
      const bool found = offset >= 0 && offset < here;
      piece.entry = warp_sum(found ? b + lane() : 0);
      const int place = warp_sum(found ? offset : 0);
      piece.tiles = list.tiles(piece.entry);
      piece.item = place / (piece.tiles + ITEM_COST);
      const int at = place - piece.item * (piece.tiles + ITEM_COST) - ITEM_COST, ahead = max_of(-at, 0);
      if (left <= ahead) return false;  // the item's tiles are the next block's
      left -= ahead;
      take(max_of(at, 0));
      return true;
    }
    return false;
  }
  KS_DEVICE void take(int begin) {
    piece.begin = begin;
    piece.end = min_of(piece.tiles, begin + left);
    left -= piece.end - begin;
  }
  KS_DEVICE bool next() {
    if (left <= ITEM_COST) return false;
    left -= ITEM_COST;
    if (++piece.item == list.items_of_entry()) {
      piece.item = 0;
      piece.tiles = list.tiles(++piece.entry);
    }
    take(0);
    return true;
  }
};

// What of an entry an item is.
struct Item {
  int kv_head, query, head;  // the first head, of the KV head's
  KS_DEVICE Item(const List& list, int item) {
    const int of_head = list.S_q * list.head_tiles;
    kv_head = item / of_head, item -= kv_head * of_head;
    query = item / list.head_tiles, head = (item - query * list.head_tiles) * ROWS;
  }
  // Keys that it sees.
  KS_DEVICE int limit(const List& list, int keys) const { return KS_CAUSAL ? keys - (list.S_q - 1 - query) : keys; }
};
