// A pipeline of tiles from global to shared memory: a ring of stages, each with a barrier that says it is full and one that
// says it is empty. A producer waits for empty and loads; every consumer waits for full, uses, and hands the stage back.
// Both walk the ring in the same order, each with a cursor of its own. Blocks of a cluster that load for each other have a ring
// each, walk them in the same order, and hand a stage back to all.
#pragma once
#include "sm90/ptx.h"

// A place in a ring, and the parity of the turn that it is in. A producer starts with parity 1: all stages are empty.
template<int STAGES> struct Cursor {
  int stage;
  u32 parity;
  KS_DEVICE void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// The barriers of a ring, in shared memory at `barriers`: STAGES of them say full, then STAGES say empty.
template<int STAGES> struct Ring {
  typedef Cursor<STAGES> Place;
  u32 barriers;
  KS_DEVICE u32 full(const Place& at) const { return barriers + 8 * at.stage; }
  KS_DEVICE u32 empty(const Place& at) const { return barriers + 8 * (STAGES + at.stage); }
  // `returns`: arrivals that make a stage empty.
  KS_DEVICE void init(int returns) const {
    for (int i = 0; i < STAGES; i++) barrier_init(barriers + 8 * i, 1), barrier_init(barriers + 8 * (STAGES + i), returns);
  }
  KS_DEVICE void wait_full(const Place& at) const { barrier_wait(full(at), at.parity); }
  KS_DEVICE void wait_empty(const Place& at) const { barrier_wait(empty(at), at.parity); }
};

// Loads rows row … row + ROWS − 1 and COLUMNS columns of a matrix into a tile: panels of 64 columns, one box each. Signals
// `barrier`, which has to expect tile_bytes. The map's axes are column, row, head, batch.
template<int ROWS, int COLUMNS> constexpr int tile_bytes = ROWS * ((COLUMNS + 63) / 64) * 128;
template<int ROWS, int COLUMNS>
KS_DEVICE void tile_load(u32 to, const TensorMap& map, u32 barrier, int row, int head, int batch) {
#pragma unroll
  for (int c = 0; c < COLUMNS; c += 64) tma_load(to + c / 64 * ROWS * 128, map, barrier, c, row, head, batch);
}
