// Work of latent attention: what the blocks of latent.h share, and latent_merge.h joins.
//
// The rows of a KV head are its sequence's queries with their heads, one query after the other; a tile has ROWS of them. An item is
// `together` such tiles, over the keys that the last of its queries sees: so many blocks take it side by side, a tile of rows each, so
// that L2 gives the others what the first of them reads. Its keys are tiles of BN, and ITEM_COST places before them stand for the time
// that it takes beside them. All places of all items are one list, of which each group of blocks takes an equal part: it finds where
// its part begins by a prefix sum over the sequences' lengths, in device memory, and by a closed form over a sequence's items.
#pragma once
#include "attention/cut.h"

constexpr int ROWS = Config::ROWS, BN = 64, CLUSTER = Config::CLUSTER;

KS_DEVICE int warp_sum(int x) {
#pragma unroll
  for (int m = 1; m < WARP; m *= 2) x += shuffle_xor(x, m);
  return x;
}

// Σ ⌊(a·i + b) / m⌋ over i < n, by Euclid's algorithm: whole multiples of m are taken out of a and b, and what remains is counted along
// the other axis. a·n + b and the sum are less than 2^32.
KS_DEVICE unsigned sum_of_quotients(unsigned n, unsigned m, unsigned a, unsigned b) {
  unsigned sum = 0;
#pragma unroll 1
  while (n) {
    const unsigned slope = a / m, first = b / m;
    sum += (n % 2 ? (n - 1) / 2 * n : n / 2 * (n - 1)) * slope + n * first;
    a -= slope * m, b -= first * m;
    const unsigned top = a * n + b;
    n = top / m, b = top - n * m;
    const unsigned other = m;
    m = a, a = other;
  }
  return sum;
}

// The items of a KV head of a sequence.
struct Items {
  const FastDivmod& heads;  // of a query
  int queries, keys, step, count;  // step: rows of an item
  KS_DEVICE Items(const Sequence& s, const FastDivmod& heads, int together)
      : heads(heads), queries(s.S_q), keys(s.S_k), step(ROWS * together), count(divide_up(s.S_q * heads.d, step)) {}

  // Of a query that sees so many keys.
  static KS_DEVICE int tiles_of(int keys) { return max_of(divide_up(keys, BN), 1); }
  KS_DEVICE int tiles(int i) const {
    return tiles_of(Config::CAUSAL ? keys - (queries - 1 - heads.quotient(min_of((i + 1) * step, queries * heads.d) - 1)) : keys);
  }
  // Places of the items before item i ≤ count.
  KS_DEVICE int places_before(int i) const {
    const int all = tiles_of(keys);
    if (!Config::CAUSAL || tiles_of(keys - queries + 1) == all) return i * (all + ITEM_COST);
    // Item j < count − 1 has ⌊(step·j + b) / m⌋ tiles, but one at least.
    const int n = max_of(min_of(i, count - 1), 0), m = BN * heads.d, b = (keys - queries + BN) * heads.d + step - 1;
    const int single = min_of(b < m ? divide_up(m - b, step) : 0, n);
    const int tiles = single + (int)sum_of_quotients(n - single, m, step, b + single * step);
    return tiles + (i - n) * all + i * ITEM_COST;
  }
  KS_DEVICE int places() const { return places_before(count); }
  // The item that has a place. Every lane must come.
  KS_DEVICE int at(int place) const {
    int first = 0, end = count;
#pragma unroll 1
    while (end - first > 1) {
      const int each = divide_up(end - first, WARP), mine = first + lane() * each;
      const int passed = warp_sum(mine < end && places_before(mine) <= place) - 1;  // of the lanes behind the first
      first += passed * each, end = min_of(first + each, end);
    }
    return first;
  }
};

// An argument of both kernels, passed whole.
struct List {
  Sequences sequences;
  int batch, kv_heads, together, groups;
  FastDivmod heads;  // of a query, that share a KV head

  // What a block is, of its group, and the group.
  KS_DEVICE int member(int block) const { return block % together; }
  KS_DEVICE int group(int block) const { return block / together; }

  KS_DEVICE Sequence sequence(int b) const {
    Sequence s = sequences.at(b);
    s.S_q = max_of(s.S_q, 0), s.S_k = max_of(s.S_k, 0);
    return s;
  }
  KS_DEVICE Items items(const Sequence& s) const { return Items(s, heads, together); }
  KS_DEVICE int places(int b) const { return b < batch ? items(sequence(b)).places() * kv_heads : 0; }
};

// The list's places, cut for groups: no group has less than an item with two tiles, but where there is no more. Every lane must come.
KS_DEVICE Cut cut_of(const List& list) {
  int total = 0, items = 0, longest = 0;
#pragma unroll 1
  for (int b = lane(); b < list.batch; b += WARP) {
    const Items own = list.items(list.sequence(b));
    total += own.places(), items += own.count, longest = max_of(longest, own.count ? Items::tiles_of(own.keys) + ITEM_COST : 0);
  }
  total = warp_sum(total) * list.kv_heads, items = warp_sum(items) * list.kv_heads;
#pragma unroll
  for (int m = 1; m < WARP; m *= 2) longest = max_of(longest, shuffle_xor(longest, m));
  return Cut(total, min_of(list.groups, max_of(total / (ITEM_COST + 2), 1)), items, longest);
}

// The parts of an item that groups left, by a member's block: that of the first group of them is its state 1, those of the others their
// states 0.
KS_DEVICE int state_of(const List& list, int group, int member, int first_group) {
  return 2 * (group * list.together + member) + (group == first_group);
}

// A group's place in its part of the list, by one of its members. `item`: of the KV head's; tiles [begin, end) of it, of `tiles`; `left`
// places come after.
struct Piece {
  Sequence sequence;
  int member, entry, kv_head, item, begin, end, tiles, left;
  KS_DEVICE bool whole() const { return begin == 0 && end == tiles; }
  KS_DEVICE void take(int from) {
    begin = from;
    end = min_of(tiles, from + left);
    left -= end - from;
  }
};
// Every lane must come to all of these.
// The item that has a place of the list; returns which of its tiles that is, less than 0 before them.
KS_DEVICE int find_item(const List& list, int place, Piece& piece) {
  int before = 0, at = 0;
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
    if (place >= before + all) {
      before += all;
      continue;
    }
    const int offset = place - (before + end - here);
    const bool found = offset >= 0 && offset < here;
    piece.entry = warp_sum(found ? b + lane() : 0);
    at = warp_sum(found ? offset : 0);
    break;
  }
  piece.sequence = list.sequence(piece.entry);
  const Items items = list.items(piece.sequence);
  piece.kv_head = 0;
  if (list.kv_heads > 1) {
    const int of_head = items.places();
    piece.kv_head = at / of_head, at -= piece.kv_head * of_head;
  }
  piece.item = items.at(at), piece.tiles = items.tiles(piece.item);
  return at - items.places_before(piece.item) - ITEM_COST;
}
// The first piece; false where the group has none.
KS_DEVICE bool first_piece(const List& list, int group, Piece& piece) {
  const Cut cut = cut_of(list);
  if (group >= cut.blocks || !cut.total) return false;
  const int first = cut.begin(group), at = find_item(list, first, piece), ahead = max_of(-at, 0);
  piece.left = cut.begin(group + 1) - first;
  if (piece.left <= ahead) return false;  // the item's tiles are the next group's
  piece.left -= ahead;
  piece.take(max_of(at, 0));
  return true;
}
// The next; false after the last.
KS_DEVICE bool next_piece(const List& list, Piece& piece) {
  if (piece.left <= ITEM_COST) return false;
  piece.left -= ITEM_COST;
  if (++piece.item == list.items(piece.sequence).count) {
    piece.item = 0;
    if (++piece.kv_head == list.kv_heads) {
      piece.kv_head = 0;
      do piece.sequence = list.sequence(++piece.entry);
      while (!piece.sequence.S_q);  // without queries there are no items
    }
  }
  piece.tiles = list.items(piece.sequence).tiles(piece.item);
  piece.take(0);
  return true;
}

// The member's tile of rows, of a piece's item.
struct Rows {
  const FastDivmod& heads;       // of a query
  int kv_head, queries, keys;
  int first, count;              // rows of the KV head's; count: not above 0 where the member has none
  KS_DEVICE Rows(const List& list, const Piece& piece)
      : heads(list.heads), kv_head(piece.kv_head), queries(piece.sequence.S_q), keys(piece.sequence.S_k),
        first((piece.item * list.together + piece.member) * ROWS), count(min_of(queries * heads.d - first, ROWS)) {}
  // Of row r of the tile: its query, its head among all, and the keys that it sees.
  KS_DEVICE int query(int r) const { return heads.quotient(first + r); }
  KS_DEVICE int head(int r) const { return kv_head * heads.d + first + r - query(r) * heads.d; }
  KS_DEVICE int limit(int r) const { return Config::CAUSAL ? keys - (queries - 1 - query(r)) : keys; }
  KS_DEVICE int least() const { return limit(0); }
  KS_DEVICE int most() const { return limit(count - 1); }
};

// A warp's piece, in shared memory.
struct Pieces {
  const List& list;
  Piece& piece;
  KS_DEVICE const Piece& now() const { return piece; }
  KS_DEVICE void set(const Piece& x) const {
    warp_barrier();
    if (lane() == 0) piece = x;
    warp_barrier();
  }
  KS_DEVICE Rows rows() const { return Rows(list, piece); }
  // To the next piece in which the member has rows, or its cluster's first one; the first one from x on.
  KS_DEVICE bool find(Piece x) const {
    const int behind = x.member % CLUSTER * ROWS;
    while (Rows(list, x).count + behind <= 0)
      if (!next_piece(list, x)) return false;
    set(x);
    return true;
  }
  KS_DEVICE bool next() const {
    Piece x = piece;
    return next_piece(list, x) && find(x);
  }
  // Calls what takes each of them, from the one found on.
  template<class Take> KS_DEVICE void each(Take take) const {
    bool more = true;
#pragma unroll 1
    while (more) {
      take(now(), rows());
      more = next();
    }
  }
};
