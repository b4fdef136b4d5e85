// What the roles of a block share: sizes, shared memory, rings, arguments.
#pragma once
#include "sm90/attention/backward/tiles.h"
#include "sm90/attention/backward/dq_semaphore.h"
#include "sm90/attention/backward/elements.h"
#include "sm90/attention/softmax.h"

typedef Config::T T;

constexpr int GROUPS = 2, KEYS = 64 * GROUPS, CONSUMERS = 128 * GROUPS, THREADS = CONSUMERS + 128;
constexpr int STAGES = Config::STAGES, O_STAGES = Config::O_STAGES, KV_STAGES = Config::KV_STAGES, DS_STAGES = 2;
constexpr int K_BYTES = tile_bytes<KEYS, QK_COLUMNS>, Q_BYTES = tile_bytes<STEP, QK_COLUMNS>, ROW_BYTES = STEP * 4;
constexpr int V_BYTES = tile_bytes<KEYS, V_COLUMNS>, O_BYTES = tile_bytes<STEP, V_COLUMNS>;
constexpr int DS_BYTES = 64 * STEP * 2;       // of one consumer's keys
static_assert(PIECES == GROUPS, "each consumer multiplies one piece of dq");
static_assert(DS_STAGES == 2, "ds of a step is written before dq of the last one is multiplied");
// Whether other data may follow a sequence's last query, and its last key, in memory.
constexpr bool RAGGED_QUERIES = Config::Q_VIEW == PACKED, RAGGED_KEYS = Config::KV_VIEW == PACKED || Config::LENGTHS;

// Whether the first step of a consumer's keys may be left out: causal, where blocks of queries are no longer than a consumer's keys.
constexpr bool SKIPS = Config::CAUSAL && !Config::WINDOW && STEP == 64 && O_STAGES == STAGES && !Config::PREFIX && !LISTED;

// Whether row values are loaded before the products that they are subtracted from are there: up to 5 % of the time (H200). With 128
// queries a step registers are too few, and it was 1 to 8 % slower.
constexpr bool AHEAD = STEP == 64;

// What a step's queries are, where they are LISTED.
struct ListedStep { ListedBlock block; int head; };

constexpr int WORK_SLOTS = 2 * KV_STAGES;  // work_slot

struct alignas(1024) SharedStorage {
  char k[KV_STAGES][K_BYTES], v[KV_STAGES][max_of(K_BYTES, V_BYTES)];  // the gradients of both leave through V's place
  char q[STAGES][Q_BYTES], dout[O_STAGES][O_BYTES];
  char ds[DS_STAGES][GROUPS][DS_BYTES];
  float lse[STAGES][STEP], delta[O_STAGES][STEP];  // of a step's queries: −lse in base 2, and delta
  WorkTile work_tiles[WORK_SLOTS];
  int walk[2];
  u64 k_ring[2 * KV_STAGES], v_ring[2 * KV_STAGES], q_ring[2 * STAGES], dout_ring[2 * O_STAGES], ds_ring[2 * DS_STAGES];
  DqSemaphoreSlot semaphores[GROUPS];
  alignas(16) char planes[max_of(CONSUMERS / WARP * PLANE_BYTES, 16)];
  ListedStep listed[LISTED ? STAGES : 1];
};
static_assert(sizeof(SharedStorage) <= Config::SHARED_BYTES, "the tiles fit");

struct Maps { const TensorMap &q, &dout, &k, &v, &dk, &dv; };

// What the kernel is given beside its maps and what counts its tiles. An argument, passed whole.
struct Operands {
  Matrices<T> dk, dv;
  const float *lse, *delta;  // of every row of a block (sums.h): −lse in base 2, −inf where there is no such query, and delta
  float* sums;
  u32* semaphores;               // of every piece of a block: how many tiles have added
  u32* counter;             // [2]: next tile, finished blocks; zero before and after the launch
};

struct Rings {
  Ring<KV_STAGES> k, v;
  Ring<STAGES> q;
  Ring<O_STAGES> dout;
  Ring<DS_STAGES> ds;
  DqSemaphores semaphores;
};
