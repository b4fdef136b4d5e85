// Who adds to the sums of dq, and when: what makes a result the same every time. In order, the tiles of keys that add to a piece of a
// block add one after another by a counter in global memory: in the order in which tiles are handed out, STAGGERED in that in which they come
// to the block (tiles.h). A consumer neither reads the counter nor waits until its additions are over: a thread for each does, in a warp of its
// own beside the loading one. Every step it waits for the counter, tells the consumer, waits until its four warps have added, and raises the
// counter.
// The raise is a release: it waits in L2 for the warps' additions, which were made before they arrived. The next counter is asked
// for before that, as the answer takes as long. Who is first stores and does not add: sums need not be zero before.
//
// The barriers are a ring of one stage for each consumer: full, it may add; empty, its warps have added.
#pragma once
#include "sm90/attention/backward/tiles.h"

// In shared memory, of one consumer.
struct DqSemaphoreSlot {
  u64 ring[2];
  volatile int first;  // whether no tile has added before
  volatile int block;  // whose sums they are, where blocks are LISTED
};
struct DqSemaphores {
  u32 slots;
  KS_DEVICE Ring<1> of(int group) const { return {slots + (u32)sizeof(DqSemaphoreSlot) * group}; }
  // Behind the ring, whose address a consumer has.
  KS_DEVICE bool first(int group) const {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1 + 16];" : "=r"(x) : "r"(of(group).barriers) : "memory");
    return x != 0;
  }
  KS_DEVICE int block(int group) const {
    int x;
    asm volatile("ld.shared.s32 %0, [%1 + 20];" : "=r"(x) : "r"(of(group).barriers) : "memory");
    return x;
  }
};

// KEYS: of a tile; KV_STAGES: of the ring by which the producer publishes tiles, which this thread releases like a consumer's warp.
template<int KEYS, int KV_STAGES> struct DqSemaphore {
  const WorkTile* work_tiles;
  const Ring<KV_STAGES>& tiles;
  Ring<1> slot;
  const TileCount& count;
  Band band;
  volatile int &first, &block;
  u32* semaphores;  // of the first block: the counter of this consumer's piece

  KS_DEVICE void run() const {
    PipelineState<KV_STAGES> at{0, 0};
    u32 parity = 0;
#pragma unroll 1
    for (;; at.advance()) {
      tiles.wait_full(at);
      const WorkTile& w = work_tiles[work_slot<KV_STAGES>({at.stage, at.parity ^ 1})];
      if (w.steps < 0) break;
      int left = w.steps, m = w.first, head = count.blocks.first(w.batch, w.q_first) + w.kv_head * count.head_group * count.blocks.head_blocks;
      if (left == 0) {
        barrier_arrive(tiles.empty(at));
        continue;
      }
      ListedBlock next{LISTED ? w.list[m] : 0};
      auto place = [&] { return head + (LISTED ? next.block() : m); };
      auto counter = [&] { return semaphores + (i64)place() * PIECES; };
      u32 done = load_relaxed(counter());
#pragma unroll 1
      for (; left > 0; left--) {
        // The additions that follow are made in L2, where the counter is: relaxed loads will do.
        u32* const own = counter();
        const u32 before = LISTED ? next.rank() : band.earlier(w, m, KEYS);
        while (done != before) done = load_relaxed(own);
        first = before == 0;
        if constexpr (LISTED) block = place();
        barrier_arrive(slot.full({0, 0}));
        if (w.walk().next(m)) head += count.blocks.head_blocks;
        if constexpr (LISTED) next.bits = w.list[m];
        barrier_wait(slot.empty({0, 0}), parity);
        parity ^= 1;
        if (left > 1) done = load_relaxed(counter());
        else barrier_arrive(tiles.empty(at));
        add_release(own, 1);  // releases what the consumer has added, too
      }
    }
  }
};
