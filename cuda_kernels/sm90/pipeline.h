// A pipeline of tiles from global to shared memory: a ring of stages, each with a full and an empty mbarrier. A producer waits
// for empty and loads; every consumer waits for full, reads, and releases the stage. Both visit the stages in the same order,
// each with a PipelineState of its own. Blocks of a cluster that multicast to each other have a ring each, visit the stages in
// the same order, and release a stage to all blocks.
#pragma once
#include "sm90/ptx.h"

// A stage of a ring, and the phase parity to wait for. A producer starts with parity 1, as all stages are empty.
template<int STAGES> struct PipelineState {
  int stage;
  u32 parity;
  KS_DEVICE void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  KS_DEVICE void advance(int stages) {
    const int to = stage + stages;
    stage = to % STAGES, parity ^= to / STAGES & 1;
  }
};

// The mbarriers of a ring, in shared memory at `barriers`: STAGES full ones, then STAGES empty ones.
template<int STAGES> struct Ring {
  typedef PipelineState<STAGES> State;
  u32 barriers;
  KS_DEVICE u32 full(const State& state) const { return barriers + 8 * state.stage; }
  KS_DEVICE u32 empty(const State& state) const { return barriers + 8 * (STAGES + state.stage); }
  // `consumers`: arrivals that make a stage empty; `producers`: arrivals that make it full, TMA's bytes aside.
  KS_DEVICE void init(int consumers, int producers = 1) const {
    for (int i = 0; i < STAGES; i++)
      barrier_init(barriers + 8 * i, producers), barrier_init(barriers + 8 * (STAGES + i), consumers);
  }
  KS_DEVICE void wait_full(const State& state) const { barrier_wait(full(state), state.parity); }
  KS_DEVICE void wait_empty(const State& state) const { barrier_wait(empty(state), state.parity); }
  // That `stages` from this one on are full.
  KS_DEVICE void wait_all_full(State state, int stages) const {
#pragma unroll 1
    for (; stages > 0; stages--, state.advance()) wait_full(state);
  }
};

// Loads rows row … row + ROWS − 1 and COLUMNS columns of a matrix, of SIZE bytes each, into a tile: panels of 128 bytes of columns,
// one box each; of e4m3, rows of 64 columns are one panel of 64 bytes. Signals `barrier`, which has to expect tile_bytes. The map's axes are column,
// row, head, batch.
template<int COLUMNS, int SIZE> constexpr int panel_row = SIZE == 1 && COLUMNS == 64 ? 64 : 128;
template<int ROWS, int COLUMNS, int SIZE = 2>
constexpr int tile_bytes = ROWS * divide_up(COLUMNS * SIZE, panel_row<COLUMNS, SIZE>) * panel_row<COLUMNS, SIZE>;
template<int ROWS, int COLUMNS, int SIZE = 2>
KS_DEVICE void tile_load(u32 to, const TensorMap& map, u32 barrier, int row, int head, int batch) {
  constexpr int PER = panel_row<COLUMNS, SIZE> / SIZE;
#pragma unroll
  for (int c = 0; c < COLUMNS; c += PER)
    tma_load(to + c / PER * ROWS * panel_row<COLUMNS, SIZE>, map, barrier, c, row, head, batch);
}
// The same of a map whose boxes have rows of several heads: its axes are column, head of the group, row, group, batch.
template<int ROWS, int COLUMNS, int SIZE = 2>
KS_DEVICE void grouped_tile_load(u32 to, const TensorMap& map, u32 barrier, int row, int group, int batch) {
  constexpr int PER = panel_row<COLUMNS, SIZE> / SIZE;
#pragma unroll
  for (int c = 0; c < COLUMNS; c += PER)
    tma_load_5d(to + c / PER * ROWS * panel_row<COLUMNS, SIZE>, map, barrier, c, 0, row, group, batch);
}
