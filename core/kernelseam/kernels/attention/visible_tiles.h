// Which tiles of queries × keys a mask_mod may leave visible, and which it leaves whole (expressions/bounds.py): kernels pass over
// the others. The lanes of a warp ask for WORD tiles of a walk at once, and keep the answers as bits.
#pragma once
#include "attention/scores.h"

// Of a block of queries × keys: whether a query may see one of the keys, and whether it is certain that each sees all.
struct Seen {
  bool any, every;
};

// The queries i0 … i1 of `heads` heads, from the first of `scores` on, with the keys j0 … j1; as far as the mask_mod says it. LANES
// neighbouring lanes ask for the same ones.
template<int LANES = 1> KS_DEVICE Seen seen_by_mask(const Scores& scores, int heads, int i0, int i1, int j0, int j1) {
  Seen seen{false, true};
#pragma unroll 1
  for (int h = 0; h < heads && !(seen.any && !seen.every); h++) {
    const auto tile = scores.user.of_head(h);
    const auto rows = scores.user.own.template rows<LANES>(tile, i0, i1);
    const auto columns = scores.user.own.template columns<LANES>(tile, j0, j1);
    seen.any |= scores.user.own.template any<LANES>(tile, rows, columns);
    seen.every &= scores.user.own.template every<LANES>(tile, rows, columns);
  }
  return seen;
}

// Bit i of the result: x of lane i.
constexpr int WORD = WARP < 32 ? WARP : 32;
KS_DEVICE unsigned warp_bits(bool x) {
  int bits = (int)((x ? 1u : 0u) << lane() % WORD);
#pragma unroll
  for (int m = 1; m < WORD; m *= 2) bits |= shuffle_xor(bits, m);
  return (unsigned)bits;
}

// A tile of a walk, and whether it is certain that it is seen whole.
struct VisibleTile {
  int index;
  bool whole;
};

// A walk over tiles, every STEP-th: what is known of WORD of them from `first` on. All lanes of a warp call it alike.
template<int STEP = 1> struct VisibleTiles {
  int first = -WORD * STEP;
  unsigned any = 0, every = 0;

  // The first tile from `tile` on, before `last`, of which ask(tile) says that it may be seen; else one from `last` on.
  template<class Ask> KS_DEVICE VisibleTile next(int tile, int last, const Ask& ask) {
    while (tile < last) {
      if (tile - first >= WORD * STEP) {
        const int own = tile + lane() % WORD * STEP;
        const Seen seen = own < last ? ask(own) : Seen{false, false};
        first = tile, any = warp_bits(seen.any), every = warp_bits(seen.every);
      }
      int at = (tile - first) / STEP;
      for (; at < WORD && !(any >> at & 1); at++) tile += STEP;
      if (at < WORD) return {tile, (every >> at & 1) != 0};
    }
    return {tile, false};
  }
};

// The tiles before `last` that may be seen, one after another, each copied N steps before it is used.
template<int N> struct VisibleWalk {
  VisibleTiles<> tiles;
  int in_flight[N];  // 2·index + whole

  KS_DEVICE explicit VisibleWalk(int first) {
#pragma unroll
    for (int i = 0; i < N; i++) in_flight[i] = 2 * (first - 1);
  }
  // The next tile to be copied; from `last` on there is none.
  template<class Ask> KS_DEVICE int next(int last, const Ask& ask) {
    const VisibleTile x = tiles.next((in_flight[N - 1] >> 1) + 1, last, ask);
#pragma unroll
    for (int i = 0; i + 1 < N; i++) in_flight[i] = in_flight[i + 1];
    in_flight[N - 1] = 2 * x.index + x.whole;
    return x.index;
  }
  // The tile to be used, and whether it is seen whole.
  KS_DEVICE int index() const { return in_flight[0] >> 1; }
  KS_DEVICE bool whole() const { return in_flight[0] & 1; }
};
