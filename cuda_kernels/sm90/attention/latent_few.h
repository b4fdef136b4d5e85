// Latent attention's consumers where a tile has 16 rows: of few heads. Keys are the rows of products then, 64, and queries with their
// heads the columns: Sᵀ = K·Qᵀ, and Oᵀ += Kᵀ·Pᵀ: Products are those of latent_few_tiles.h or latent_few_rows.h.
//
// Two warpgroups take one tile and then the next, each with a stage of the ring, references, sums and an O of its own, which they add
// up where a piece ends: within a piece neither waits for the other. Of a row every warp has 16 keys: a tile's maxima go over the four
// warps through shared memory.
//
// Registers: 64 of O, 8 of S.
#pragma once
#include "sm90/attention/latent_few_rows.h"
#include "sm90/attention/latent_few_tiles.h"
#include "sm90/attention/softmax.h"

template<class Products> struct FewConsumer : Products {
  using FewThread::storage, FewThread::a, FewThread::q_ring, FewThread::own, FewThread::warp, FewThread::thread_lane, FewThread::row_of;
  typedef typename Products::Units Units;
  int taken = 0;               // tiles before, by both
  u32 parity = 0;
  PipelineState<1> q_state{0, 0};

  static constexpr int VALUES = FewThread::VALUES;
  enum { MET = FILTERED, HANDED = FULL, TAKEN = EMPTY };

  KS_DEVICE explicit FewConsumer(const FewThread& thread) : Products(thread) {}
  KS_DEVICE bool first_thread() const { return warp == 0 && thread_lane == 0; }
  KS_DEVICE void meet() const { named_barrier_sync(MET + own, 128); }

  // x over all keys of a tile, of which the warps have 16 each: the maximum, or the sum. `buffer`: not the one of the call before.
  template<bool SUM> KS_DEVICE void over_keys(float (&x)[4], int buffer) const {
    auto join = [](float& x, float y) { x = SUM ? x + y : maximum(x, y); };
    auto& all = storage.exchange.rows[own][buffer];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
      for (int m = 4; m < WARP; m *= 2) join(x[i], shuffle_xor(x[i], m));
      if (thread_lane < 4) all[warp][row_of(i)] = x[i];
    }
    meet();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[i] = all[0][row_of(i)];
#pragma unroll
      for (int w = 1; w < 4; w++) join(x[i], all[w][row_of(i)]);
    }
  }

  KS_DEVICE void step(float (&o)[VALUES][8], float (&m)[4], float (&l)[4], bool& add, Units& units, const Pieces& pieces, const Seen& seen, int tile,
                      bool last) {
    float s[8], top[4], correction[4];
    this->make_scores(s);
    if (tile >= seen.whole) {
      const Rows rows = pieces.rows();
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (tile * BN + this->key(i / 2 % 2) >= rows.limit(row_of(i / 4 * 2 + i % 2))) s[i] = -infinity();
    }
#pragma unroll
    for (int i = 0; i < 4; i++) top[i] = maximum(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + i % 2 + 2]);
    this->tell_units(parity);
    over_keys<false>(top, parity);
    if (last && first_thread()) barrier_arrive(q_ring.empty(q_state));
    const float grown = this->raise_units(units, parity);
    if (seen.differ && tile >= seen.whole) this->filter(pieces.rows().least() - tile * BN);
    bool rises = grown != 1.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      update_reference<false>(m[i], correction[i], top[i], a.scale_log2);
      rises = rises || correction[i] != 1.f;
      const float base = m[i] == -infinity() ? 0.f : m[i];
      float& x = s[i / 2 * 4 + i % 2];
      float& y = s[i / 2 * 4 + i % 2 + 2];
      x = exp2_fast(fmaf(x, a.scale_log2, -base)), y = exp2_fast(fmaf(y, a.scale_log2, -base));
      l[i] = l[i] * correction[i] + (x + y);
    }
    if (add && __any_sync(~0u, rises))
#pragma unroll
      for (int n = 0; n < VALUES; n++)
#pragma unroll
        for (int i = 0; i < 8; i++) o[n][i] *= correction[i / 4 * 2 + i % 2] * grown;
    this->put_weights(s, units);
    meet();
    this->multiply(o);
    add = true;
    this->release();
    parity ^= 1;
  }

  // What a row becomes, or the state that the block leaves.
  KS_DEVICE void store(const float (&o)[VALUES][8], const float (&inverse)[4], const Piece& piece, const Rows& rows) const {
    float* const sums = a.sums + (i64)(2 * (int)block_index() + (piece.begin == 0)) * ROWS * DV;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int r = row_of(j), first = j / 2 * 4 + j % 2;
      if (r >= rows.count) continue;
      if (piece.whole())
        this->put(a.out.at<Config::OUT_VIEW>(piece.entry, rows.head(r), 0, piece.sequence.q_first) + (i64)rows.query(r) * a.out.row, o, first,
                  inverse[j]);
      else this->put(sums + r * DV, o, first, inverse[j]);
    }
  }
  KS_DEVICE void finish(float (&o)[VALUES][8], float (&m)[4], float (&l)[4], const Units& units, const Pieces& pieces) const {
    Exchange& x = storage.exchange;
    over_keys<true>(l, parity);
    const int thread = WARP * warp + thread_lane;
    constexpr int EACH = VALUES / EXCHANGE_ROUNDS;
    const float unit = this->unit(units);
    if (own) {
#pragma unroll
      for (int round = 0; round < EXCHANGE_ROUNDS; round++) {
        named_barrier_sync(TAKEN, EXCHANGE);
#pragma unroll
        for (int n = 0; n < EACH; n++)
#pragma unroll
          for (int i = 0; i < 8; i++) x.o[8 * n + i][thread] = o[round * EACH + n][i] * unit;
        if (thread < 4)
#pragma unroll
          for (int i = 0; i < 4; i++) x.reference[row_of(i)] = m[i], x.sum[row_of(i)] = l[i];
        named_barrier_arrive(HANDED, EXCHANGE);
      }
      return;
    }
    named_barrier_sync(HANDED, EXCHANGE);
    float mine[4], other[4], inverse[4], lse[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float m2 = x.reference[row_of(i)], most = maximum(m[i], m2), base = most == -infinity() ? 0.f : most;
      mine[i] = exp2_fast(m[i] - base), other[i] = exp2_fast(m2 - base);
      const float sum = l[i] * mine[i] + x.sum[row_of(i)] * other[i];
      inverse[i] = sum == 0.f ? 0.f : 1.f / sum;
      lse[i] = sum == 0.f ? -infinity() : base + log2_fast(sum);
    }
#pragma unroll
    for (int round = 0; round < EXCHANGE_ROUNDS; round++) {
      if (round) named_barrier_sync(HANDED, EXCHANGE);
#pragma unroll
      for (int n = 0; n < EACH; n++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const int j = i / 4 * 2 + i % 2;
          float& to = o[round * EACH + n][i];
          to = to * (mine[j] * unit) + x.o[8 * n + i][thread] * other[j];
        }
      named_barrier_arrive(TAKEN, EXCHANGE);
    }
    const Piece& piece = pieces.now();
    const Rows rows = pieces.rows();
    store(o, inverse, piece, rows);
    if (thread < 4)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = row_of(i);
        if (r >= rows.count) continue;
        if (!piece.whole()) a.sums_lse[(2 * (int)block_index() + (piece.begin == 0)) * ROWS + r] = lse[i];
        else if (Config::LSE)
          a.lse.base[piece.entry * a.lse.batch + rows.head(r) * a.lse.head + piece.sequence.q_first + rows.query(r)] = 0.69314718056f * lse[i];
      }
  }

  KS_DEVICE void run(const Pieces& pieces) {
    bool more = true;
    if (!own) named_barrier_arrive(TAKEN, EXCHANGE);
#pragma unroll 1
    while (more) {
      const int begin = pieces.now().begin, end = pieces.now().end;
      const Seen seen(pieces.rows(), false);
      float o[VALUES][8], m[4], l[4];
      Units units;
      this->begin(units);
      bool add = false;
#pragma unroll
      for (int i = 0; i < 4; i++) m[i] = -infinity(), l[i] = 0.f;
#pragma unroll
      for (int n = 0; n < VALUES; n++)
#pragma unroll
        for (int i = 0; i < 8; i++) o[n][i] = 0.f;
      q_ring.wait_full(q_state);
      if (!BY_ROWS) async_proxy_fence();
      const int first = begin + (taken + own) % 2;
#pragma unroll 1
      for (int tile = first; tile < end; tile += 2) step(o, m, l, add, units, pieces, seen, tile, tile + 2 >= end);
      if (first >= end && first_thread()) barrier_arrive(q_ring.empty(q_state));
      q_state.advance();
      taken += end - begin;
      finish(o, m, l, units, pieces);
      more = pieces.next();
    }
    if (own) named_barrier_sync(TAKEN, EXCHANGE);  // the other consumer's last arrival
  }
};
