// What the roles of a block share: sizes, shared memory, rings, arguments.
#pragma once
#include "gemm/epilogue.h"
#include "gemm/reductions.h"
#include "gemm/scales.h"
#include "sm90/gemm/groups.h"
#include "sm90/gemm/matrix.h"
#include "sm90/pipeline.h"
#include "sm90/wgmma.h"

typedef Config::T T;
typedef Config::TC TC;
typedef conditional<sizeof(TC) == 2, TC, conditional<sizeof(T) == 2, T, f16>::type>::type Half;  // of what is stored by fragments of 16 bits

typedef optional<Config::BIAS> Bias;
typedef optional<Config::ROW_SUMS> RowSums;

// Heads whose elements lie one head after the other: C's rows are those of A, its columns those of B, or K counts those of A.
enum { JOINED_A = 1, JOINED_B = 2, JOINED_K = 3 };
enum { ROWS = 0, TMA = 1 };  // who stores: see epilogue.h

constexpr bool GROUPED_ROWS = Config::GROUPED == ALONG_M, GROUPED_COLUMNS = Config::GROUPED == ALONG_N, GROUPED_K = Config::GROUPED == ALONG_K;
constexpr bool DIVIDED_C = GROUPED_ROWS || GROUPED_COLUMNS;  // one C, divided among the groups
constexpr bool EMPTY_SUMS = GROUPED_K || OF_LISTS;  // a group may sum nothing
constexpr bool E4M3 = sizeof(T) == 1, SCALES_BY_ROWS = Config::SCALES && !Config::SCALE_K;  // and by columns
constexpr bool COLUMN_VALUES = Bias::THERE || SCALES_BY_ROWS, PING_PONG = Config::PING_PONG;
constexpr int BM = Config::BM, BN = Config::BN, GROUPS = Config::GROUPS, STAGES = Config::STAGES, CLUSTER = Config::CLUSTER, BUFFERS = Config::BUFFERS;
// Arrivals that make a stage full, and those of a consumer that make it empty: scales are brought by a warp, and read by each; rows that
// are gathered are brought by four.
constexpr int FULL_ARRIVALS = Config::GATHERED ? 1 + 4 * WARP : Config::SCALE_K ? 1 + WARP : 1, RELEASES = Config::SCALE_K ? 4 : 1;
constexpr int SPLIT = Config::SPLIT;  // blocks of a cluster that sum a part of K each
// Blocks that load parts of a slice of A, or of B, for all of them.
constexpr int A_PARTS = Config::SHARED_A ? CLUSTER : 1, B_PARTS = Config::SHARED_A ? 1 : CLUSTER;
static_assert(SPLIT == 1 || CLUSTER == 1, "a cluster shares rows of A, columns of B, or a sum");
// Consumers that share a tile: all, or in PING_PONG each has tiles of its own.
constexpr int SHARERS = PING_PONG ? 1 : GROUPS;
// What a consumer has of its block's tiles: of each some rows, or in PING_PONG all of every other one.
struct OwnTiles { int first, step; };
KS_DEVICE OwnTiles own_tiles(int consumer, int first, int step) {
  return PING_PONG ? OwnTiles{first + consumer * step, GROUPS * step} : OwnTiles{first, step};
}
constexpr int BK = 128 / sizeof(T), MT = BM / (64 * SHARERS), PANELS = divide_up(BN, 64), CONSUMERS = 128 * GROUPS, THREADS = CONSUMERS + 128;
// Of a tile's blocks of 64 rows a consumer's first.
KS_DEVICE int first_rows_of(int consumer) { return PING_PONG ? 0 : consumer * MT; }
static_assert(PANELS <= 4 && MT * 64 * SHARERS == BM, "tiles are of 64 rows a consumer, and up to four panels of 64 columns");
// The last panel may be a part of one: of a B that lies along K, and a result without source tiles or pairs, which warps store.
static_assert(BN % 64 == 0 || (BN % 16 == 0 && Config::B_TRANSPOSED && Config::STORE == ROWS && !Config::PAIRS && !Config::RESIDUAL), "whole panels");

// Named barriers: 1 + g among consumer g's threads; TURN + g is its turn to multiply, where two take turns.
enum { TURN = 3 };
static_assert(!(Config::IN_TURNS || Config::HALVES) || (E4M3 && GROUPS == 2 && MT == 1), "two consumers of 64 rows");
static_assert(!PING_PONG || (!E4M3 && GROUPS == 2 && SPLIT == 1 && !GROUPED_K && Config::STORE == TMA), "two consumers take turns, of as many slices each");

constexpr int ROWS_BYTES = 64 * 128;  // 64 rows of a panel
// Panels of the result, of 128 bytes a row too, and those of the sums. An epilogue of pairs makes one column of two: as HALVES, a tile's
// columns are half of either half's.
constexpr int PER_COLUMN = Config::PAIRS ? 2 : 1, C_COLUMNS = 128 / sizeof(TC);
constexpr int C_PANELS = divide_up(BN / PER_COLUMN, C_COLUMNS), SUM_PANELS = divide_up(BN, C_COLUMNS);
static_assert(Config::PAIRS != HALVES || Config::B_TRANSPOSED || BN % 128 == 0, "a half is of whole panels of B");
// Of few rows A_ROWS alone are loaded: what products read as the others are rows of B, and what comes of them is not stored.
constexpr int A_ROWS = Config::A_ROWS, A_BYTES = A_ROWS * 128, B_BYTES = BN * 128, STAGE_BYTES = A_BYTES + B_BYTES, SOURCE_BYTES = BM * 128;
static_assert(A_ROWS == BM || (BM == 64 && BN >= 64 && A_ROWS % 16 == 0 && !Config::A_TRANSPOSED), "the rows of a consumer's first warps");

// Source tiles (beta · C, residual) come through the same ring: panels of BM rows in a stage.
constexpr int SOURCE_PANELS = min_of(C_PANELS, STAGE_BYTES / SOURCE_BYTES);

// Epilogue buffers are 64 rows of a panel each; BATCH are stored at once, SLOTS batches in flight a consumer.
constexpr int RESULT_BATCH = C_PANELS <= BUFFERS ? C_PANELS : C_PANELS % BUFFERS == 0 ? BUFFERS : 1;
constexpr int BATCH = Config::PREACTIVATION && SUM_PANELS % RESULT_BATCH ? 1 : RESULT_BATCH, SLOTS = BUFFERS / BATCH;

// Sums and maxima in an epilogue: parts of a consumer's warps, for so many columns of each of its STRIP_ROWS, until they are joined (reductions.h).
struct WarpParts { float of[4]; };
constexpr int STRIP_ROWS = 64, KEPT_COLUMNS = BN / PER_COLUMN % 64 == 0 ? 64 : 32;
template<int COUNT, class E = Epilogue> constexpr int kept_of() {  // those of the first COUNT
  if constexpr (COUNT == 0) return 0;
  else return kept_of<COUNT - 1, E>() + (E::REDUCED_ROWS[COUNT - 1] == 1 ? 0 : MT * (E::REDUCED_COLUMNS[COUNT - 1] == 1 ? KEPT_COLUMNS : 1));
}
constexpr int KEPT_PARTS = kept_of<Config::REDUCTIONS>();

// The right factor of the products that sum A's rows: a column of ones, whatever its layout.
struct Ones {
  alignas(1024) u32 pairs[256];
  KS_DEVICE u32* ones() { return pairs; }
};
struct NoOnes {
  KS_DEVICE u32* ones() { return nullptr; }
};

// Split sums: the others' accumulators lie in the ring of the first block, behind its source tiles, until it has added them.
// (Whether there is a tile of C is known at run time: the host looks whether both fit.)
constexpr int SOURCE_STAGES = divide_up(C_PANELS, SOURCE_PANELS), PARTIAL_BYTES = (SPLIT - 1) * A_ROWS * BN * 4;
static_assert(SPLIT == 1 || SOURCE_STAGES * Config::RESIDUAL + divide_up(PARTIAL_BYTES, STAGE_BYTES) <= STAGES, "the others' sums fit the ring");

struct alignas(1024) Storage : conditional<RowSums::THERE, Ones, NoOnes>::type {
  char stages[STAGES][STAGE_BYTES];
  char out[GROUPS][BUFFERS][ROWS_BYTES];
  float scales[Config::SCALE_K ? STAGES : 1][Config::SCALE_K ? BM + 4 : 1];  // of blocks (scale_loader.h)
  float columns[COLUMN_VALUES || KEPT_PARTS ? GROUPS : 1][max_of((COLUMN_VALUES ? BN : 0) + 4 * KEPT_PARTS, 1)];  // of the bias, or columns' scales
  u64 ring[2 * STAGES], out_ring[GROUPS][2 * SLOTS];

  KS_DEVICE WarpParts* parts(int consumer) { return (WarpParts*)&columns[KEPT_PARTS ? consumer : 0][COLUMN_VALUES && KEPT_PARTS ? BN : 0]; }
};
struct GroupedStorage : Storage { GroupTable groups; };
KS_DEVICE GroupTable& groups_of(GroupedStorage& storage) { return storage.groups; }
GroupTable& groups_of(Storage&);  // never called
typedef conditional<Config::GROUPED != 0, GroupedStorage, Storage>::type SharedStorage;
static_assert(sizeof(SharedStorage) <= Config::SHARED_BYTES, "the tiles fit");

// Where the numbers of sums and maxima go that the launch itself adds up (joined_parts.h), by matrix, row and column; matrices that share one.
template<int COUNT> struct ReducedNumbers {
  float* numbers[COUNT];
  i64 matrix[COUNT], row[COUNT], column[COUNT];
  int matrices[COUNT];
};
template<> struct ReducedNumbers<0> {};

// Of numbers of `of` parts each, along one axis, those whose last part is one of a tile's, `from` to `end` of so many: the tile adds them up.
struct OwnNumbers { int first, count; };
KS_DEVICE OwnNumbers own_numbers(int of, int from, int end, int parts) {
  const int first = from / of, last = end < parts ? end / of : divide_up(parts, of);
  return {first, from < parts ? last - first : 0};
}

// a1, a2: of the other operands that A's heads come from; c1, c2: that C's columns go to; sums: what the epilogue is of.
struct Maps { const TensorMap &a, &b, &c, &residual, &a1, &a2, &c1, &c2, &sums; };

// The kernel's arguments beside its maps, as the roles use them: operands are addresses, or lists of them.
struct Arguments {
  const void *a, *b, *bias, *residual, *origin;
  void* c;
  i64 c_batch, c_head, bias_batch, bias_head;
  int c_row, M, N, slices;  // of K, 64 each
  int a_head, a_batch, b_head, b_batch, residual_head, residual_batch;  // 0 where all heads, or batches, share one matrix
  float alpha, beta;
  void* sums;
  i64 sums_batch, sums_head;
  int batch_group, head_group;  // products that are summed into one C: batches, and heads of each
  int a1_first, a2_first;       // heads that A's other operands begin with
  const Scales& scales;
  const FastDivmod& b_heads;
  const RowIndices& indices;
  const EpilogueArguments& epilogue;
  const EpilogueParts<Config::REDUCTIONS>& parts;
  const ReducedNumbers<Config::REDUCTIONS>& reduced;

  // Stages of the ring that a tile's source tiles take.
  KS_DEVICE int source_stages() const {
    return ((!Config::HEADS && !Config::PAIRS && beta != 0) + Config::RESIDUAL) * SOURCE_STAGES;
  }
  // And all that it takes.
  KS_DEVICE int stages() const { return slices * (Config::SUMMED ? batch_group * head_group : 1) + source_stages(); }
};

// Of a tile: what is summed over, where it begins, and how many slices it has; and the end of its rows.
KS_DEVICE int first_of_k(const Arguments& a, const TileCoord& p) {
  return GROUPED_K ? p.begin : TAIL ? p.first * BK : 0;
}
KS_DEVICE int slices_of(const Arguments& a, const TileCoord& p) {
  if (TAIL && p.slices) return p.slices;
  return GROUPED_K ? divide_up(p.end - p.begin, BK) : OF_LISTS ? divide_up(p.begin, BK) : a.slices;
}
KS_DEVICE int end_of_rows(const Arguments& a, const TileCoord& p) { return GROUPED_ROWS || OF_LISTS ? p.end : a.M; }

// Whether a consumer's rows of a tile are all behind the end of the group: then it leaves them out, as those of a last tile often are.
KS_DEVICE bool leaves_out(const TileCoord& p, int consumer) {
  return (GROUPED_ROWS || OF_LISTS) && p.row + 64 * first_rows_of(consumer) >= p.end;
}

// Whether the block that sums a tile stores it.
KS_DEVICE bool stores(const TileCoord& p) { return !TAIL || p.before >= 0; }

// Whether these 64 rows of some columns are all of a tile's group: then TMA may store them; else warps do, without the rest.
KS_DEVICE bool of_group(const TileCoord& p, int row, int column, int columns) {
  return (!GROUPED_ROWS || row + 64 <= p.end) && (!GROUPED_COLUMNS || (column >= p.begin && column + columns <= p.end));
}

// Of a list's group its maps of A, B and C, which lie behind the origin; `last` is the group whose maps this thread acquired.
KS_DEVICE const TensorMap* maps_of_list(const Arguments& a, const TileCoord& p, int& last, int first, int end) {
  const TensorMap* const maps = (const TensorMap*)a.origin + 3 * p.matrix;
  if (p.matrix != last)
    for (int i = first; i < end; i++) tensor_map_acquire(maps + i);
  last = p.matrix;
  return maps;
}

// The matrix of a tile: by its number in a list, or by head and batch.
KS_DEVICE Matrix matrix_of(const Arguments& a, const void* list, const TileCoord& at, int head, int by_head, int by_batch) {
  if (Config::POINTERS) return matrix_at(listed((const T*)list, at.matrix), a.origin);
  return {head * by_head, at.batch * by_batch};
}

// Boxes that a tile's rows of a B along K are cut into, so that each lies in one half of the columns where the epilogue pairs halves.
constexpr int B_BOXES = Config::PAIRS == HALVES ? max_of(B_PARTS, 2) : B_PARTS;

// Which column of the product is number j of a tile's, and which of the result its first.
KS_DEVICE int product_column(const Arguments& a, const TileCoord& p, int j) {
  if (Config::PAIRS != HALVES) return p.column + j;
  return (j < BN / 2 ? 0 : (unsigned)a.N / 2 - BN / 2) + (unsigned)p.column / 2 + j;
}
KS_DEVICE int result_column(const TileCoord& p) { return (unsigned)p.column / PER_COLUMN; }

KS_DEVICE Matrix sums_matrix(const Arguments& a, const TileCoord& p) {
  if (GROUPED_ROWS) return {0, 0};
  return matrix_of(a, a.epilogue.results.preactivation, p, p.head, 1, 1);
}
KS_DEVICE Matrix c_matrix(const Arguments& a, const TileCoord& p) {
  if (DIVIDED_C) return {0, 0};
  return matrix_of(a, a.c, p, p.head, 1, 1);
}

// The slices of K that a block of a cluster sums, of which none has none: the first, and how many.
struct Part { int first, count; };
KS_DEVICE int part_slices(int slices) { return divide_up(slices, SPLIT); }
KS_DEVICE Part part_of(int slices, int rank) {
  const int first = rank * part_slices(slices);
  return {first, min_of(part_slices(slices), slices - first)};
}
