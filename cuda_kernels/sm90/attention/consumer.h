// A consumer: one warpgroup, 64 rows of every tile. run() is the loop; what it takes is in score.h (Score), keys.h (Keys, by the
// producer) and output.h (Output).
#pragma once
#include "sm90/attention/consumer_rows.h"

// A descriptor of an operand whose rows lie so many bytes from eight to the next eight: whole where a product with Block needs it, else its
// low half, as the high one is a constant.
template<int EIGHT_ROWS, class Block> KS_DEVICE auto with_rows(u32 low) {
  if constexpr (Block::TOGETHER) return whole<EIGHT_ROWS>(low);
  else return low;
}

struct Consumer : ConsumerRows {
  enum { NOT_BEGUN = -2 };
  typedef decltype(with_rows<8 * KBlock::ROW, KBlock>(0)) KOperand;
  typedef decltype(with_rows<VBlock::EIGHT_ROWS, VBlock>(0)) VOperand;

  PipelineState<STAGES> k{0, 0}, v{0, 0};
  int tile = 0;                    // tiles so far
  float o[O_COLUMNS / 2];          // the tile's accumulator, not yet normalised
  u32 p[P_REGISTERS];              // the last block's P, the A fragment of P·V
  float m[2], l[2];                // the rows' references, and this thread's part of their sums
  int block = NOT_BEGUN, row = 0;  // the tile's next block; the thread's first row
  int seen = 0;                    // where blocks are LISTED: 1 if the tile's rows see all of the next one, 2 if masks beside the band leave it whole
  bool rises = false;              // whether scores of the warp's rows were above their references
  bool nan_stored = false;         // whether the last tile's rows may have to be recomputed
  Score::Factor f;                 // of the tile's scores
  Score::Rows rows;
  Sums sums;
  const KOperand q_tiles, k_tiles;
  const VOperand v_tiles;

  KS_DEVICE explicit Consumer(const ConsumerRows& rows)
      : ConsumerRows(rows), f(factor(0)), sums(storage, group * 4 + warp, thread_lane),
        q_tiles(with_rows<8 * KBlock::ROW, KBlock>(descriptor_k_major(shared_address(storage.q) + row_group() * (Q_BOXES > 1 ? Q_BYTES : 64 * KBlock::ROW)))),
        k_tiles(with_rows<KBlock::EIGHT_ROWS, KBlock>(descriptor_k_major(shared_address(storage.k)))),
        v_tiles(with_rows<VBlock::EIGHT_ROWS, VBlock>(E4M3 ? descriptor_k_major(shared_address(storage.v.tiles))
                                                           : descriptor_mn_major(shared_address(storage.v.tiles) + first_column() / 64 * VBlock::PANEL,
                                                                                 VBlock::PANEL))) {}

  // ---- the tiles

  KS_DEVICE const WorkTile& work_tile(int index) const { return storage.work_tiles[index % WORK_SLOTS]; }
  KS_DEVICE Score::Factor factor(int index) const {
    return score.factor(Config::Q_SCALES ? storage.scales[index % WORK_SLOTS].scores : 1.f);
  }
  // A consumer skips blocks beyond its own rows' last key; in ping-pong scheduling, beyond the whole tile's.
  KS_DEVICE int first_block(const WorkTile& w) const {
    if (Config::PING_PONG || LISTED || !(Config::CAUSAL || Config::WINDOW)) return w.end - 1;
    const int end = divide_up(scores_of(w).any(query_of(group_row(w)), query_of(group_row(w) + 63)).end, BN);
    return max_of(min_of(end, w.end) - 1, w.begin);
  }

  // Where a sequence has few rows, a tile may have none for this consumer, or for one of them.
  static constexpr bool MAY_BE_IDLE = GROUP_HEADS > 1 && GROUPS > 1 && VALUE_PARTS == 1 && !IN_CLUSTER && !LISTED;
  KS_DEVICE bool idle(const WorkTile& w) const { return MAY_BE_IDLE && group_row(w) >= rows_of(w); }
  KS_DEVICE bool any_idle(const WorkTile& w) const { return MAY_BE_IDLE && w.row + 64 * (GROUPS - 1) >= rows_of(w); }

  // ---- products, and the rings that they read

  // Of tile number `index`: its queries follow from it, and so take no registers.
  KS_DEVICE static int q_stage(int index) { return index % Q_STAGES; }
  KS_DEVICE PipelineState<Q_STAGES * Q_BOXES> q_state(int index) const {
    return {q_stage(index) * Q_BOXES + (Q_BOXES > 1 ? row_group() : 0), (u32)index / Q_STAGES % 2};
  }
  KS_DEVICE void wait_q(int index) const { rings.q.wait_full(q_state(index)); }
  KS_DEVICE void release_q(int index) const { if (thread_lane == 0) barrier_arrive(rings.q.empty(q_state(index))); }
  KS_DEVICE void release_k() {
    if (thread_lane == 0) barrier_arrive(rings.k.empty(k));
    k.advance();
  }
  KS_DEVICE void release_v() {
    if (thread_lane == 0) barrier_arrive(rings.v.empty(v));
    v.advance();
  }
  KS_DEVICE void scheduler_barrier_sync() const { if (Config::PING_PONG) named_barrier_sync(SCHEDULER + group, CONSUMERS); }
  KS_DEVICE void scheduler_barrier_arrive() const { if (Config::PING_PONG) named_barrier_arrive(SCHEDULER + 1 - group, CONSUMERS); }

  // Between the wait for what threads copied and a product with it.
  static KS_DEVICE void copies_fence() { if (Keys::COPIED) async_proxy_fence(); }
  KS_DEVICE void start_qk(float (&s)[BN / 2], int index) const {
    copies_fence();
    const auto x = advanced(q_tiles, q_stage(index) * ROW_GROUPS * Q_BYTES), y = advanced(k_tiles, k.stage * K_BYTES);
    multiply_ss<T, BN, QK_COLUMNS * SIZE / 32, BOX_ROWS * KBlock::ROW, KBlock::PANEL, 32, 32, 0, 0, KBlock::ROW>(s, x, y, false);
    wgmma_commit();
  }
  KS_DEVICE void start_pv() {
    copies_fence();
    const auto y = advanced(v_tiles, v.stage * V_BYTES);
    multiply_rs<T, O_COLUMNS, BN * SIZE / 32, E4M3 ? 32 : 2 * VBlock::EIGHT_ROWS, E4M3 ? BN : 128>(o, p, y, true);
    wgmma_commit();
  }
  // S of a block, then P·V of the one before, in this consumer's turn.
  KS_DEVICE void start_both(float (&s)[BN / 2], int index) {
    scheduler_barrier_sync();
    pin(o);
    wgmma_fence();
    start_qk(s, index);
    rings.v.wait_full(v);
    start_pv();
    scheduler_barrier_arrive();
  }
  // PENDING: products that were started after S.
  template<int PENDING> KS_DEVICE void finish_qk(float (&s)[BN / 2]) const {
    wgmma_wait<PENDING>();
    pin(s);
  }
  // K of a block was read, and with the tile's first block, `begin`, its Q.
  KS_DEVICE void release_qk(int begin, int index) {
    release_k();
    if (block == begin) release_q(index);
  }
  KS_DEVICE void finish_pv() {
    wgmma_wait<0>();
    pin(o);
    release_v();
  }
  // Exponentials must precede the wait for P·V. The compiler moves them behind it, unless something before it depends on them:
  // here the address of the next barrier, through a zero that is a kernel argument.
  KS_DEVICE void wait_next_k(float (&s)[BN / 2], const float (&sum)[2], bool more) const {
    pin(s);
    const u32 zero = (__float_as_uint(sum[0]) | __float_as_uint(sum[1])) & a.zero;
    if (more) barrier_wait(rings.k.full(k) + zero, k.parity);
  }
  KS_DEVICE bool whole() const { return seen & 1; }
  // Of LISTED blocks, what the producer says of the one whose K has come.
  KS_DEVICE int arrived() const { return LISTED ? storage.k_block[k.stage] : 0; }
  // The block behind this one, as it `arrived`; `begin` - 1 behind the last. Once this one is done with.
  KS_DEVICE int following(int begin, int arrived) {
    if constexpr (!LISTED) return block - 1;
    const int next = uniform(block > begin ? arrived : 4 * (begin - 1));
    seen = next & (Score::MASK_ALONE ? 3 : 1);
    return next >> 2;
  }
  KS_DEVICE void begin_rows(const WorkTile& w) {
    row = thread_row(w);
    if constexpr (Score::BY_ELEMENT) {
      score.rows(rows, scores_of(w), row, shared_address(storage.bias.of_warp(group * 4 + warp)), thread_lane);
      rises = false;
    }
  }
  KS_DEVICE void round_p(const float (&s)[BN / 2]) { round_weights(p, s, T()); }
  KS_DEVICE void zero_sums() {
#pragma unroll
    for (int i = 0; i < O_COLUMNS / 2; i++) o[i] = 0.f;
    sums.begin();
  }

  // ---- a tile

  // Its first block alone: there is nothing to overlap it with.
  KS_DEVICE void first_step(int begin) {
    const WorkTile& w = work_tile(tile);
    begin_rows(w);
    const int mine = first_block(w);
#pragma unroll 1
    for (block = w.end - 1; block > mine; block--) {  // wait first: an earlier arrival would count for the previous phase
      rings.k.wait_full(k);
      release_k();
      rings.v.wait_full(v);
      release_v();
    }
    fetch(rows, w, block, begin);
    float s[BN / 2];
    rings.k.wait_full(k);
    wgmma_fence();
    start_qk(s, tile);
    const auto ahead = look<true>(w, block, rows, row, arrived() & 2);
    finish_qk<0>(s);
    release_qk(begin, tile);
    f = factor(tile);
    first_softmax(s, w, row, w.visited(block), m, l, f, rows, ahead);
    round_p(s);
    zero_sums();
    if (block > begin) rings.k.wait_full(k);
    block = following(begin, arrived());
    fetch(rows, w, block, begin);
  }

  // A tile without rows for this consumer: what the others read, it gives back, in its turns.
  KS_DEVICE void idle_steps() {
    const WorkTile& w = work_tile(tile);
    const int last = w.end - 1, begin = w.begin;
#pragma unroll 1
    for (int i = last; i >= begin; i--) {
      if (i < last) scheduler_barrier_sync(), scheduler_barrier_arrive();
      rings.k.wait_full(k);
      release_k();
      rings.v.wait_full(v);
      release_v();
    }
    release_q(tile);
  }

  // Issues S of a block, then P·V of the previous one; the softmax overlaps that. MAXIMA: references follow the largest scores.
  template<bool MASKED, bool MAXIMA = MASKED> KS_DEVICE void step(int begin) {
    constexpr bool EXACT = MASKED;
    const bool hides = MASKED && !(Score::MASK_ALONE && whole());
    float s[BN / 2], sum[2], rest[2], correction[2];
    Score::Ahead<EXACT> ahead;
    if (Score::MASK_ALONE && hides) ahead = look<EXACT>(work_tile(tile), block, rows, row, seen & 2);  // while the others multiply
    start_both(s, tile);
    const int from = first_key(work_tile(tile).visited(block));
    if (!Score::MASK_ALONE) ahead = look<EXACT>(work_tile(tile), block, rows, row, seen & 2);
    finish_qk<1>(s);
    release_qk(begin, tile);
    const Score::Form form = score.begin<EXACT, !(EXACT || MAXIMA)>(s, f, rows, ahead, from, hides);
    if (!LISTED) fetch(rows, work_tile(tile), block - 1, begin);
    if (const int at = work_tile(tile).visited(block); MASKED && !LISTED && may_hide(work_tile(tile), at)) hide_keys(s, work_tile(tile), row, at);
    if (MAXIMA) {
      float row_maximum[2];
      score.largest(s, row_maximum, form);
#pragma unroll
      for (int r = 0; r < 2; r++) update_reference<false, HEADROOM, RISE>(m[r], correction[r], row_maximum[r], form.c);
    }
    bool fits = score.exponentials<0, AHEAD, MAXIMA>(s, m, sum, form);
    wait_next_k(s, sum, block > begin);
    const int coming = arrived();
    int next = block - 1;
    constexpr bool EARLY_FETCH = FETCHES && !(HAS_BIAS && Config::MASK);  // both would be held across the products, and spilled
    auto go_on = [&] {
      next = following(begin, coming);
      fetch(rows, work_tile(tile), next, begin);
    };
    if constexpr (LISTED && EARLY_FETCH) go_on();
    finish_pv();
    if constexpr (LISTED && !EARLY_FETCH) go_on();
    if (MAXIMA) rescale(o, correction), sums.rescale(correction);
    if constexpr (AHEAD < BN / 2) {
      fits = score.exponentials<AHEAD, BN / 2, MAXIMA>(s, m, rest, form) && fits;
      sum[0] += rest[0], sum[1] += rest[1];
    }
    if (MAXIMA) {
      l[0] = fmaf(l[0], correction[0], sum[0]), l[1] = fmaf(l[1], correction[1], sum[1]);
      round_p(s);
    } else {
      round_p(s);
      if (!E4M3) fits = sum[0] + sum[1] < LIMIT;
      if (__builtin_expect(__any_sync(~0u, !fits), 0)) {
        rebase(s, o, m, l, sum, correction, tile, work_tile(tile).visited(block), EXACT, f, sums);
        sums.rescale(correction);
        rises = !Score::MASK_ALONE;  // whose scores rise in no way that maxima would serve
        round_p(s);
      }
      l[0] += sum[0], l[1] += sum[1];
    }
    block = next;
    sums.count(o);
  }

  // The other blocks. Unmasked are those without masked keys for the warpgroup's rows, before which each row has had a visible key.
  KS_DEVICE void other_steps(int begin) {
    const WorkTile& w = work_tile(tile);
    const KeyRange all = scores_of(w).all(query_of(group_row(w)), query_of(group_row(w) + 63));
    int unmasked_end = max_of(all.end - (Config::CAUSAL || Config::WINDOW), 0) / BN;
    if constexpr (Score::BY_ELEMENT) {
      // Behind a block whose keys some row does not see, that row may be without a reference; in steps with maxima it gets one. Of ALiBi
      // these are taken behind the diagonal, too, and where scores rose unforeseen, to the tile's end.
      int unmasked_begin = divide_up(all.begin, BN), rising = max_of(group_row(w) + scores_of(w).shift() + 1, 0) / BN;
      if (OUTWARDS) {  // by how many blocks are left: none is masked but the last, which comes first or last
        unmasked_begin = begin + (unmasked_end < w.end && w.diagonal < w.end - 1), unmasked_end = w.end;
        rising += w.end - 1 - w.diagonal;
      }
      const int last = max_of(begin, unmasked_begin);
      constexpr bool FOLLOWED = Config::IN_PARTS || DV > 128 || Config::Q_VIEW == PACKED;  // a mask alone: one more kind of step would spill
      bool maxima = any_low(m, false, w, row);
#pragma unroll 1
      while (block >= begin) {
        const bool masked = LISTED ? !whole() : block < unmasked_begin || block >= unmasked_end;
        if (Score::MASK_ALONE ? maxima || (FOLLOWED && masked) : masked && (maxima || Score::RISES)) step<true>(begin);
        else if (masked) step<true, false>(begin);
        else if (!Score::MASK_ALONE && (maxima || (Score::RISES && block >= rising))) step<false, true>(begin);
        else do step<false>(begin); while (!(Score::MAY_RISE || (HAS_BIAS && !LISTED)) && (LISTED ? whole() : block >= last));
        // Where none is low only a score_mod's scores may rise. Warps wait for each other here, so this is asked in one of four blocks.
        if (maxima || (Score::MAY_RISE && (LISTED || block % 4 == 0))) maxima = any_low(m, rises, w, row);
      }
    } else if constexpr (Config::WINDOW) {
      const int unmasked_begin = max_of(divide_up(all.begin, BN), begin);
#pragma unroll 1
      while (block >= begin) {
        if (block >= unmasked_begin && block < unmasked_end) step<false>(begin);
        else step<true>(begin);
      }
    } else {
      if constexpr (Config::CAUSAL || Config::PREFIX) {
#pragma unroll 1
        while (block >= max_of(unmasked_end, begin)) step<true>(begin);
      }
#pragma unroll 1
      while (block >= begin) step<false>(begin);
    }
  }

  KS_DEVICE bool v_filtered() const { return (FILTERS_VALUES || (E4M3 && MASKS_KEYS)) && storage.v_filtered[tile % WORK_SLOTS]; }
  KS_DEVICE void store(const WorkTile& done, const float (&inverse)[2]) {
    sums.add_to(o);
    nan_stored = Output::store(*this, o, done, inverse);
    if (!REPAIRS_APART) repair(done);
  }
  // Rare, and so in the code once, behind either way in which a tile ends; of dense rows alone, as few queries took 3 % longer, and not of e4m3,
  // of which registers would be spilled.
  static constexpr bool REPAIRS_APART = Config::EARLY && !E4M3 && !RAGGED;
  KS_DEVICE void repair(const WorkTile& done) const {
    if (__builtin_expect(nan_stored, 0)) recompute(done);
    if (__builtin_expect(v_filtered(), 0)) add_back_non_finite(done);
  }

  // The last P·V, and the results.
  KS_DEVICE void last_step() {
    const WorkTile& done = work_tile(tile);
    float inverse[2];
    block = NOT_BEGUN;
    rings.v.wait_full(v);
    pin(o);
    wgmma_fence();
    start_pv();
    constexpr bool FIRST = GROUPS == 4 && HAS_BIAS;  // no registers for both
    if (FIRST) finish_pv();
    finalize_softmax(done, tile, m, l, inverse);
    if (!FIRST) finish_pv();
    store(done, inverse);
  }

  // The same around the first block of the next tile, `w`.
  KS_DEVICE void last_step_and_first(const WorkTile& w) {
    const WorkTile& done = work_tile(tile);
    float s[BN / 2], inverse[2];
    begin_rows(w);
    fetch(rows, w, w.end - 1, w.begin);
    block = w.end - 1;
    rings.k.wait_full(k);
    Score::Ahead<true> ahead;
    if (Score::MASK_ALONE) ahead = look<true>(w, block, rows, row, arrived() & 2);
    start_both(s, tile + 1);
    if (!Score::MASK_ALONE) ahead = look<true>(w, block, rows, row, arrived() & 2);
    finalize_softmax(done, tile, m, l, inverse);
    finish_qk<1>(s);
    release_qk(w.begin, tile + 1);
    f = factor(tile + 1);
    first_softmax(s, w, row, w.visited(block), m, l, f, rows, ahead);
    wait_next_k(s, l, block > w.begin);
    block = following(w.begin, arrived());
    fetch(rows, w, block, w.begin);
    finish_pv();
    round_p(s);
    store(done, inverse);
    if (!REPAIRS_APART) zero_sums();
  }

  KS_DEVICE void run() {
    if (Config::PING_PONG && group == 0) named_barrier_arrive(SCHEDULER, CONSUMERS);
    wait_q(0);
#pragma unroll 1
    for (;; tile++) {
      const int begin = work_tile(tile).begin;
      if (work_tile(tile).end == 0) break;
      const bool idles = idle(work_tile(tile));
      if (idles) {
        idle_steps();
      } else {
        if (block == NOT_BEGUN) first_step(begin);
        other_steps(begin);
      }
      if constexpr (Config::EARLY) {
        wait_q(tile + 1);
        const WorkTile& next = work_tile(tile + 1);
        const bool goes_on = next.end != 0 && first_block(next) == next.end - 1;
        if (goes_on && !(any_idle(work_tile(tile)) || any_idle(next))) last_step_and_first(next);
        else if (!idles) last_step();
        if (REPAIRS_APART && !idles) repair(work_tile(tile));
        if (REPAIRS_APART) zero_sums();
      } else {
        if (!idles) last_step();
        wait_q(tile + 1);
      }
    }
    if (thread_lane == 0) tma_store_wait<0>();
  }
};
