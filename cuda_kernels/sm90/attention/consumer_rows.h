// What a consumer does with its 64 rows of a tile: masks, softmax, what is rare, and results.
#pragma once
#include "sm90/attention/sums.h"
#include "sm90/attention/value_filter.h"
#include "sm90/attention/value_transpose.h"
#include "sm90/attention/recompute.h"

struct ConsumerRows {
  SharedStorage& storage;
  const Maps& maps;
  const Rings& rings;
  const Operands& a;
  Scores scores;
  const SmallCap& small_cap;
  int group, warp, thread_lane;

  // The warpgroup's first row; the thread's first, whose second is 8 further.
  KS_DEVICE int group_row(const WorkTile& w) const { return w.row + 64 * group; }
  KS_DEVICE int thread_row(const WorkTile& w) const { return group_row(w) + 16 * warp + thread_lane / 4; }
  KS_DEVICE Scores scores_of(const WorkTile& w) const {
    Scores s = scores;
    if (RAGGED) s.S_q = w.S_q, s.S_k = w.S_k;
    return s;
  }
  KS_DEVICE int rows_of(const WorkTile& w) const { return (RAGGED ? w.S_q : scores.S_q) * GROUP_HEADS; }
  // Where a row begins, from the tile's entry and first head on.
  template<class X> KS_DEVICE i64 place_of(const Matrices<X>& x, int row) const {
    return (i64)query_of(row) * x.row + (GROUP_HEADS > 1 ? group_head_of(row) * x.head : 0);
  }
  // What a tile's scores are multiplied by: here, in place, where that is no factor above 0; else in the exponential.
  struct Factor { float here, c; };
  KS_DEVICE Factor factor(int tile) const {
    const float scale = Config::SOFTCAP ? 1.f : scores.scale_log2;
    if constexpr (!Config::Q_SCALES) return {1.f, scale};
    const float own = storage.scales[tile % WORK_SLOTS].scores, c = fabsf(own) * scale;
    if (Config::SOFTCAP) return {own, 1.f};
    if (c > 0.f) return {own < 0.f ? -1.f : 1.f, c};
    return {own * 0.f, 1.f};
  }
  static KS_DEVICE void multiply(float (&s)[BN / 2], const Factor& f) {
    if (Config::Q_SCALES && f.here != 1.f) {
#pragma unroll
      for (int i = 0; i < BN / 2; i++) s[i] *= f.here;
    }
  }

  // With a softcap, how a block's products become scores.
  KS_DEVICE CapWay cap_way(float (&s)[BN / 2]) const {
    return Config::SOFTCAP ? cap_large(s, scores.cap, scores.cap_inverse, small_cap) : DONE;
  }
  // The short polynomial serves unmasked blocks alone: elsewhere it would be code, a tenth of a kernel's, for few blocks.
  template<int FROM, int TO, bool MASKED>
  KS_DEVICE bool exponentials(float (&s)[BN / 2], const float (&m)[2], float (&sum)[2], CapWay way, float c) const {
    if (Config::SOFTCAP && way == SHORT && !MASKED) return exp2_and_sum<FROM, TO, MASKED>(s, m, sum, Capped<false>{small_cap});
    if (Config::SOFTCAP && way != DONE) return exp2_and_sum<FROM, TO, MASKED>(s, m, sum, Capped<true>{small_cap});
    return exp2_and_sum<FROM, TO, MASKED>(s, m, sum, Scaled{c});
  }
  // The rows' largest scores, where a softcap is not yet applied to products: it keeps their order.
  KS_DEVICE void top_scores(const float (&s)[BN / 2], float (&top)[2], CapWay way) const {
    row_max(s, top);
#pragma unroll
    for (int r = 0; r < 2; r++)
      if (Config::SOFTCAP && way != DONE && top[r] != -infinity()) top[r] = Capped<true>{small_cap}(top[r], 0.f);
  }

  // Masks a block's scores of the thread's rows.
  KS_DEVICE void mask_scores(float (&s)[BN / 2], const WorkTile& w, int row, int block) const {
    const Scores own = scores_of(w);
    const int from = block * BN + thread_lane % 4 * 2;
    const int x = query_of(row), y = query_of(row + 8);
    const int low[2] = {own.band_begin(x) - from, own.band_begin(y) - from};
    const int high[2] = {own.band_end(x) - from, own.band_end(y) - from};
    mask_columns(s, low, high);
  }

  // Softmax of a tile's first block.
  KS_DEVICE void first_softmax(float (&s)[BN / 2], const WorkTile& w, int row, int block, float (&m)[2], float (&l)[2],
                               const Factor& f) const {
    multiply(s, f);
    const CapWay way = cap_way(s);
    if (HAS_MASK || (block + 1) * BN > scores.S_k) mask_scores(s, w, row, block);
    float row_maximum[2], correction[2];
    top_scores(s, row_maximum, way);
#pragma unroll
    for (int r = 0; r < 2; r++) update_reference<true, HEADROOM>(m[r], correction[r], row_maximum[r], f.c);
    exponentials<0, BN / 2, true>(s, m, l, way, f.c);
  }

  // Rare: moves p, O, m, l and the block's sums to a reference at which none overflows. Of e4m3, the factor of earlier sums is
  // `correction`.
  KS_DEVICE void rebase(float (&p)[BN / 2], float (&o)[V_COLUMNS / 2], float (&m)[2], float (&l)[2], float (&sum)[2], float (&correction)[2],
                        int tile, int block, const Factor& f, Sums& sums) const {
    if (__all_sync(~0u, sum[0] + sum[1] < LARGEST_SUM)) {
      if constexpr (E4M3) rebase_by_largest<HEADROOM>(p, o, m, l, sum, correction);
      else rebase_by_sums<LEAD>(p, o, m, l, sum);
      return;
    }
    if constexpr (E4M3 && GROUPS == 3) sums.take(o);  // of three consumers a thread has registers for scores or O, not for both
    const WorkTile& w = storage.work_tiles[opaque(tile) % WORK_SLOTS];
    const int x = opaque(thread_row(w)), rows = rows_of(w);
    const T* const q = a.q.at<Config::Q_VIEW>(w.batch, w.head, a.num_heads, w.q_first);
    constexpr int PRODUCTS = DQK > 64 && !E4M3 && (GROUPS < 3 || DQK % 32 == 0) ? 2 : 1;  // a load, of three groups only whole ones: spills
    const int column = thread_lane % 4 * (8 / SIZE) * PRODUCTS;
    recompute_scores<T, DQK, PRODUCTS>(p, q + place_of(a.q, inside(x, rows)) + column, q + place_of(a.q, inside(x + 8, rows)) + column,
                                       a.keys.key_rows(w, opaque(block) * BN, thread_lane, column), column);
    multiply(p, f);
    if (Config::SOFTCAP) cap_scores(p, scores.cap, scores.cap_inverse);
    rebase_by_max<HEADROOM>(p, o, m, l, sum, correction, f.c);
  }

  // Adds visible non-finite values, which the filter set to zero, to the stored tile: each warp its own rows, in place. The sum
  // is NaN or inf, whatever its order, and weights that round to 0 may count.
  KS_DEVICE void add_back_non_finite(const WorkTile& w) const {
    const Scores own = scores_of(w);
    const int first = group_row(w) + 16 * warp, S_k = RAGGED ? w.S_k : scores.S_k, last_key = Config::IN_PARTS ? min_of(w.end * BN, S_k) : S_k;
    const auto v = a.keys.values(w);
    TO* const to = results(w);
    if (thread_lane == 0) tma_store_wait<0>();
    warp_barrier();
#pragma unroll 1
    for (int row = first; row < min_of(first + 16, rows_of(w)); row++) {
      const int query = query_of(row);
#pragma unroll 1
      for (int d = thread_lane; d < DV; d += WARP) {
        float x = 0.f;
#pragma unroll 1
        for (int key = max_of(own.band_begin(query), w.begin * BN); key < min_of(own.band_end(query), last_key); key++) {
          const float y = to_sum(v.row(key)[d]);
          if (!finite(y)) x += y;
        }
        TO& place = to[place_of(a.out, row) + d];
        if (x != 0.f) place = convert<TO>(to_sum(place) + x);
      }
    }
  }

  // Recomputes the warp's rows of a stored tile, where their NaN may come from masked keys.
  KS_DEVICE void recompute(const WorkTile& w) const {
    const int first = group_row(w) + 16 * warp, end = min_of(first + 16, scores.S_q);
    if (thread_lane == 0) tma_store_wait<0>();
    warp_barrier();
    const Recompute rows{
        a.q.at<STRIDED>(w.batch, w.head, a.num_heads, 0),
        a.keys.k.at<STRIDED>(w.batch, w.kv_head, 1, 0),
        a.keys.v.at<STRIDED>(w.batch, w.kv_head, 1, 0),
        a.out.at<STRIDED>(w.batch, w.head, 1, 0),
        a.q.row, a.keys.k.row, a.keys.v.row, a.out.row, scores.scale_log2, scores.cap, scores.cap_inverse,
        Config::SINKS ? in_base2(a.sinks[w.head]) : -infinity(), thread_lane};
    if (rows.finite_values(w.begin * BN, scores.band_begin(end - 1)) &&
        rows.finite_values(scores.band_end(first), min_of(w.end * BN, scores.S_k)))
      return;
#pragma unroll 1
    for (int row = first; row < end; row++) rows.row(row, scores.band_begin(row), scores.band_end(row));
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
      if (Config::Q_SCALES) inverse[r] *= storage.scales[tile % WORK_SLOTS].values;
      if (Config::LSE && thread_lane % 4 == 0 && row < rows_of(w))
        a.lse.base[(Config::IN_PARTS ? w.part * a.lse_part : 0) + (Config::Q_VIEW == PACKED ? 0 : w.batch * a.lse.batch) + head * a.lse.head +
                   w.q_first + query_of(row)] =
            sum == 0.f ? -infinity() : 0.69314718056f * (top + log2_fast(sum));
    }
  }

  KS_DEVICE TO* results(const WorkTile& w) const {
    return a.out.at<Config::Q_VIEW>(w.batch, w.head, 1, w.q_first) + (Config::IN_PARTS ? w.part * a.out_part : 0);
  }

  static KS_DEVICE void store_pair(float* to, float x, float y) { *(float2*)to = float2{x, y}; }
  template<class X> static KS_DEVICE void store_pair(X* to, float x, float y) { *(u32*)to = pack2(x, y, X()); }

  // Epilogue of few queries: each thread stores its part of its two rows.
  KS_DEVICE void store_rows(const float (&o)[V_COLUMNS / 2], const WorkTile& w, const float (&inverse)[2]) const {
    const int first = thread_row(w), rows = rows_of(w);
    TO* const to = results(w) + thread_lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if (first + 8 * r >= rows) break;
      TO* const row = to + place_of(a.out, first + 8 * r);
#pragma unroll
      for (int c = 0; c < DV / 8; c++) store_pair(row + 8 * c, o[4 * c + 2 * r] * inverse[r], o[4 * c + 2 * r + 1] * inverse[r]);
    }
  }

  // Epilogue: O through shared memory to global, panel by panel, each warp its own 16 rows. TMA does not write rows beyond a
  // dense tensor's last; a packed sequence's last rows are stored by the threads, as the next sequence follows them. Returns
  // whether there is a NaN that may have to be recomputed.
  KS_DEVICE bool store(const float (&o)[V_COLUMNS / 2], const WorkTile& w, const float (&inverse)[2]) const {
    if constexpr (BY_ROWS) {
      store_rows(o, w, inverse);
      return false;
    } else {
      return store_panels(o, w, inverse);
    }
  }
  template<class X = TO> KS_DEVICE bool store_panels(const float (&o)[V_COLUMNS / 2], const WorkTile& w, const float (&inverse)[2]) const {
    u32 most = 0;
    const int row = group_row(w) + 16 * warp, lane = thread_lane;
    const int rows = Config::Q_VIEW == PACKED ? w.S_q - row : 16;
#pragma unroll
    for (int c = 0; c < V_COLUMNS; c += 64) {
      char* const panel = storage.out.warps[group * 4 + warp] + c / 64 % Config::OUT_STAGES * O_BYTES;
      if (c / 64 % Config::OUT_STAGES == 0) {
        if (lane == 0) tma_store_wait_read<0>();
        warp_barrier();
      }
      const u32 line = shared_address(panel) + lane % 16 * 128;
#pragma unroll
      for (int chunk = 0; chunk < min_of(V_COLUMNS - c, 64) / 8; chunk += 2) {
        const float* const x = o + c / 2 + chunk * 4;
        const uint4 y{pack2(x[0] * inverse[0], x[1] * inverse[0], X()), pack2(x[2] * inverse[1], x[3] * inverse[1], X()),
                      pack2(x[4] * inverse[0], x[5] * inverse[0], X()), pack2(x[6] * inverse[1], x[7] * inverse[1], X())};
        stmatrix(line + ((chunk + lane / 16) ^ lane % 8) * 16, y.x, y.y, y.z, y.w);
        if (RECOMPUTES) most = max_magnitude(most, y);
      }
      async_proxy_fence();
      warp_barrier();
      if (Config::Q_VIEW != PACKED || rows >= 16) {
        if (lane == 0) {
          tma_store(maps.out, shared_address(panel), c, w.q_first + row, w.head, Config::Q_VIEW == PACKED ? 0 : w.batch);
          tma_store_commit();
        }
      } else {
        TO* const to = a.out.base + (i64)(w.q_first + row) * a.out.row + w.head * a.out.head + c;
        const int chunks = min_of(DV - c, 64) / 8;
#pragma unroll 1
        for (int i = lane; i < rows * chunks; i += WARP) {
          const int r = i / chunks, chunk = i % chunks;
          *(uint4*)(to + (i64)r * a.out.row + chunk * 8) = *(const uint4*)(panel + r * 128 + (chunk ^ r % 8) * 16);
        }
        warp_barrier();
      }
    }
    return RECOMPUTES && __any_sync(~0u, has_nan(most));
  }
};
