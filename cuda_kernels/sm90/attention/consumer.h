// A consumer: one warpgroup, 64 rows of every tile.
#pragma once
#include "sm90/attention/consumer_rows.h"

// A descriptor of an operand whose rows lie so many bytes from eight to the next eight: whole where a product with Block needs it, else its
// low half, as the high one is a constant.
template<int EIGHT_ROWS, class Block> KS_DEVICE auto with_rows(u32 low) {
  if constexpr (Block::TOGETHER) return whole<EIGHT_ROWS>(low);
  else return low;
}

struct Consumer : ConsumerRows {
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
  auto scheduler_barrier_sync = [&] { if (Config::TURNS) named_barrier_sync(SCHEDULER + group, CONSUMERS); };
  auto scheduler_barrier_arrive = [&] { if (Config::TURNS) named_barrier_arrive(SCHEDULER + 1 - group, CONSUMERS); };
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
    if (Config::TURNS || !(Config::CAUSAL || Config::WINDOW)) return w.end - 1;
    const int end = divide_up(scores_of(w).end(query_of(group_row(w) + 63)), BN);
    return max_of(min_of(end, w.end) - 1, w.begin);
  };

  if (Config::TURNS && group == 0) named_barrier_arrive(SCHEDULER, CONSUMERS);
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
      const int masked = Config::CAUSAL || Config::WINDOW;
      const int unmasked_end = max_of(own.all_end(query_of(group_row(w))) - masked, 0) / BN;
      const int unmasked_begin = max_of(divide_up(own.all_begin(query_of(group_row(w) + 63)), BN), begin);
      if constexpr (Config::WINDOW) {
#pragma unroll 1
        while (block >= begin) {
          if (block >= unmasked_begin && block < unmasked_end) step(Flag<false>{});
          else step(Flag<true>{});
        }
      } else {
        if constexpr (Config::CAUSAL) {
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
    if constexpr (Config::EARLY) {
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
    if (!Config::EARLY) barrier_wait(rings.q.full(q_state()), q.parity);
  }
  if (thread_lane == 0) tma_store_wait<0>();
}
