// Latent attention's tiles in shared memory, and what its warpgroups share (latent.h).
#pragma once
#include "sm90/attention/latent_list.h"
#include "sm90/pipeline.h"

typedef Config::T T;
typedef Config::KV KV;  // of keys in memory

constexpr bool FEW = ROWS == 16;  // keys are the rows of products then, and rows their columns
constexpr bool ROWS_SCALED = Config::ROW_SCALES != 0;
constexpr bool BY_ROWS = FEW && ROWS_SCALED;  // tiles of keys are rows as in memory (latent_few_rows.h), else of T, in panels
constexpr int DQK = Config::DQK, DV = Config::DV, STAGES = BY_ROWS ? 4 : 2, PANEL_BYTES = 64 * 128, PANELS = DQK / 64, HALF = DV / 2;
constexpr int QUERY_PANEL_BYTES = ROWS * 128;
constexpr int OWN = HALF / 64;       // panels of values of a consumer
constexpr int SCALES = Config::ROW_SCALES ? DV / 128 : 0, BEHIND = DV + 4 * SCALES;  // bytes of a row before what is no value
constexpr int ROW_BYTES = BEHIND + 2 * (DQK - DV), QUERY_PITCH = 2 * DV + 16, ROTATED_PITCH = 192;
constexpr int TILE_BYTES = BY_ROWS ? BN * ROW_BYTES : PANELS * PANEL_BYTES, THREADS = 384;
static_assert(DQK % 64 == 0 && HALF == 256 && DV <= DQK, "panels of 64 columns, and a product of 256 a consumer");
enum { SCORES, COLUMNS, LOAD };      // warpgroups
enum { FULL = 1, EMPTY, SCORES_MADE, FILTERED, CONVERTED = FILTERED + 2 };  // named barriers; FILTERED of each consumer
constexpr int EXCHANGE = 256;              // threads of the others

// A tile's panels come in two parts: the score consumer's values; the values of the other, which it is done with later. What is no
// value is in the first, or where it comes last (ROW_SCALES) in the second.
template<int N> constexpr int part_panels = (N != 0) == ROWS_SCALED ? PANELS - OWN : OWN;
template<int N> KS_DEVICE constexpr int panel_of(int i) { return N ? OWN + i : i < OWN ? i : OWN + i; }

// Where a tile has few rows: what the consumers tell each other, in so many rounds, and what their warps do.
constexpr int EXCHANGE_ROUNDS = BY_ROWS ? 2 : 1;
struct Exchange {
  float o[FEW ? DV / 8 / EXCHANGE_ROUNDS : 1][FEW ? 128 : 1], rows[FEW ? 2 : 1][2][4][FEW ? ROWS : 1], reference[FEW ? ROWS : 1], sum[FEW ? ROWS : 1];
  alignas(16) u32 scales[BY_ROWS ? 2 : 1][BY_ROWS ? 2 : 1][BY_ROWS ? 4 : 1][BY_ROWS ? 4 : 1];
};

struct alignas(1024) SharedStorage {
  char q[BY_ROWS ? ROWS * QUERY_PITCH : PANELS * QUERY_PANEL_BYTES];
  alignas(1024) char k[STAGES][TILE_BYTES];
  alignas(1024) char p[FEW ? 2 : 1][QUERY_PANEL_BYTES * (BY_ROWS ? 4 : 1)];
  alignas(16) char q_rotated[BY_ROWS ? ROWS * ROTATED_PITCH : 16];
  float query_units[BY_ROWS ? ROWS : 1], factors[FEW ? 1 : ROWS];
  Exchange exchange;
  u64 k_rings[2][2 * STAGES], q_ring[2];  // of each part of a tile of keys
  Piece pieces[THREADS / 32];             // of the warps, all the same: registers are few
};
static_assert(sizeof(SharedStorage) <= Config::SHARED_BYTES, "the tiles fit");

// Arguments, passed whole.
struct Operands {
  Matrices<const T> q;
  Matrices<const KV> k;
  Matrices<T> out;
  RowValues<float> lse;
  float *sums, *sums_lse;  // [state, row, column], [state, row]
  float scale_log2;
};

// Tiles of keys that boxes bring: those that all rows see whole. They need no fence before products, nor do tiles whose writers have
// one.
KS_DEVICE int boxed_tiles(const Rows& rows, bool boxes) {
  if (Config::ROW_SCALES) return 0x7fffffff;
  return boxes ? max_of(rows.least(), 0) / BN : 0;
}

// What the rows of a piece see.
struct Seen {
  int whole, boxed;  // tiles of keys that all rows see whole; those that boxes bring
  bool differ;       // not all see the same
  KS_DEVICE Seen(const Rows& rows, bool boxes)
      : whole(max_of(rows.least(), 0) / BN), boxed(boxed_tiles(rows, boxes)), differ(Config::CAUSAL && rows.least() != rows.most()) {}
};

// A thread of a consumer where a tile has few rows.
struct FewThread {
  SharedStorage& storage;
  const Operands& a;
  const Ring<STAGES> (&k_rings)[2];
  const Ring<1>& q_ring;
  int own, warp, thread_lane;  // own: which of the two, and its stage

  static constexpr int VALUES = DV / 64;  // products of values
  // Of element i of a fragment of 16 columns, and of its four of two rows each: the row of the tile.
  KS_DEVICE int row_of(int i) const { return 8 * (i / 2) + 2 * (thread_lane % 4) + i % 2; }
};
