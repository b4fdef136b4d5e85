// The last wave of tiles, where it is of few: each is cut along K into parts, which blocks without a tile sum (LastWave says which). The
// last part's block adds up the others' sums, which come through memory: it waits for them, as blocks of lower numbers, which start earlier, have
// them. Always in the order of the parts, so that the same bits come.
#pragma once
#include "sm90/gemm/block.h"

struct TailSums {
  const Arguments& a;
  int rank, group, thread;  // the thread's number in its consumer

  static constexpr int SUMS = MT * (BN / 2), TOGETHER = 32;  // a thread's; those that are loaded at once
  static_assert(!TAIL || (!PING_PONG && !E4M3 && !Config::GATHERED && SUMS % TOGETHER == 0), "consumers that share tiles, and loop over parts");

  KS_DEVICE int number(int unit) const { return (unit * CLUSTER + rank) * SHARERS + group; }
  // Four of a thread's sums, from e on, of a part of a tile.
  KS_DEVICE float* place(int part, const TileCoord& p, int e) const {
    const i64 consumer = number(p.number * (p.parts - 1) + part);
    return (float*)a.sums + (consumer * (SUMS / 4) + e / 4) * (4 * 128) + 4 * thread;
  }
  // Adds up a tile's sums in the block of its last part; false in the others.
  KS_DEVICE bool add_up(float (&acc)[MT][BN / 2], const TileCoord& p) const {
    const int others = p.parts - 1;
    u32* const counter = (u32*)a.origin + number(p.number);
    if (p.part < others) {
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int e = 0; e < BN / 2; e += 4) {
          const float* const x = &acc[i][e];
          global_store(place(p.part, p, i * (BN / 2) + e), x[0], x[1], x[2], x[3]);
        }
      named_barrier_sync(1 + group, 128);
      if (thread == 0) add_release(counter, 1);
      return false;
    }
    if (thread == 0) {
      while (load_acquire(counter) != (u32)others) {}
      *counter = 0;  // for the next launch
    }
    named_barrier_sync(1 + group, 128);
#pragma unroll
    for (int first = 0; first < SUMS; first += TOGETHER) {
      float sums[TOGETHER];
#pragma unroll
      for (int e = 0; e < TOGETHER; e++) sums[e] = 0;
#pragma unroll 1
      for (int part = 0; part < others; part++) {
        const float* const from = place(part, p, first);
#pragma unroll
        for (int e = 0; e < TOGETHER; e += 4) {
          float x[4];
          global_load(from + e / 4 * (4 * 128), x);
#pragma unroll
          for (int j = 0; j < 4; j++) sums[e + j] += x[j];
        }
      }
#pragma unroll
      for (int e = 0; e < TOGETHER; e++) acc[(first + e) / (BN / 2)][(first + e) % (BN / 2)] += sums[e];
    }
    return true;
  }
};
