// The order of a head's tiles where a mask is no band: by their work, the longest first, so that short ones fill a launch's end.
#pragma once
#include "sm90/attention/tiles.h"

constexpr int BUCKETS = 256;

// A tile's work is 3 for a block and 1 less where it is unmasked, and 1.

// A head's tiles by their work, the longest first, by a warp. Those of a bucket come in any order.
KS_DEVICE void order_tiles(const VisitedBlocks& visited, int entry, int head, int tiles, int* buckets) {
  const float buckets_a_part = (BUCKETS - 2) / (3.f * 32 * visited.words + 2);
  auto bucket_of = [&](int tile) {
    const int work = *(const volatile int*)&visited.rank(entry, head, tile).work;
    return work > 0 ? BUCKETS - 2 - (int)(work * buckets_a_part) : BUCKETS - 1;
  };
  constexpr int EACH = BUCKETS / WARP;
  int* const own = buckets + EACH * lane();
#pragma unroll
  for (int i = 0; i < EACH; i++) own[i] = 0;
  warp_barrier();
#pragma unroll 4
  for (int tile = lane(); tile < tiles; tile += WARP) atomicAdd(buckets + bucket_of(tile), 1);
  warp_barrier();
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
#pragma unroll 4
  for (int tile = lane(); tile < tiles; tile += WARP) visited.rank(entry, head, atomicAdd(buckets + bucket_of(tile), 1)).tile = tile;
  warp_barrier();
}
