// The tiles of queries that backward.h walks for a block of keys: tiles [first, last) of the heads of a KV head's group.
#pragma once

struct QueryTile {
  int head, tile;
};

// `end_head` is 0 where there are no tiles.
struct QueryTiles {
  int first_head, end_head, first, last;

  KS_DEVICE QueryTile begin() const { return {first_head, first}; }
  KS_DEVICE bool has(const QueryTile& x) const { return x.head < end_head; }
  KS_DEVICE void advance(QueryTile& x) const {
    if (++x.tile >= last) x.tile = first, x.head++;
  }
  // All of them, numbered head after head.
  KS_DEVICE int count() const { return first < last ? (last - first) * (end_head - first_head) : 0; }
  KS_DEVICE QueryTile at(int i) const {
    if (i >= count()) return {end_head, first};
    const int n = i / (last - first);
    return {first_head + n, first + i - n * (last - first)};
  }
};
