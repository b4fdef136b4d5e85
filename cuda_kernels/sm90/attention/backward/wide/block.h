// What the roles of a block share: sizes, shared memory, rings, arguments.
#pragma once
#include "sm90/attention/backward/tiles.h"
#include "sm90/attention/backward/dq_semaphore.h"
#include "sm90/attention/softmax.h"

typedef Config::T T;

constexpr int CLUSTER = 2, GROUPS = 2, CONSUMERS = 128 * GROUPS, THREADS = CONSUMERS + 128;
constexpr int BLOCK_KEYS = 64, KEYS = BLOCK_KEYS * CLUSTER;  // of a block, of a tile
// Columns of q or dout that a stage holds: all of up to 192, so that three steps' fit; of 256 half, so that one is handed back early.
KS_DEVICE constexpr int part_columns(int columns) { return columns > 192 ? 128 : columns; }
KS_DEVICE constexpr int parts(int columns) { return columns / part_columns(columns); }
template<int COLUMNS> constexpr int PART_BYTES = tile_bytes<STEP, part_columns(COLUMNS)>;
constexpr int Q_PARTS = parts(QK_COLUMNS), O_PARTS = parts(V_COLUMNS);
constexpr int Q_STAGES = Config::STAGES, O_STAGES = Config::O_STAGES, DS_STAGES = 2;
constexpr int K_BYTES = tile_bytes<BLOCK_KEYS, QK_COLUMNS>, V_BYTES = tile_bytes<BLOCK_KEYS, V_COLUMNS>, OTHER_BYTES = tile_bytes<BLOCK_KEYS, GROUPS * 64>;
constexpr int PANEL_BYTES = STEP * 128, KEY_PANEL_BYTES = BLOCK_KEYS * 128;
constexpr int DS_BYTES = BLOCK_KEYS * STEP * 2, ROW_BYTES = STEP * 4, WARP_DS_BYTES = 16 * STEP * 2;
static_assert(STEP == 64, "a step is one box");
static_assert(PIECES == 3 || PIECES == 4, "each consumer of a cluster multiplies one piece of dq, or the last none");
static_assert(Q_STAGES >= 2 * Q_PARTS && O_STAGES > O_PARTS, "a step's product is handed back after the next step's stages were waited for");
// Whether the fence behind reads of lse stands before s is there, and not behind p, where it delays ds. Of 256 columns, in any order, that was
// 4 % slower (H200).
constexpr bool FENCE_FIRST = PANELS < 4 || Config::IN_ORDER;
// Whether other data may follow a sequence's last query, and its last key, in memory.
constexpr bool RAGGED_QUERIES = Config::Q_VIEW == PACKED, RAGGED_KEYS = Config::KV_VIEW == PACKED || Config::LENGTHS;

// Work tiles kept in shared memory: the one whose K and V are there, and the one that the producer prepares.
constexpr int WORK_SLOTS = 2;

struct alignas(1024) SharedStorage {
  char k[K_BYTES], v[V_BYTES];
  char other_k[OTHER_BYTES];                        // of the other block's keys, the columns of this block's part of dq
  char q[Q_STAGES][PART_BYTES<QK_COLUMNS>], dout[O_STAGES][PART_BYTES<V_COLUMNS>];
  char ds[DS_STAGES][CLUSTER][DS_BYTES];            // of this block's keys, where p was, and of the other's
  float lse[Q_STAGES][STEP], delta[Q_STAGES][STEP];  // beside the first part of q
  WorkTile work_tiles[WORK_SLOTS];
  int walk[2];
  u64 kv_ring[2], q_ring[2 * Q_STAGES], dout_ring[2 * O_STAGES], ds_ring[2 * DS_STAGES], p_ring[2 * DS_STAGES], tile_ring[2];
  DqSemaphoreSlot semaphores[GROUPS];
  int tile;  // the number that the first block's producer tells the other's
};
static_assert(sizeof(SharedStorage) <= Config::SHARED_BYTES, "the tiles fit");

struct Maps { const TensorMap &q, &dout, &k, &v, &dk, &dv; };

// What the kernel is given beside its maps and what counts its tiles. An argument, passed whole.
struct Operands {
  Matrices<T> dk, dv;
  const float *lse, *delta;  // of every row of a block (sums.h): −lse in base 2, −inf where there is no such query, and delta
  float* sums;
  u32* semaphores;               // of every piece of a block: how many tiles have added
  u32* counter;             // [2]: next tile, finished clusters; zero before and after the launch
};

struct Rings {
  Ring<1> kv;
  Ring<Q_STAGES> q;
  Ring<O_STAGES> dout;
  Ring<DS_STAGES> ds;
  Ring<DS_STAGES> p;  // p, where ds will be; full alone: it is empty when ds is
  Ring<1> tile;
  DqSemaphores semaphores;
};

// A warp's arrival at a stage's empty barrier, in both blocks of the cluster.
KS_DEVICE void release(u32 barrier, int lane) {
  if (lane < CLUSTER) barrier_arrive_at(barrier, lane);
}
