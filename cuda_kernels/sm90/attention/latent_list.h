// Work of a decoding with latent attention: what the blocks of latent.h share, and latent_merge.h joins.
//
// A tile of rows is a query of a sequence with up to ROWS of the heads that share a KV head. An item is `together` such tiles, which see
// the same keys: so many blocks take it side by side, a tile of rows each, so that L2 gives the others what the first of them reads.
// Its keys are tiles of BN, and ITEM_COST places before them stand for the time that it takes beside them. All places of all items
// are one list, of which each group of blocks takes an equal part: it finds where its part begins by a prefix sum over the
// sequences' lengths, in device memory.
#pragma once
#include "attention/sequences.h"

constexpr int ROWS = 64, BN = 64, ITEM_COST = Config::ITEM_COST;

KS_DEVICE int warp_sum(int x) {
#pragma unroll
  for (int m = 1; m < WARP; m *= 2) x += shuffle_xor(x, m);
  return x;
}

// An argument of both kernels, passed whole.
struct List {
  const int* lengths;
  int S_q, S_k, batch, kv_heads, head_group, head_tiles, together, groups;

  // What a block is, of its group, and the group.
  KS_DEVICE int member(int block) const { return block % together; }
  KS_DEVICE int group(int block) const { return block / together; }

  KS_DEVICE int keys(int b) const { return max_of(Config::LENGTHS ? min_of(lengths[b], S_k) : S_k, 0); }
  KS_DEVICE int items_of_entry() const { return kv_heads * (S_q * head_tiles / together); }
  KS_DEVICE int tiles(int b) const { return max_of(divide_up(keys(b), BN), 1); }
  KS_DEVICE int places(int b) const { return b < batch ? (tiles(b) + ITEM_COST) * items_of_entry() : 0; }

  // Every lane must come.
  KS_DEVICE int total() const {
    int sum = 0;
#pragma unroll 1
    for (int b = lane(); b < batch + lane(); b += WARP) sum += warp_sum(places(b));
    return sum;
  }
  KS_DEVICE int longest() const {
    int most = 0;
#pragma unroll 1
    for (int b = lane(); b < batch; b += WARP) most = max_of(most, tiles(b) + ITEM_COST);
#pragma unroll
    for (int m = 1; m < WARP; m *= 2) most = max_of(most, shuffle_xor(most, m));
    return most;
  }
  // The place of an entry's first item.
  KS_DEVICE int places_before(int entry) const {
    int sum = 0;
#pragma unroll 1
    for (int b = lane(); b < entry + lane(); b += WARP) sum += warp_sum(b < entry ? places(b) : 0);
    return sum;
  }
};

// The list's places, cut: the first `more` groups take one place more than `each`. No group has less than an item with two tiles, but
// where there is no more. Items of one length whose tiles of rows are full are not cut, where that makes no part longer by more than a
// sixteenth: of what is cut 128 KB a tile of rows are written, read again and joined.
struct Cut {
  int total, groups, each, more;
  // Every lane must come.
  KS_DEVICE explicit Cut(const List& list) {
    total = list.total();
    groups = min_of(list.groups, max_of(total / (ITEM_COST + 2), 1));
    each = total / groups, more = total - groups * each;
    const int items = list.batch * list.items_of_entry(), longest = list.longest(), whole = longest * divide_up(items, groups);
    if (list.head_group >= ROWS && longest * items == total && whole - each <= each / 16)
      groups = divide_up(total, whole), each = whole, more = 0;
  }
  KS_DEVICE int begin(int group) const { return min_of(group * each + min_of(group, more), total); }
  // The group that takes a place.
  KS_DEVICE int taker(int place) const {
    const int longer = more * (each + 1);
    return place < longer ? place / (each + 1) : more + (place - longer) / each;
  }
};

// The parts of an item that groups left, by a member's block: that of the first group of them is its state 1, those of the others their
// states 0.
KS_DEVICE int state_of(const List& list, int group, int member, int first_group) {
  return 2 * (group * list.together + member) + (group == first_group);
}

// A group's place in its part of the list. `item`: within the entry; tiles [begin, end) of it, of `tiles`; `left` places come after.
struct Piece {
  int entry, item, begin, end, tiles, left;
  KS_DEVICE bool whole() const { return begin == 0 && end == tiles; }
  KS_DEVICE void take(int from) {
    begin = from;
    end = min_of(tiles, from + left);
    left -= end - from;
  }
};
// Every lane must come to both of these.
// The first piece; false where the group has none.
KS_DEVICE bool first_piece(const List& list, int group, Piece& piece) {
  const Cut cut(list);
  if (group >= cut.groups) return false;
  const int first = cut.begin(group);
  piece.left = cut.begin(group + 1) - first;
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
    if (piece.left <= ahead) return false;  // the item's tiles are the next group's
    piece.left -= ahead;
    piece.take(max_of(at, 0));
    return true;
  }
  return false;
}
// The next; false after the last.
KS_DEVICE bool next_piece(const List& list, Piece& piece) {
  if (piece.left <= ITEM_COST) return false;
  piece.left -= ITEM_COST;
  if (++piece.item == list.items_of_entry()) {
    piece.item = 0;
    piece.tiles = list.tiles(++piece.entry);
  }
  piece.take(0);
  return true;
}

// A member's tile of rows, of an entry's item.
struct Rows {
  int kv_head, query, head;  // the first head, of the KV head's
  KS_DEVICE Rows(const List& list, int item, int member) {
    const int items = list.S_q * list.head_tiles / list.together;
    kv_head = item / items;
    const int tile = (item - kv_head * items) * list.together + member;
    query = tile / list.head_tiles, head = (tile - query * list.head_tiles) * ROWS;
  }
  // Keys that it sees.
  KS_DEVICE int limit(const List& list, int keys) const { return Config::CAUSAL ? keys - (list.S_q - 1 - query) : keys; }
};
