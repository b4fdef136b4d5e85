// Which tile of a grouped product is in which group. Along K each group has a matrix of its own, and its tiles are those of a batch.
// Along M the groups have as many rows of clusters as their rows need: sums over the groups before, which each block makes in shared
// memory from the offsets when it starts. A role finds the group of its next tile from that of its last: a step or two.
// So along N, in columns of tiles; a group's first tile begins up to CHUNK − 1 columns before it, where 16 bytes of B and C do.
// Of a list (BY_LIST) the sums are those of tiles, and a group's matrices have tensor maps of their own, which list_maps.h made.
#pragma once
#include "sm90/gemm/last_wave.h"

constexpr int MAX_GROUPS = 1024;

constexpr bool OF_LISTS = Config::GROUPED == BY_LIST, HAS_TABLE = Config::GROUPED == ALONG_M || Config::GROUPED == ALONG_N || OF_LISTS;
constexpr int CHUNK = 16 / min_of(sizeof(Config::T), sizeof(Config::TC));  // columns of B and C in 16 bytes, at which TMA's boxes begin

// Rows of clusters of all groups before each, and of all of them; along N columns of tiles, of lists tiles.
struct GroupTable { int rows[HAS_TABLE ? MAX_GROUPS + 1 : 1], warps[32]; };
KS_DEVICE int rows_of(const Groups& groups, int g) {
  if constexpr (OF_LISTS) return groups.tiles_of_list<Config::BM * Config::CLUSTER, Config::BN>(g);
  else if constexpr (Config::GROUPED == ALONG_N) return groups.size(g) ? divide_up(groups.begin(g) % CHUNK + groups.size(g), Config::BN) : 0;
  else return divide_up(groups.size(g), Config::BM * Config::CLUSTER);
}

// By all threads of a block, which meet at a barrier in between and at the end.
template<int THREADS>
KS_DEVICE void make_table(GroupTable& table, const Groups& groups) {
  const int each = divide_up(groups.count, THREADS), first = thread_index() * each;
  const int last = min_of(first + each, groups.count), warp = warp_index();
  int own = 0;
  for (int g = first; g < last; g++) own += rows_of(groups, g);
  int sum = own;  // of this lane and those before
#pragma unroll
  for (int d = 1; d < WARP; d *= 2) {
    const int x = shuffle_up(sum, d);
    if (lane() >= d) sum += x;
  }
  if (lane() == WARP - 1) table.warps[warp] = sum;
  block_barrier();
  int before = sum - own;
  for (int w = 0; w < warp; w++) before += table.warps[w];
  for (int g = first; g < last; g++) {
    table.rows[g] = before;
    before += rows_of(groups, g);
    if (g == groups.count - 1) table.rows[g + 1] = before;
  }
  block_barrier();
}

// A TileScheduler of tiles in groups; each thread that asks has its own.
struct GroupScheduler : LastWave {
  const TileScheduler& order;  // along M its matrix is a row of tiles, along N a column
  const Groups& groups;
  const GroupTable& table;
  mutable int group = 0;  // of the last tile

  // step: blocks, or clusters; number: which; slices: of K.
  KS_DEVICE GroupScheduler(const TileScheduler& order, const Groups& groups, const GroupTable& table, int step, int number, int slices)
      : LastWave(OF_LISTS ? table.rows[groups.count] : HAS_TABLE ? table.rows[groups.count] * order.matrix.d : order.total, 0, step, number, slices),
        order(order), groups(groups), table(table) {}

  // Tiles are asked for in rising order, but those that are cut.
  KS_DEVICE TileCoord tile(int t, int rank) const {
    if (Config::GROUPED == ALONG_K) {
      TileCoord p = order.tile(t, rank);
      p.begin = groups.begin(p.batch), p.end = p.begin + groups.size(p.batch);
      return p;
    }
    const Place at = place(t);
    if (TAIL && t >= whole) group = 0;
    t = at.tile;
    const int row_of_all = OF_LISTS ? t : order.matrix.quotient(t);
    int step = 1;
    for (; group + step < groups.count && table.rows[group + step] <= row_of_all; step *= 2) group += step;
    for (; step; step /= 2)
      if (group + step < groups.count && table.rows[group + step] <= row_of_all) group += step;
    int columns = order.matrix.d, rows = table.rows[group + 1] - table.rows[group], in_group = t - table.rows[group] * columns;
    if (Config::GROUPED == ALONG_N) columns = rows, rows = order.matrix.d;
    if constexpr (OF_LISTS) {
      columns = divide_up(groups.of_list(group, OF_N), Config::BN), rows = divide_up(groups.of_list(group, OF_M), Config::BM * Config::CLUSTER);
      in_group = t - table.rows[group];
    }
    // Bands of at most GROUP_ROWS rows, taken column by column, and nearly even: a band of a row or two reads all of B for them.
    const int even = divide_up(rows, divide_up(rows, GROUP_ROWS)), band = in_group / (even * columns);
    const int in_band = in_group - band * even * columns, high = min_of(even, rows - band * even);
    const int column = in_band / high, row = band * even + in_band - column * high;
    const int in_rows = (row * Config::CLUSTER + rank) * Config::BM, in_columns = column * Config::BN;
    if constexpr (OF_LISTS) return {in_rows, in_columns, group, 0, 0, groups.of_list(group, OF_K), groups.of_list(group, OF_M)};
    const int begin = groups.begin(group);
    if (Config::GROUPED == ALONG_N) return {in_rows, begin / CHUNK * CHUNK + in_columns, group, 0, group, begin, begin + groups.size(group)};
    return {begin + in_rows, in_columns, group, 0, group, begin, begin + groups.size(group), at.first, at.slices, at.before};
  }
};

typedef conditional<Config::GROUPED != 0, GroupScheduler, conditional<TAIL, TailScheduler, TileScheduler>::type>::type Scheduler;
