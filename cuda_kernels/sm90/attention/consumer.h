// A consumer: one warpgroup, 64 rows of every tile.
#pragma once
#include "sm90/attention/sums.h"
#include "sm90/attention/value_filter.h"
#include "sm90/attention/value_transpose.h"
#include "sm90/attention/recompute.h"

// A descriptor of an operand whose rows lie so many bytes from eight to the next eight: whole where a product with Block needs it, else its
// low half, as the high one is a constant.
template<int EIGHT_ROWS, class Block> KS_DEVICE auto with_rows(u32 low) {
  if constexpr (Block::TOGETHER) return whole<EIGHT_ROWS>(low);
  else return low;
}

struct Consumer {
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
    const float scale = KS_SOFTCAP ? 1.f : scores.scale_log2;
    if constexpr (!KS_Q_SCALES) return {1.f, scale};
    const float own = storage.scales[tile % WORK_SLOTS].scores, c = fabsf(own) * scale;
    if (KS_SOFTCAP) return {own, 1.f};
    if (c > 0.f) return {own < 0.f ? -1.f : 1.f, c};
    return {own * 0.f, 1.f};
  }
  static KS_DEVICE void multiply(float (&s)[BN / 2], const Factor& f) {
    if (KS_Q_SCALES && f.here != 1.f) {
#pragma unroll
      for (int i = 0; i < BN / 2; i++) s[i] *= f.here;
    }
  }

  // With a softcap, how a block's products become scores.
  KS_DEVICE CapWay cap_way(float (&s)[BN / 2]) const {
    return KS_SOFTCAP ? cap_large(s, scores.cap, scores.cap_inverse, small_cap) : DONE;
  }
  // The short polynomial serves unmasked blocks alone: elsewhere it would be code, a tenth of a kernel's, for few blocks.
  template<int FROM, int TO, bool MASKED>
  KS_DEVICE bool exponentials(float (&s)[BN / 2], const float (&m)[2], float (&sum)[2], CapWay way, float c) const {
    if (KS_SOFTCAP && way == SHORT && !MASKED) return exp2_and_sum<FROM, TO, MASKED>(s, m, sum, Capped<false>{small_cap});
    if (KS_SOFTCAP && way != DONE) return exp2_and_sum<FROM, TO, MASKED>(s, m, sum, Capped<true>{small_cap});
    return exp2_and_sum<FROM, TO, MASKED>(s, m, sum, Scaled{c});
  }
  // The rows' largest scores, where a softcap is not yet applied to products: it keeps their order.
  KS_DEVICE void top_scores(const float (&s)[BN / 2], float (&top)[2], CapWay way) const {
    row_max(s, top);
#pragma unroll
    for (int r = 0; r < 2; r++)
      if (KS_SOFTCAP && way != DONE && top[r] != -infinity()) top[r] = Capped<true>{small_cap}(top[r], 0.f);
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
    const T* const q = a.q.at<KS_Q_VIEW>(w.batch, w.head, a.num_heads, w.q_first);
    constexpr int PRODUCTS = DQK > 64 && !E4M3 && (GROUPS < 3 || DQK % 32 == 0) ? 2 : 1;  // a load, of three groups only whole ones: spills
    const int column = thread_lane % 4 * (8 / SIZE) * PRODUCTS;
    recompute_scores<T, DQK, PRODUCTS>(p, q + place_of(a.q, inside(x, rows)) + column, q + place_of(a.q, inside(x + 8, rows)) + column,
                                       a.keys.key_rows(w, opaque(block) * BN, thread_lane, column), column);
    multiply(p, f);
    if (KS_SOFTCAP) cap_scores(p, scores.cap, scores.cap_inverse);
    rebase_by_max<HEADROOM>(p, o, m, l, sum, correction, f.c);
  }

  // Adds visible non-finite values, which the filter set to zero, to the stored tile: each warp its own rows, in place. The sum
  // is NaN or inf, whatever its order, and weights that round to 0 may count.
  KS_DEVICE void add_back_non_finite(const WorkTile& w) const {
    const Scores own = scores_of(w);
    const int first = group_row(w) + 16 * warp, S_k = RAGGED ? w.S_k : scores.S_k, last_key = KS_IN_PARTS ? min_of(w.end * BN, S_k) : S_k;
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
        KS_SINKS ? in_base2(a.sinks[w.head]) : -infinity(), thread_lane};
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
      if (KS_SINKS && (!KS_IN_PARTS || w.part == 0)) {
        const float sink = in_base2(a.sinks[head]);
        top = fmaxf(m[r], sink);
        const float half = m[r] == -infinity() ? 0.f : exp2_fast(0.5f * (m[r] - top));  // a square may be subnormal
        correction = half * half;
        sum = sum * correction + (sink == -infinity() ? 0.f : exp2_fast(sink - top));
      }
      inverse[r] = sum == 0.f ? 0.f : correction / sum;
      if (KS_Q_SCALES) inverse[r] *= storage.scales[tile % WORK_SLOTS].values;
      if (KS_LSE && thread_lane % 4 == 0 && row < rows_of(w))
        a.lse.base[(KS_IN_PARTS ? w.part * a.lse_part : 0) + (KS_Q_VIEW == PACKED ? 0 : w.batch * a.lse.batch) + head * a.lse.head +
                   w.q_first + query_of(row)] =
            sum == 0.f ? -infinity() : 0.69314718056f * (top + log2_fast(sum));
    }
  }

  KS_DEVICE TO* results(const WorkTile& w) const {
    return a.out.at<KS_Q_VIEW>(w.batch, w.head, 1, w.q_first) + (KS_IN_PARTS ? w.part * a.out_part : 0);
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
    const int rows = KS_Q_VIEW == PACKED ? w.S_q - row : 16;
#pragma unroll
    for (int c = 0; c < V_COLUMNS; c += 64) {
      char* const panel = storage.out.warps[group * 4 + warp] + c / 64 % KS_OUT_STAGES * O_BYTES;
      if (c / 64 % KS_OUT_STAGES == 0) {
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
      if (KS_Q_VIEW != PACKED || rows >= 16) {
        if (lane == 0) {
          tma_store(maps.out, shared_address(panel), c, w.q_first + row, w.head, KS_Q_VIEW == PACKED ? 0 : w.batch);
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

  KS_DEVICE void run() const;
};

KS_DEVICE void Consumer::run() const {
  PipelineState<STAGES> k{0, 0}, v{0, 0};
  PipelineState<Q_STAGES> q{0, 0};
  enum { NOT_BEGUN = -2 };
  int tile = 0;          // tiles so far
  float o[V_COLUMNS / 2];  // the tile's accumulator, not yet normalised
  u32 p[P_REGISTERS];    // the last block's P, the A fragment of P·V
  float m[2], l[2];      // the rows' references, and this thread's part of their sums
  int block = NOT_BEGUN, row = 0;  // the tile's next block; the thread's first row
  Factor f = factor(0);
  Sums sums{storage, group * 4 + warp, thread_lane};

  const auto q_tiles = with_rows<8 * KBlock::ROW, KBlock>(descriptor_k_major(shared_address(storage.q[0][group])));
  const auto k_tiles = with_rows<KBlock::EIGHT_ROWS, KBlock>(descriptor_k_major(shared_address(storage.k)));
  const auto v_tiles = with_rows<VBlock::EIGHT_ROWS, VBlock>(E4M3 ? descriptor_k_major(shared_address(storage.v.tiles))
                                                                   : descriptor_mn_major(shared_address(storage.v.tiles), VBlock::PANEL));
  auto q_state = [&] { return PipelineState<Q_STAGES * GROUPS>{q.stage * GROUPS + group, q.parity}; };
  auto release_q = [&] { if (thread_lane == 0) barrier_arrive(rings.q.empty(q_state())); };
  auto start_qk = [&](float (&s)[BN / 2]) {
    const auto x = advanced(q_tiles, q.stage * GROUPS * Q_BYTES), y = advanced(k_tiles, k.stage * K_BYTES);
    multiply_ss<T, BN, QK_COLUMNS * SIZE / 32, 64 * KBlock::ROW, KBlock::PANEL, 32, 32, 0, 0, KBlock::ROW>(s, x, y, false);
    wgmma_commit();
  };
  auto start_pv = [&] {
    const auto y = advanced(v_tiles, v.stage * V_BYTES);
    multiply_rs<T, V_COLUMNS, BN * SIZE / 32, E4M3 ? 32 : 2 * VBlock::EIGHT_ROWS, E4M3 ? BN : 128>(o, p, y, true);
    wgmma_commit();
  };
  auto scheduler_barrier_sync = [&] { if (KS_TURNS) named_barrier_sync(SCHEDULER + group, CONSUMERS); };
  auto scheduler_barrier_arrive = [&] { if (KS_TURNS) named_barrier_arrive(SCHEDULER + 1 - group, CONSUMERS); };
  auto release_k = [&] {
    if (thread_lane == 0) barrier_arrive(rings.k.empty(k));
    k.advance();
  };
  auto release_v = [&] {
    if (thread_lane == 0) barrier_arrive(rings.v.empty(v));
    v.advance();
  };
  auto round_p = [&](const float (&s)[BN / 2]) { round_weights(p, s, T()); };
  auto zero_o = [&] {
#pragma unroll
    for (int i = 0; i < V_COLUMNS / 2; i++) o[i] = 0.f;
  };
  // Exponentials must precede the wait for P·V. The compiler moves them behind it, unless something before it depends on them:
  // here the address of the next barrier, through a zero that is a kernel argument.
  auto wait_next_k = [&](float (&s)[BN / 2], const float (&sum)[2], bool more) {
    pin(s);
    const u32 zero = (__float_as_uint(sum[0]) | __float_as_uint(sum[1])) & a.zero;
    if (more) barrier_wait(rings.k.full(k) + zero, k.parity);
  };
  // A consumer skips blocks beyond its own rows' last key; in ping-pong scheduling, beyond the whole tile's.
  auto first_block = [&](const WorkTile& w) {
    if (KS_TURNS || !(KS_CAUSAL || KS_WINDOW)) return w.end - 1;
    const int end = divide_up(scores_of(w).end(query_of(group_row(w) + 63)), BN);
    return max_of(min_of(end, w.end) - 1, w.begin);
  };

  if (KS_TURNS && group == 0) named_barrier_arrive(SCHEDULER, CONSUMERS);
  barrier_wait(rings.q.full(q_state()), q.parity);
#pragma unroll 1
  for (;;) {
    const int begin = storage.work_tiles[tile % WORK_SLOTS].begin;
    if (storage.work_tiles[tile % WORK_SLOTS].end == 0) break;

    if (block == NOT_BEGUN) {  // the first block: nothing to overlap with
      const WorkTile& w = storage.work_tiles[tile % WORK_SLOTS];
      row = thread_row(w);
      const int mine = first_block(w);
#pragma unroll 1
      for (block = w.end - 1; block > mine; block--) {  // wait first: an earlier arrival would count for the previous phase
        rings.k.wait_full(k);
        release_k();
        rings.v.wait_full(v);
        release_v();
      }
      float s[BN / 2];
      rings.k.wait_full(k);
      wgmma_fence();
      start_qk(s);
      wgmma_wait<0>();
      pin(s);
      release_k();
      if (block == begin) release_q();
      f = factor(tile);
      first_softmax(s, w, row, block, m, l, f);
      round_p(s);
      zero_o();
      sums.begin();
      block--;
      if (block >= begin) rings.k.wait_full(k);
    }

    // Issues S of a block, then P·V of the previous one; the softmax overlaps that.
    auto step = [&](auto masked) {
      float s[BN / 2], sum[2], rest[2], correction[2];
      scheduler_barrier_sync();
      pin(o);
      wgmma_fence();
      start_qk(s);
      rings.v.wait_full(v);
      start_pv();
      scheduler_barrier_arrive();
      wgmma_wait<1>();
      pin(s);
      release_k();
      if (block == begin) release_q();
      multiply(s, f);
      const CapWay way = cap_way(s);
      if (masked.value) {
        mask_scores(s, storage.work_tiles[tile % WORK_SLOTS], row, block);
        float row_maximum[2];
        top_scores(s, row_maximum, way);
#pragma unroll
        for (int r = 0; r < 2; r++) update_reference<false, HEADROOM, RISE>(m[r], correction[r], row_maximum[r], f.c);
      }
      bool fits = exponentials<0, AHEAD, masked.value>(s, m, sum, way, f.c);
      wait_next_k(s, sum, block > begin);
      wgmma_wait<0>();
      pin(o);
      release_v();
      if (masked.value) rescale(o, correction), sums.rescale(correction);
      if constexpr (AHEAD < BN / 2) {
        fits = exponentials<AHEAD, BN / 2, masked.value>(s, m, rest, way, f.c) && fits;
        sum[0] += rest[0], sum[1] += rest[1];
      }
      if (masked.value) {
        l[0] = fmaf(l[0], correction[0], sum[0]), l[1] = fmaf(l[1], correction[1], sum[1]);
        round_p(s);
      } else {
        round_p(s);
        if (!E4M3) fits = sum[0] + sum[1] < LIMIT;
        if (__builtin_expect(__any_sync(~0u, !fits), 0)) {
          rebase(s, o, m, l, sum, correction, tile, block, f, sums);
          sums.rescale(correction);
          round_p(s);
        }
        l[0] += sum[0], l[1] += sum[1];
      }
      block--;
      sums.count(o);
    };
    {
      // Blocks without masked keys for the warpgroup's rows, and before which each row has had a visible key.
      const WorkTile& w = storage.work_tiles[tile % WORK_SLOTS];
      const Scores own = scores_of(w);
      const int masked = KS_CAUSAL || KS_WINDOW;
      const int unmasked_end = max_of(own.all_end(query_of(group_row(w))) - masked, 0) / BN;
      const int unmasked_begin = max_of(divide_up(own.all_begin(query_of(group_row(w) + 63)), BN), begin);
      if constexpr (KS_WINDOW) {
#pragma unroll 1
        while (block >= begin) {
          if (block >= unmasked_begin && block < unmasked_end) step(Flag<false>{});
          else step(Flag<true>{});
        }
      } else {
        if constexpr (KS_CAUSAL) {
#pragma unroll 1
          while (block >= max_of(unmasked_end, begin)) step(Flag<true>{});
        }
#pragma unroll 1
        while (block >= begin) step(Flag<false>{});
      }
    }
    q.advance();

    // The tile's last P·V, and with EARLY the next tile's first block around it.
    const WorkTile& done = storage.work_tiles[tile % WORK_SLOTS];
    auto v_filtered = [&] { return (FILTERS_VALUES || (E4M3 && HAS_MASK)) && storage.v_filtered[tile % WORK_SLOTS]; };
    float inverse[2];
    if constexpr (KS_EARLY) {
      barrier_wait(rings.q.full(q_state()), q.parity);
      const WorkTile& w = storage.work_tiles[(tile + 1) % WORK_SLOTS];
      if (w.end != 0 && first_block(w) == w.end - 1) {
        float s[BN / 2];
        rings.k.wait_full(k);
        scheduler_barrier_sync();
        pin(o);
        wgmma_fence();
        start_qk(s);
        rings.v.wait_full(v);
        start_pv();
        scheduler_barrier_arrive();
        finalize_softmax(done, tile, m, l, inverse);
        wgmma_wait<1>();
        pin(s);
        block = w.end - 1;
        row = thread_row(w);
        release_k();
        if (block == w.begin) release_q();
        f = factor(tile + 1);
        first_softmax(s, w, row, block, m, l, f);
        block--;
        wait_next_k(s, l, block >= w.begin);
        const bool add_back = v_filtered();
        wgmma_wait<0>();
        pin(o);
        release_v();
        round_p(s);
        sums.add_to(o);
        if (__builtin_expect(store(o, done, inverse), 0)) recompute(done);
        if (__builtin_expect(add_back, 0)) add_back_non_finite(done);
        zero_o();
        sums.begin();
        tile++;
        continue;
      }
    }
    block = NOT_BEGUN;
    rings.v.wait_full(v);
    pin(o);
    wgmma_fence();
    start_pv();
    finalize_softmax(done, tile, m, l, inverse);
    const bool add_back = v_filtered();
    wgmma_wait<0>();
    pin(o);
    release_v();
    sums.add_to(o);
    if (__builtin_expect(store(o, done, inverse), 0)) recompute(done);
    if (__builtin_expect(add_back, 0)) add_back_non_finite(done);
    tile++;
    if (!KS_EARLY) barrier_wait(rings.q.full(q_state()), q.parity);
  }
  if (thread_lane == 0) tma_store_wait<0>();
}
