// The order of a head's tiles where a mask is no band: by their work, the longest first, so that short ones fill a launch's end.
#pragma once
#include "sm90/attention/tiles.h"

constexpr int BUCKETS = 128;

// A tile's work is 3 for a block and 1 less where it is unmasked, and 1.

// A head's tiles by their work, the longest first, by a warp. Those of a bucket come in any order. Little code, as it is read from memory.
KS_DEVICE void order_tiles(const VisitedBlocks& visited, int entry, int head, int tiles, int* buckets) {
  const float buckets_a_part = (BUCKETS - 2) * reciprocal_fast(3.f * 32 * visited.words + 2);
  TileRank* const ranks = &visited.rank(entry, head, 0);
  auto rank = [&](int place) -> TileRank& { return ranks[(i64)place * visited.tile]; };
  auto each = [&](auto use) {
    constexpr int AT_ONCE = 4;
#pragma unroll 1
    for (int first = lane(); first < tiles; first += AT_ONCE * WARP) {
      int work[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        work[i] = 0;
        if (first + i * WARP < tiles) work[i] = *(const volatile int*)&rank(first + i * WARP).work;
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (first + i * WARP < tiles) use(first + i * WARP, work[i] > 0 ? BUCKETS - 2 - (int)(work[i] * buckets_a_part) : BUCKETS - 1);
    }
    warp_barrier();
  };
  constexpr int EACH = BUCKETS / WARP;
  int* const own = buckets + EACH * lane();
#pragma unroll
  for (int i = 0; i < EACH; i++) own[i] = 0;
  warp_barrier();
  each([&](int, int bucket) { atomicAdd(buckets + bucket, 1); });
  int sum = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) sum += own[i];
  int before = sum;
#pragma unroll
  for (int d = 1; d < WARP; d *= 2) {
    const int x = shuffle_up(before, d);
    if (lane() >= d) before += x;
  }
  before -= sum;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int count = own[i];
    own[i] = before, before += count;
  }
  warp_barrier();
  each([&](int tile, int bucket) { rank(atomicAdd(buckets + bucket, 1)).tile = tile; });
}
