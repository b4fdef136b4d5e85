// A thread of a consumer: which rows of a tile it has, and where they lie.
#pragma once
#include "sm90/attention/score.h"
#include "sm90/attention/block.h"

typedef TileScore<BN> Score;

struct ConsumerThread {
  SharedStorage& storage;
  const Maps& maps;
  const Rings& rings;
  const Operands& a;
  const VisitedBlocks& visited;
  Score score;
  int group, warp, thread_lane;

  // Which rows the warpgroup has, and its first column of V.
  KS_DEVICE int row_group() const { return VALUE_PARTS == 1 ? group : group / VALUE_PARTS; }
  KS_DEVICE int first_column() const { return VALUE_PARTS == 1 ? 0 : group % VALUE_PARTS * O_COLUMNS; }
  // The warpgroup's first row; the thread's first, whose second is 8 further.
  KS_DEVICE int group_row(const WorkTile& w) const { return w.row + 64 * row_group(); }
  KS_DEVICE int thread_row(const WorkTile& w) const { return group_row(w) + 16 * warp + thread_lane / 4; }
  KS_DEVICE Scores scores_of(const WorkTile& w) const {
    const int S_q = RAGGED ? w.S_q : score.scores.S_q, S_k = RAGGED ? w.S_k : score.scores.S_k;
    if constexpr (Score::BY_ELEMENT || Config::PREFIX) return score.arguments.of(w.batch, w.head, S_q, S_k);
    Scores s = score.scores;
    s.S_q = S_q, s.S_k = S_k;
    return s;
  }
  KS_DEVICE int rows_of(const WorkTile& w) const { return (RAGGED ? w.S_q : score.scores.S_q) * GROUP_HEADS; }
  // Behind the last row of a sequence that the tile has.
  KS_DEVICE int rows_end(const WorkTile& w) const { return BM == TILE_ROWS ? rows_of(w) : min_of(rows_of(w), w.row + BM); }
  // Where a row begins, from the tile's entry and first head on.
  template<class X> KS_DEVICE i64 place_of(const Matrices<X>& x, int row) const {
    return (i64)query_of(row) * x.row + (GROUP_HEADS > 1 ? group_head_of(row) * x.head : 0);
  }
  // A tile's result: of its first head, from its sequence's first row on, from the head's first column on.
  KS_DEVICE TO* results(const WorkTile& w) const {
    return a.out.at<Config::Q_VIEW>(w.batch, w.head, 1, w.q_first) + (Config::IN_PARTS && !IN_CLUSTER ? w.part * a.out_part : 0);
  }
  // Where a row's log-sum-exp is.
  KS_DEVICE float& log_sum_exp(const WorkTile& w, int row) const {
    return a.lse.base[(Config::IN_PARTS && !IN_CLUSTER ? w.part * a.lse_part : 0) + (Config::Q_VIEW == PACKED ? 0 : w.batch * a.lse.batch) +
                      (w.head + group_head_of(row)) * a.lse.head + w.q_first + query_of(row)];
  }
  // A part's result in a cluster: a row of the tile, and its log-sum-exp in base 2.
  KS_DEVICE float* part_row(int row) const { return (float*)((char*)storage.q + row * PART_PITCH); }
  KS_DEVICE float* part_sums() const { return (float*)&storage.out; }
  typedef conditional<IN_CLUSTER, float, TO>::type Stored;
  KS_DEVICE Stored* stored_row(const WorkTile& w, int row) const {
    return IN_CLUSTER ? (Stored*)part_row(row - w.row) : (Stored*)(results(w) + place_of(a.out, row));
  }
};
