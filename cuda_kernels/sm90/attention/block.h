// What the roles of a block share: sizes, shared memory, rings, arguments. Constants: see forward.h.
#pragma once
#include "sm90/attention/softmax.h"
#include "sm90/attention/tiles.h"
#include "sm90/pipeline.h"

typedef KS_T T;

constexpr int DQK = KS_DQK, DV = KS_DV, BN = KS_BN, GROUPS = KS_GROUPS, STAGES = KS_STAGES, Q_STAGES = KS_Q_STAGES;
constexpr int BM = 64 * GROUPS, CONSUMERS = 128 * GROUPS, THREADS = CONSUMERS + 128;
constexpr int Q_BYTES = tile_bytes<64, DQK>, K_BYTES = tile_bytes<BN, DQK>, V_BYTES = tile_bytes<BN, DV>;
constexpr int O_BYTES = 16 * 128;  // a warp's rows of one panel
constexpr bool RAGGED = KS_Q_VIEW == PACKED || KS_LENGTHS;
// Whether blocks of V may hold masked keys (rows beyond a dense V arrive as zeros). NaN and inf among them must not reach the
// result: they are replaced in V ahead of its use (value_filter.h), or rows with NaN are recomputed (recompute.h). The filter
// serves where sequences end within a block, as memory behind them may hold anything.
constexpr bool HAS_MASK = KS_CAUSAL || KS_WINDOW || RAGGED;
constexpr bool RECOMPUTES = HAS_MASK && !RAGGED && KS_REMAKE, FILTERS_VALUES = HAS_MASK && !RECOMPUTES;
constexpr int AHEAD = KS_AHEAD;
static_assert(KS_EARLY == 0 || Q_STAGES == 2, "the next tile's queries arrive during this one");
static_assert(KS_TURNS == 0 || GROUPS == 2, "two consumers take turns");

// Named barriers: SCHEDULER + g is consumer g's in ping-pong scheduling (TURNS).
enum { SCHEDULER = 1, FILTER = 3 };

// Work tiles kept in shared memory. The producer writes one after it loaded the second last V, so that consumers may still
// be busy with the five tiles before it, where each has one block of keys.
constexpr int WORK_SLOTS = 8;

struct alignas(1024) SharedStorage {
  char q[Q_STAGES][GROUPS][Q_BYTES];
  char k[STAGES][K_BYTES], v[STAGES][V_BYTES];
  char out[GROUPS * 4][KS_OUT_STAGES][O_BYTES];
  WorkTile work_tiles[WORK_SLOTS];
  int v_filtered[WORK_SLOTS];  // whether non-finite values of V were set to zero
  struct { int rows, tile; bool masked; } v_block[STAGES];  // for the filter: valid rows, work tile
  u64 q_ring[2 * Q_STAGES * GROUPS], k_ring[2 * STAGES], v_ring[2 * STAGES], v_loaded[STAGES];
};
static_assert(sizeof(SharedStorage) <= KS_SHARED_BYTES, "the tiles fit");

struct Maps { const TensorMap &q, &k, &v, &out; };

// What the kernel is given beside its maps and what counts its tiles, as the roles use it. An argument, passed whole.
struct Operands {
  Matrices<const T> q, k, v;
  Matrices<T> out;
  RowValues<float> lse;
  const float* sinks;
  unsigned* counter;  // [2]: next tile, finished blocks; zero before and after the launch
  int num_heads;
  unsigned zero;
};

struct Rings {
  Ring<Q_STAGES * GROUPS> q;  // each consumer's rows by themselves
  Ring<STAGES> k, v;
};
