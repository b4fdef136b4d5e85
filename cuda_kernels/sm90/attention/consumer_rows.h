// What a consumer does with its 64 rows of a tile beside the loop's steps: a first block's softmax, what is rare, and the rows' sums.
#pragma once
#include "sm90/attention/output.h"
#include "sm90/attention/recompute.h"
#include "sm90/attention/sums.h"
#include "sm90/attention/value_filter.h"
#include "sm90/attention/value_transpose.h"

struct ConsumerRows : ConsumerThread {
  KS_DEVICE void hide_keys(float (&s)[BN / 2], const WorkTile& w, int row, int block) const {
    score.hide(s, scores_of(w), query_of(row), query_of(row + 8), first_key(block));
  }

  // The key of the thread's first column.
  KS_DEVICE int first_key(int block) const { return block * BN + thread_lane % 4 * 2; }

  // Whether keys of a block may be outside of a query's band.
  KS_DEVICE bool may_hide(const WorkTile& w, int block) const {
    if (MASKS_KEYS && !LISTED) return true;
    const KeyRange all = scores_of(w).all_of_band(query_of(group_row(w)), query_of(group_row(w) + 63));
    return block * BN < all.begin || (block + 1) * BN > all.end;
  }
  // Whether a row of the warpgroup has seen no key yet, or such alone as lie so low that they are no reference to others. As one value,
  // so that products are in no divergent path.
  KS_DEVICE bool any_low(const float (&m)[2], bool other, const WorkTile& w, int row) const {
    constexpr float LOWEST = -1e37f;
    const int end = rows_end(w);
    const bool low = (m[0] < LOWEST && row < end) || (m[1] < LOWEST && row + 8 < end);
    return uniform((int)named_barrier_any(LOW + group, 128, low || other)) != 0;
  }
  // What a block that comes takes from memory beside its keys: a bias, and what rows see.
  static constexpr bool FETCHES = HAS_BIAS || Config::MASK;
  KS_DEVICE void fetch(Score::Rows& rows, const WorkTile& w, int block, int begin) const {
    if (block < begin) return;
    if (Config::MASK) score.see(rows, visited.mask_rows<BM>(visited.of(w.batch, w.head, w.row / BM), block) + (thread_row(w) - w.row), thread_lane);
    if constexpr (HAS_BIAS) score.copy_bias(rows, scores_of(w), group_row(w) + 16 * warp, block * BN, thread_lane);
  }

  // What is known of a block before its products have come: of listed ones all that its rows see. `whole`: as masks beside the band leave it.
  template<bool EXACT> KS_DEVICE Score::Ahead<EXACT> look(const WorkTile& w, int left, const Score::Rows& rows, int row, bool whole) const {
    const int block = w.visited(left), from = first_key(block);
    auto ahead = score.ahead<EXACT>(rows, from, whole);
    if constexpr (EXACT && LISTED)
      if (may_hide(w, block)) score.narrow(ahead.sight, scores_of(w), query_of(row), query_of(row + 8), from);
    return ahead;
  }

  // Softmax of a tile's first block.
  KS_DEVICE void first_softmax(float (&s)[BN / 2], const WorkTile& w, int row, int block, float (&m)[2], float (&l)[2],
                               const Score::Factor& f, const Score::Rows& rows, const Score::Ahead<true>& ahead) const {
    const Score::Form form = score.begin<true>(s, f, rows, ahead, first_key(block));
    if (!LISTED && may_hide(w, block)) hide_keys(s, w, row, block);
    float row_maximum[2], correction[2];
    score.largest(s, row_maximum, form);
#pragma unroll
    for (int r = 0; r < 2; r++) update_reference<true, HEADROOM>(m[r], correction[r], row_maximum[r], form.c);
    score.exponentials<0, BN / 2, true>(s, m, l, form);
  }

  // Rare: moves p, O, m, l and the block's sums to a reference at which none overflows. Of e4m3, the factor of earlier sums is
  // `correction`.
  KS_DEVICE void rebase(float (&p)[BN / 2], float (&o)[O_COLUMNS / 2], float (&m)[2], float (&l)[2], float (&sum)[2], float (&correction)[2],
                        int tile, int block, bool masked, const Score::Factor& f, Sums& sums) const {
    if (__all_sync(~0u, sum[0] + sum[1] < LARGEST_SUM)) {
      if constexpr (E4M3) rebase_by_largest<HEADROOM>(p, o, m, l, sum, correction);
      else rebase_by_sums<LEAD>(p, o, m, l, sum);
      return;
    }
    if constexpr (E4M3 && GROUPS == 3) sums.take(o);  // of three consumers a thread has registers for scores or O, not for both
    const WorkTile& w = storage.work_tiles[opaque(tile) % WORK_SLOTS];
    const int x = opaque(thread_row(w)), end = rows_end(w);
    const T* const q = a.q.at<Config::Q_VIEW>(w.batch, w.head, a.num_heads, w.q_first);
    constexpr int PRODUCTS = DQK > 64 && !E4M3 && (GROUPS < 3 || DQK % 32 == 0) ? 2 : 1;  // a load, of three groups only whole ones: spills
    const int column = thread_lane % 4 * (8 / SIZE) * PRODUCTS;
    recompute_scores<T, DQK, PRODUCTS>(p, q + place_of(a.q, inside(x, end)) + column, q + place_of(a.q, inside(x + 8, end)) + column,
                                       a.keys.key_rows(w, opaque(block) * BN, thread_lane, column), column);
    score.apply(p, f, scores_of(w), x, first_key(opaque(block)));
    if (masked) score.hide_each(p, scores_of(w), x, first_key(opaque(block)));
    rebase_by_max<HEADROOM>(p, o, m, l, sum, correction, f.c);
  }

  // Adds visible non-finite values, which the filter set to zero, to the stored tile: each warp its own rows, in place. The sum
  // is NaN or inf, whatever its order, and weights that round to 0 may count.
  KS_DEVICE void add_back_non_finite(const WorkTile& w) const {
    const Scores own = scores_of(w);
    const int first = group_row(w) + 16 * warp, S_k = RAGGED ? w.S_k : score.scores.S_k, last_key = Config::IN_PARTS ? min_of(w.end * BN, S_k) : S_k;
    const auto v = a.keys.values(w);
    if (thread_lane == 0) tma_store_wait<0>();
    warp_barrier();
#pragma unroll 1
    for (int row = first; row < min_of(first + 16, rows_end(w)); row++) {
      Stored* const to = stored_row(w, row);
      const int query = query_of(row);
      const KeyRange keys = own.any(query, query);
#pragma unroll 1
      for (int d = first_column() + thread_lane; d < min_of(first_column() + O_COLUMNS, DV); d += WARP) {
        float x = 0.f;
#pragma unroll 1
        for (int key = max_of(keys.begin, w.begin * BN); key < min_of(keys.end, last_key); key++) {
          const float y = to_sum(v.row(key)[d]);
          if (!finite(y) && (Scores::BANDED || own.visible(group_head_of(row), query, key))) x += y;
        }
        if (x != 0.f) to[d] = convert<Stored>(to_sum(to[d]) + x);
      }
    }
  }

  // Recomputes the warp's rows of a stored tile, where their NaN may come from masked keys.
  KS_DEVICE void recompute(const WorkTile& w) const {
    const Scores scores = scores_of(w);
    const int first = group_row(w) + 16 * warp, end = min_of(first + 16, scores.S_q);
    if (thread_lane == 0) tma_store_wait<0>();
    warp_barrier();
    const Recompute rows{
        a.q.at<STRIDED>(w.batch, w.head, a.num_heads, 0),
        a.keys.k.at<STRIDED>(w.batch, w.kv_head, 1, 0),
        a.keys.v.at<STRIDED>(w.batch, w.kv_head, 1, 0),
        a.out.at<STRIDED>(w.batch, w.head, 1, 0),
        a.q.row, a.keys.k.row, a.keys.v.row, a.out.row, scores,
        Config::SINKS ? in_base2(a.sinks[w.head]) : -infinity(), thread_lane};
    const KeyRange all = Scores::BANDED ? scores.all(first, end - 1) : KeyRange{0, 0};
    if (rows.finite_values(w.begin * BN, all.begin) && rows.finite_values(all.end, min_of(w.end * BN, scores.S_k))) return;
#pragma unroll 1
    for (int row = first; row < end; row++) rows.row(row, scores.any(row, row));
  }

  // Reduces the rows' sums: writes LSE, returns the factor for O.
  KS_DEVICE void finalize_softmax(const WorkTile& w, int tile, float (&m)[2], float (&l)[2], float (&inverse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = thread_row(w) + 8 * r, head = w.head + group_head_of(row);
      float sum = quad_sum(l[r]), top = m[r], correction = 1.f;
      if (Config::SINKS && (!Config::IN_PARTS || w.part == 0)) {
        const float sink = in_base2(a.sinks[head]);
        top = fmaxf(m[r], sink);
        const float half = m[r] == -infinity() ? 0.f : exp2_fast(0.5f * (m[r] - top));  // a square may be subnormal
        correction = half * half;
        sum = sum * correction + (sink == -infinity() ? 0.f : exp2_fast(sink - top));
      }
      inverse[r] = sum == 0.f ? 0.f : correction / sum;
      const bool own = first_column() == 0 && thread_lane % 4 == 0;
      if (IN_CLUSTER) {
        if (own) part_sums()[row - w.row] = sum == 0.f ? -infinity() : top + log2_fast(sum);
      } else if (Config::LSE && own && row < rows_end(w)) {
        log_sum_exp(w, row) = sum == 0.f ? -infinity() : 0.69314718056f * (top + log2_fast(sum));
      }
    }
    if constexpr (Config::Q_SCALES) {  // not before: it would be kept in memory meanwhile
      const float values = storage.scales[opaque(tile) % WORK_SLOTS].values;
      inverse[0] *= values, inverse[1] *= values;
      pin(inverse);
    }
  }
};
