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
// Whether blocks of V may hold what a row must not see; what lies beyond a dense V arrives as zeros. Such blocks are searched
// ahead of their use (cleaners.h), or the result is looked at (remake.h): where sequences end within a block, there may be
// anything in many blocks.
constexpr bool HIDES_KEYS = KS_CAUSAL || KS_WINDOW || RAGGED;
constexpr bool REMAKES = HIDES_KEYS && !RAGGED && KS_REMAKE, CLEANS = HIDES_KEYS && !REMAKES;
constexpr int AHEAD = KS_AHEAD;
static_assert(KS_EARLY == 0 || Q_STAGES == 2, "the next tile's queries arrive during this one");
static_assert(KS_TURNS == 0 || GROUPS == 2, "two consumers take turns");

// Named barriers: 1 and 2 are the consumers' turns.
enum { TURN = 1, CLEANERS = 3 };

// Tiles whose coordinates are kept. A tile is found after the V before the last was loaded, so that consumers may still be
// busy with the five tiles before it, where each has one block of keys.
constexpr int KNOWN = 8;

struct alignas(1024) Shared {
  char q[Q_STAGES][GROUPS][Q_BYTES];
  char k[STAGES][K_BYTES], v[STAGES][V_BYTES];
  char out[GROUPS * 4][KS_OUT_STAGES][O_BYTES];
  Work works[KNOWN];
  int removed[KNOWN];  // whether values of V were taken out
  struct { int rows, tile; bool hides; } v_block[STAGES];  // for the cleaners: rows of the sequence in it, index of its tile
  u64 q_ring[2 * Q_STAGES * GROUPS], k_ring[2 * STAGES], v_ring[2 * STAGES], v_landed[STAGES];
};
static_assert(sizeof(Shared) <= KS_SHARED_BYTES, "the tiles fit");

struct Maps { const TensorMap &q, &k, &v, &out; };

// What the kernel is given beside its maps and what counts its tiles, as the roles use it. An argument, passed whole.
struct Operands {
  Matrices<const T> q, k, v;
  Matrices<T> out;
  RowValues<float> lse;
  const float* sinks;
  unsigned* counter;  // two, zero before and after
  int num_heads;
  unsigned zero;
};

struct Rings {
  Ring<Q_STAGES * GROUPS> q;  // each consumer's rows by themselves
  Ring<STAGES> k, v;
};
