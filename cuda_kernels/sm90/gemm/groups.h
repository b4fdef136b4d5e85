// Which tile of a grouped product is in which group. Along K each group has a matrix of its own, and its tiles are those of a batch.
// Along M the groups have as many rows of clusters as their rows need: sums over the groups before, which each block makes in shared
// memory from the offsets when it starts. A role finds the group of its next tile from that of its last: a step or two.
#pragma once
#include "gemm/groups.h"
#include "sm90/gemm/tiles.h"

constexpr int MAX_GROUPS = 1024;

// Rows of clusters of all groups before each, and of all of them.
struct GroupTable { int rows[Config::GROUPED == ALONG_M ? MAX_GROUPS + 1 : 1], warps[32]; };

// By all threads of a block, which meet at a barrier in between and at the end.
template<int THREADS>
KS_DEVICE void make_table(GroupTable& table, const Groups& groups) {
  const int each = divide_up(groups.count, THREADS), first = thread_index() * each;
  const int last = min_of(first + each, groups.count), warp = warp_index();
  int own = 0;
  for (int g = first; g < last; g++) own += divide_up(groups.size(g), Config::BM * Config::CLUSTER);
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
    before += divide_up(groups.size(g), Config::BM * Config::CLUSTER);
    if (g == groups.count - 1) table.rows[g + 1] = before;
  }
  block_barrier();
}

// A TileScheduler of tiles in groups; each thread that asks has its own.
struct GroupScheduler {
  const TileScheduler& order;  // along M its matrix is a row of tiles
  const Groups& groups;
  const GroupTable& table;
  int total;
  mutable int group = 0;  // of the last tile

  KS_DEVICE GroupScheduler(const TileScheduler& order, const Groups& groups, const GroupTable& table)
      : order(order), groups(groups), table(table),
        total(Config::GROUPED == ALONG_M ? table.rows[groups.count] * order.matrix.d : order.total) {}

  // Tiles are asked for in rising order.
  KS_DEVICE TileCoord tile(int t, int rank) const {
    if (Config::GROUPED == ALONG_K) {
      TileCoord p = order.tile(t, rank);
      p.begin = groups.begin(p.batch), p.end = p.begin + groups.size(p.batch);
      return p;
    }
    const int row_of_all = order.matrix.quotient(t);
    int step = 1;
    for (; group + step < groups.count && table.rows[group + step] <= row_of_all; step *= 2) group += step;
    for (; step; step /= 2)
      if (group + step < groups.count && table.rows[group + step] <= row_of_all) group += step;
    const int first = table.rows[group], rows = table.rows[group + 1] - first, in_group = t - first * order.matrix.d;
    // Bands of at most GROUP_ROWS rows, taken column by column, and nearly even: a band of a row or two reads all of B for them.
    const int even = divide_up(rows, divide_up(rows, GROUP_ROWS)), band = in_group / (even * order.matrix.d);
    const int in_band = in_group - band * even * order.matrix.d, high = min_of(even, rows - band * even);
    const int column = in_band / high, row = band * even + in_band - column * high, begin = groups.begin(group);
    return {begin + (row * Config::CLUSTER + rank) * Config::BM, column * Config::BN, group, 0, group, begin, begin + groups.size(group)};
  }
};

typedef conditional<Config::GROUPED != 0, GroupScheduler, TileScheduler>::type Scheduler;
