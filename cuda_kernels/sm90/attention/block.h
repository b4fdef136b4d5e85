// What the roles of a block share: sizes, shared memory, rings, arguments.
#pragma once
#include "sm90/attention/paged_keys.h"
#include "sm90/attention/score.h"

typedef Config::T T;    // of q, k and v
typedef Config::TO TO;  // of the result

constexpr int BN = Config::BN, GROUPS = Config::GROUPS, STAGES = Config::STAGES, Q_STAGES = Config::Q_STAGES;
// VALUE_PARTS consumers have the same 64 rows: each computes their weights, and multiplies them with its part of the values' columns.
constexpr int VALUE_PARTS = Config::VALUE_PARTS, ROW_GROUPS = GROUPS / VALUE_PARTS;
constexpr int TILE_ROWS = 64 * ROW_GROUPS, BM = TILE_ROWS / GROUP_HEADS * GROUP_HEADS;  // BM of them are not spare (tiles.h)
constexpr int CONSUMERS = 128 * GROUPS, THREADS = CONSUMERS + 128;
// Q comes to each consumer by itself, or where a query's heads may be two consumers', to all of them at once.
constexpr bool WHOLE_QUERIES = 64 % GROUP_HEADS == 0;
constexpr int Q_BOXES = WHOLE_QUERIES ? ROW_GROUPS : 1, BOX_ROWS = TILE_ROWS / Q_BOXES;
constexpr int SIZE = sizeof(T);
constexpr bool E4M3 = SIZE == 1;
// Head dims, and the columns that are multiplied: steps of Q·Kᵀ and columns of P·V come in multiples of 16. A tensor map's rows end
// with the head: TMA fills what a tile has beyond it with zeros, and writes no such columns of the result.
constexpr int DQK = Config::DQK, DV = Config::DV, QK_COLUMNS = divide_up(DQK, 16) * 16;
// V's columns in all; those of a consumer: of parts, whole panels.
constexpr int PART_STEP = VALUE_PARTS == 1 ? 16 : 64, O_COLUMNS = divide_up(DV, PART_STEP * VALUE_PARTS) * PART_STEP, V_COLUMNS = O_COLUMNS * VALUE_PARTS;
constexpr int Q_BYTES = tile_bytes<64, QK_COLUMNS, SIZE>, K_BYTES = tile_bytes<BN, QK_COLUMNS, SIZE>, V_BYTES = tile_bytes<BN, V_COLUMNS, SIZE>;
typedef conditional<Config::KV_VIEW == PAGED, PagedKeys<T, BN, Config::PAGE_ROWS>, RowKeys<T, BN>>::type Keys;
typedef conditional<Config::K_TOGETHER, PanelsTogether<BN, QK_COLUMNS, SIZE>, PanelsApart<BN, QK_COLUMNS, SIZE>>::type KBlock;
typedef conditional<Config::V_TOGETHER, PanelsTogether<BN, V_COLUMNS, SIZE>, PanelsApart<BN, V_COLUMNS, SIZE>>::type VBlock;
static_assert(!E4M3 || !(KBlock::TOGETHER || VBlock::TOGETHER || Keys::COPIED), "V is transposed panel by panel");
constexpr int O_BYTES = 16 * 128;  // a warp's rows of one panel
// Of few queries: results leave row by row, and a part of the keys ends within a sequence's.
constexpr bool BY_ROWS = GROUP_HEADS > 1 || Config::IN_PARTS;
// Whether the parts of a tile's keys are the blocks of a cluster, which merge their results (cluster_merge.h). Such a block has one tile.
constexpr bool IN_CLUSTER = Config::IN_CLUSTER;
static_assert(!IN_CLUSTER || (Config::IN_PARTS && !Config::DYNAMIC && GROUPS <= 2), "a part of the keys each");
constexpr bool RAGGED = Config::Q_VIEW == PACKED || Config::KV_VIEW == PAGED || Config::LENGTHS || BY_ROWS;
// Whether blocks of V may hold masked keys (rows beyond a dense V arrive as zeros). NaN and inf among them must not reach the
// result: they are replaced in V ahead of its use (value_filter.h), or rows with NaN are recomputed (recompute.h). The filter
// serves where sequences end within a block, as memory behind them may hold anything.
constexpr bool MASKS_KEYS = HAS_MASK || RAGGED;
constexpr bool RECOMPUTES = MASKS_KEYS && !RAGGED && Config::RECOMPUTE_NAN_ROWS, FILTERS_VALUES = MASKS_KEYS && !RECOMPUTES && !E4M3;
// Whether a tile visits blocks that are listed (visible_blocks.h), those between of which none of its rows sees a key left out.
constexpr bool LISTED = !Scores::BANDED;
constexpr int AHEAD = Config::AHEAD;
static_assert(Config::EARLY == 0 || Q_STAGES == 2, "the next tile's queries arrive during this one");
static_assert(Config::EARLY == 0 || !HAS_BIAS, "a bias comes where a tile's rows are known");
static_assert(Config::PING_PONG == 0 || (GROUPS == 2 && VALUE_PARTS == 1), "two consumers take turns");
static_assert(GROUPS % VALUE_PARTS == 0 && (VALUE_PARTS == 1 || !(E4M3 || Config::RECOMPUTE_NAN_ROWS)), "rows that are recomputed are a consumer's");

// Named barriers: SCHEDULER + g is consumer g's in ping-pong scheduling (PING_PONG).
// LOW + g: consumer g's, which asks whether references are low. READ: all consumers, when the rings have been read.
enum { SCHEDULER = 1, FILTER = 3, LOW = 4, READ = 8 };

// Work tiles kept in shared memory. The producer writes one after it loaded the second last V, so that consumers may still
// be busy with the five tiles before it, where each has one block of keys.
constexpr int WORK_SLOTS = 8;

// What the loads of V write to, and what P·V reads: the same, or of e4m3 its transpose (value_transpose.h).
struct ValuesAsLoaded {
  static constexpr int STAGES_LOADED = STAGES;
  char tiles[STAGES][V_BYTES];
  KS_DEVICE char* loaded(int stage) { return tiles[stage]; }
};
struct ValuesTransposed {
  static constexpr int STAGES_LOADED = E4M3 ? Config::V_STAGES : 1;
  char tiles[STAGES][V_BYTES], rows[STAGES_LOADED][V_BYTES];
  KS_DEVICE char* loaded(int stage) { return rows[stage]; }
};
// e4m3: a reference lies HEADROOM below the largest score when it is chosen, and so that sums of a quarter of a thread's p, which
// bound them, may be as large as p: what is 2^-15 of a row's largest p is not yet 0.
constexpr int HEADROOM = E4M3 ? 5 : 0, RISE = E4M3 ? 3 : 8;
static_assert(!E4M3 || max_of(Config::AHEAD, BN / 2 - Config::AHEAD) / 4 * (1 << HEADROOM) < 448, "equal scores fit");
// bfloat16 has room below 1 as above it: p may be as small as 2^-LEAD of what it was, and then grow by as much as it may anyway.
constexpr int LEAD = Same<T, bf16>::value ? 15 : 0;
constexpr int P_REGISTERS = BN / 8 * SIZE;
typedef conditional<E4M3, ValuesTransposed, ValuesAsLoaded>::type Values;
constexpr int V_STAGES = Values::STAGES_LOADED;

// Memory of each warp: panels through which its results leave, and where P·V has sums (sums.h) these, in the same place.
struct Staging {
  char warps[GROUPS * 4][Config::OUT_STAGES * O_BYTES];
};
struct SumsAndStaging {
  char warps[GROUPS * 4][16 * O_COLUMNS * 3];
};
static_assert(Config::SUM_BLOCKS == 0 || Config::OUT_STAGES * O_BYTES <= 16 * O_COLUMNS * 3, "results leave through the memory of sums");

// A part's result in a cluster: rows in the place of the rings, whose pitch lets eight rows be stored without bank conflicts; their log-sum-exps
// in base 2 in the place of the staging.
constexpr int PART_PITCH = V_COLUMNS * 4 + 32;

// A warp's rows of a bias.
struct BiasMemory {
  alignas(16) char warps[GROUPS * 4][max_of(TileScore<BN>::BiasRows::BYTES, 16)];
  KS_DEVICE char* of_warp(int warp) { return warps[warp]; }
};
struct NoBiasMemory {
  KS_DEVICE char* of_warp(int) { return nullptr; }
};

struct alignas(1024) SharedStorage {
  char q[Q_STAGES][ROW_GROUPS][Q_BYTES];
  char k[STAGES][K_BYTES];
  Values v;
  conditional<(Config::SUM_BLOCKS > 0), SumsAndStaging, Staging>::type out;
  WorkTile work_tiles[WORK_SLOTS];
  int v_filtered[WORK_SLOTS];  // whether non-finite values of V were set to zero
  // Of a stage: four times the block, 2 where masks beside the band leave it whole, and 1 where the tile's rows see all of it.
  int k_block[LISTED ? STAGES : 1];
  struct { int rows, tile; bool masked; } v_block[V_STAGES];  // for the filter: valid rows, work tile
  u64 q_ring[2 * Q_STAGES * Q_BOXES], k_ring[2 * STAGES], v_ring[2 * STAGES], v_loaded[E4M3 ? 2 * V_STAGES : V_STAGES];
  struct { float scores, values; } scales[Config::Q_SCALES ? WORK_SLOTS : 1];  // of a work tile
  alignas(16) Keys::Memory loader;
  conditional<HAS_BIAS, BiasMemory, NoBiasMemory>::type bias;
};
static_assert(sizeof(SharedStorage) <= Config::SHARED_BYTES, "the tiles fit");
static_assert(!IN_CLUSTER || TILE_ROWS * PART_PITCH <= Q_STAGES * ROW_GROUPS * Q_BYTES + STAGES * (K_BYTES + V_BYTES), "a part's result fits");
static_assert(!IN_CLUSTER || TILE_ROWS * 4 <= sizeof(Staging), "its rows' log-sum-exps fit");

// No load writes a tile's spare rows. By all threads.
KS_DEVICE void clear_spare_rows(SharedStorage& storage) {
  constexpr int PANEL = TILE_ROWS * 128, SPARE = max_of(TILE_ROWS - BM, 1) * 128;
#pragma unroll 1
  for (int i = 16 * thread_index(); i < (int)sizeof(storage.q) / PANEL * SPARE; i += 16 * THREADS)
    *(uint4*)(storage.q[0][0] + i / SPARE * PANEL + BM * 128 + i % SPARE) = uint4{};
  async_proxy_fence();
}

// What the numbers of q, k or v are multiplied by: one number an entry's KV head.
struct Scales {
  const float* base;
  i64 batch;
  int head, block;
  KS_DEVICE float at(int b, int h) const { return base[b * batch + (i64)h * head]; }
};
struct OperandScales { Scales q, k, v; };

struct Maps { const TensorMap &q, &k, &v, &out; };

// What the kernel is given beside its maps and what counts its tiles, as the roles use it. An argument, passed whole.
struct Operands {
  Matrices<const T> q;
  Keys keys;
  Matrices<TO> out;
  RowValues<float> lse;
  i64 out_part, lse_part;  // from one part of the keys to the next
  const float* sinks;
  unsigned* counter;  // [3]: next tile of each list, finished blocks; zero before and after the launch
  int num_heads;
  unsigned zero;
};

struct Rings {
  Ring<Q_STAGES * Q_BOXES> q;
  Ring<STAGES> k, v;
  Ring<V_STAGES> v_loaded;  // of e4m3 alone: V as it lies in memory
};
