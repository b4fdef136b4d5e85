// Tiles that are cut along K (LastWave says which): the block that has a tile's last part adds up the others' sums, which come through memory.
// It waits for blocks of lower numbers, which start earlier and have those sums first. Always in the order of the blocks, so that the same bits come.
// (Through the ring, by bulk copies that the producer asks for, they came 1.2 µs later: it looked at one block after the other.)
#pragma once
#include "sm90/gemm/block.h"

struct TailSums {
  const Arguments& a;
  int number, group, thread;  // the block's, and the thread's in its consumer

  static constexpr int SUMS = MT * (BN / 2), TOGETHER = 32;  // a thread's; those that are loaded at once
  static constexpr int THREADS = A_ROWS == BM ? 128 : A_ROWS / 16 * WARP;  // that have rows of C
  static_assert(!TAIL || (CLUSTER == 1 && !PING_PONG && !E4M3 && !Config::GATHERED && SUMS % TOGETHER == 0), "consumers that share a block's tiles, and loop over parts");

  KS_DEVICE int consumer(int block) const { return block * SHARERS + group; }
  // Whether a block's sums are there.
  KS_DEVICE u32* there(int block) const { return (u32*)a.origin + consumer(block); }
  // Four of a thread's sums, from e on.
  KS_DEVICE float* place(int block, int e) const {
    return (float*)a.sums + ((i64)consumer(block) * (SUMS / 4) + e / 4) * (4 * THREADS) + 4 * thread;
  }
  // Adds up a tile's sums in the block of its last part; false in the others.
  KS_DEVICE bool add_up(float (&acc)[MT][BN / 2], int before) const {
    const bool has_rows = THREADS == 128 || thread < THREADS;
    if (before < 0) {
      if (has_rows)
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int e = 0; e < BN / 2; e += 4) {
            const float* const x = &acc[i][e];
            global_store(place(number, i * (BN / 2) + e), x[0], x[1], x[2], x[3]);
          }
      named_barrier_sync(1 + group, 128);
      if (thread == 0) add_release(there(number), 1);
      return false;
    }
    if (before == 0) return true;
#pragma unroll 1
    for (int n = thread; n < before; n += 128) {
      while (load_acquire(there(number - 1 - n)) == 0) {}
      *there(number - 1 - n) = 0;  // for the next launch
    }
    named_barrier_sync(1 + group, 128);
    if (!has_rows) return true;
#pragma unroll
    for (int first = 0; first < SUMS; first += TOGETHER) {
      float sums[TOGETHER];
#pragma unroll
      for (int e = 0; e < TOGETHER; e++) sums[e] = 0;
#pragma unroll 1
      for (int block = number - before; block < number; block++) {
        const float* const from = place(block, first);
#pragma unroll
        for (int e = 0; e < TOGETHER; e += 4) {
          float x[4];
          global_load(from + e / 4 * (4 * THREADS), x);
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
