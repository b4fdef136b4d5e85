// How a tile leaves: rounded, laid out in shared memory in the 128-byte swizzle, and then, by KS_STORE,
//   ROWS: each warp writes its own rows, whole chunks of 16 bytes, neighbouring lanes one row;
//   TMA:  a warp of the loading warpgroup for each consumer hands boxes of 64 rows to the TMA unit. The consumer goes on as
//         soon as a buffer is free; but the unit is one queue, and loads wait behind stores.
#pragma once
#include "sm90/gemm/block.h"

enum { ROWS = 0, TMA = 1 };

// A consumer's buffers as a ring: full where a warp has laid out its rows (one arrival a warp), empty where they were read.
struct OutRing {
  Ring<SLOTS> ring;
  KS_DEVICE void init() const {
    for (int i = 0; i < SLOTS; i++) barrier_init(ring.barriers + 8 * i, 4), barrier_init(ring.barriers + 8 * (SLOTS + i), 1);
  }
};

// The storing thread of a consumer.
struct Storer {
  Shared& at;
  const Maps& maps;
  const OutRing& out;
  const Arguments& a;
  const TileOrder& order;
  int rank, group;

  KS_DEVICE void run(int first, int step) {
    const u64 policy = KS_C_FIRST ? evict_first() : 0;
    Cursor<SLOTS> slot{0, 0};
    int batches = 0;
#pragma unroll 1
    for (int t = first; t < order.total; t += step) {
      const Place p = order.at(t, rank);
      const Matrix c = matrix_of(a, a.c, p, p.head, 1, 1);
#pragma unroll 1
      for (int panel = 0; panel < PANELS; panel += BATCH)
#pragma unroll 1
        for (int i = 0; i < MT; i++, slot.advance()) {
          out.ring.wait_full(slot);
          const int row = p.row + 64 * (group * MT + i);
#pragma unroll
          for (int n = 0; n < BATCH; n++) {
            const u32 from = shared_address(at.out[group][slot.stage * BATCH + n]);
            if (KS_C_FIRST) tma_store(maps.c, from, p.column + 64 * (panel + n), row, c.x2, c.x3, policy);
            else tma_store(maps.c, from, p.column + 64 * (panel + n), row, c.x2, c.x3);
          }
          tma_stores_commit();
          tma_stores_read<SLOTS - 1>();  // the batch SLOTS − 1 before this one was read: the next slot's
          if (++batches >= SLOTS) barrier_arrive(out.ring.barriers + 8 * (SLOTS + (slot.stage + 1) % SLOTS));
        }
    }
    tma_stores_wait<0>();
  }
};

KS_DEVICE void store_chunk(T* to, const Chunk<T>& x, int left) {
  if (left >= Chunk<T>::N) {
    *(Chunk<T>*)to = x;
  } else {
#pragma unroll
    for (int e = 0; e < Chunk<T>::N; e++)
      if (e < left) to[e] = x.v[e];
  }
}
