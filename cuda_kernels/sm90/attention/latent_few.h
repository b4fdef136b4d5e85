// Latent attention's consumers where a tile has 16 rows: of few heads. Keys are the rows of products then, 64, and queries with their
// heads the columns: Sᵀ = K·Qᵀ, and Oᵀ += Kᵀ·Pᵀ by panels of 64 values. Tiles of 64 rows would be mostly empty.
//
// Two warpgroups take one tile and then the next, each with a stage of the ring, references, sums and an O of its own, which they add
// up where a piece ends: within a piece neither waits for the other. Of a row every warp has 16 keys: a tile's maxima go over the four
// warps through shared memory.
//
// Registers: 64 of O, 8 of S.
#pragma once
#include "sm90/attention/finite.h"
#include "sm90/attention/latent_tiles.h"
#include "sm90/attention/softmax.h"

struct FewConsumer {
  SharedStorage& storage;
  const Operands& a;
  const Ring<STAGES> (&k_rings)[2];
  const Ring<1>& q_ring;
  bool boxes;
  int own, warp, thread_lane;  // own: which of the two, and its stage
  int taken = 0;               // tiles before, by both
  u32 parity = 0;
  PipelineState<1> q_state{0, 0};

  static constexpr int VALUES = DV / 64;  // panels
  enum { MET = FILTERED, HANDED = FULL, TAKEN = EMPTY };

  // Of element i of a fragment of 16 columns, and of its four of two rows each: the row of the tile.
  KS_DEVICE int row(int i) const { return 8 * (i / 2) + 2 * (thread_lane % 4) + i % 2; }
  KS_DEVICE int key(int half) const { return 16 * warp + thread_lane / 4 + 8 * half; }
  KS_DEVICE bool first_thread() const { return warp == 0 && thread_lane == 0; }
  KS_DEVICE void meet() const { named_barrier_sync(MET + own, 128); }
  KS_DEVICE PipelineState<STAGES> state() const { return {own, parity}; }

  // x over all keys of a tile, of which the warps have 16 each: the maximum, or the sum. `buffer`: not the one of the call before.
  template<bool SUM> KS_DEVICE void over_keys(float (&x)[4], int buffer) const {
    auto join = [](float& x, float y) { x = SUM ? x + y : maximum(x, y); };
    auto& all = storage.exchange.rows[own][buffer];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
      for (int m = 4; m < WARP; m *= 2) join(x[i], shuffle_xor(x[i], m));
      if (thread_lane < 4) all[warp][row(i)] = x[i];
    }
    meet();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[i] = all[0][row(i)];
#pragma unroll
      for (int w = 1; w < 4; w++) join(x[i], all[w][row(i)]);
    }
  }

  KS_DEVICE void make_scores(float (&s)[8], bool boxed) const {
    const u32 x = uniform(descriptor_k_major(shared_address(storage.k[own]))), y = uniform(descriptor_k_major(shared_address(storage.q)));
#pragma unroll
    for (int part = 0; part < 2; part++) k_rings[part].wait_full(state());
    if (!boxed) async_proxy_fence();  // what cp.async wrote comes before what wgmma reads
    wgmma_fence();
    multiply_ss<T, 16, DQK / 16, PANEL_BYTES, QUERY_PANEL_BYTES>(s, x, y, false);
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
  }
  // Sets what is not finite of a tile's values from key `from` on to zero: not all rows see them.
  KS_DEVICE void filter(int from) const {
#pragma unroll 1
    for (int i = 8 * max_of(from, 0) + WARP * warp + thread_lane; i < PANEL_BYTES / 16; i += 4 * WARP)
#pragma unroll
      for (int n = 0; n < VALUES; n++) {
        uint4& x = ((uint4*)(storage.k[own] + n * PANEL_BYTES))[i];
        x = finite_part<T>(x);
      }
  }
  KS_DEVICE void multiply(float (&o)[VALUES][8], bool add) const {
    const u32 p = uniform(descriptor_k_major(shared_address(storage.p[own])));
    const u32 v = uniform(descriptor_mn_major(shared_address(storage.k[own]), PANEL_BYTES));
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < VALUES; n++)
      multiply_ss<T, 16, BN / 16, 4 * 2048, 4 * 32, 2048, 32, 1, 0>(o[n], advanced(v, n * PANEL_BYTES), p, add);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < VALUES; n++) pin(o[n]);
  }

  KS_DEVICE void step(float (&o)[VALUES][8], float (&m)[4], float (&l)[4], bool& add, const Pieces& pieces, const Seen& seen, int tile,
                      bool last) {
    float s[8], top[4], correction[4];
    make_scores(s, tile < seen.boxed);
    if (last && first_thread()) barrier_arrive(q_ring.empty(q_state));
    if (tile >= seen.whole) {
      const Rows rows = pieces.rows();
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (tile * BN + key(i / 2 % 2) >= rows.limit(row(i / 4 * 2 + i % 2))) s[i] = -infinity();
    }
#pragma unroll
    for (int i = 0; i < 4; i++) top[i] = maximum(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + i % 2 + 2]);
    over_keys<false>(top, parity);
    if (seen.differ && tile >= seen.whole) filter(pieces.rows().least() - tile * BN);
    bool rises = false;
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
        for (int i = 0; i < 8; i++) o[n][i] *= correction[i / 4 * 2 + i % 2];
    // Pᵀ lies along keys: fragments are stored transposed.
    const int r = thread_lane % 8, place = thread_lane / 8;
    stmatrix_transposed(shared_address(storage.p[own]) + (8 * (place / 2) + r) * 128 + ((2 * warp + place % 2) ^ r) * 16,
                        pack2(s[0], s[1], T()), pack2(s[2], s[3], T()), pack2(s[4], s[5], T()), pack2(s[6], s[7], T()));
    async_proxy_fence();
    meet();
    multiply(o, add);
    add = true;
    if (first_thread())
#pragma unroll
      for (int part = 0; part < 2; part++) barrier_arrive(k_rings[part].empty(state()));
    parity ^= 1;
  }

  // What a row becomes, or the state that the block leaves.
  KS_DEVICE void store(const float (&o)[VALUES][8], const float (&inverse)[4], const Piece& piece, const Rows& rows) const {
    float* const sums = a.sums + (i64)(2 * (int)block_index() + (piece.begin == 0)) * ROWS * DV;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int r = row(j), first = j / 2 * 4 + j % 2;
      if (r >= rows.count) continue;
      T* const to = a.out.at<Config::OUT_VIEW>(piece.entry, rows.head(r), 0, piece.sequence.q_first) + (i64)rows.query(r) * a.out.row;
#pragma unroll
      for (int n = 0; n < VALUES; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float x = o[n][first + 2 * h] * inverse[j];
          if (piece.whole()) to[64 * n + key(h)] = convert<T>(x);
          else sums[r * DV + 64 * n + key(h)] = x;
        }
    }
  }
  KS_DEVICE void finish(float (&o)[VALUES][8], float (&m)[4], float (&l)[4], const Pieces& pieces) const {
    Exchange& x = storage.exchange;
    over_keys<true>(l, parity);
    const int thread = WARP * warp + thread_lane;
    if (own) {
      named_barrier_sync(TAKEN, EXCHANGE);
#pragma unroll
      for (int n = 0; n < VALUES; n++)
#pragma unroll
        for (int i = 0; i < 8; i++) x.o[8 * n + i][thread] = o[n][i];
      if (thread < 4)
#pragma unroll
        for (int i = 0; i < 4; i++) x.reference[row(i)] = m[i], x.sum[row(i)] = l[i];
      named_barrier_arrive(HANDED, EXCHANGE);
      return;
    }
    named_barrier_sync(HANDED, EXCHANGE);
    float mine[4], other[4], inverse[4], lse[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float m2 = x.reference[row(i)], most = maximum(m[i], m2), base = most == -infinity() ? 0.f : most;
      mine[i] = exp2_fast(m[i] - base), other[i] = exp2_fast(m2 - base);
      const float sum = l[i] * mine[i] + x.sum[row(i)] * other[i];
      inverse[i] = sum == 0.f ? 0.f : 1.f / sum;
      lse[i] = sum == 0.f ? -infinity() : base + log2_fast(sum);
    }
#pragma unroll
    for (int n = 0; n < VALUES; n++)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int j = i / 4 * 2 + i % 2;
        o[n][i] = o[n][i] * mine[j] + x.o[8 * n + i][thread] * other[j];
      }
    named_barrier_arrive(TAKEN, EXCHANGE);
    const Piece& piece = pieces.now();
    const Rows rows = pieces.rows();
    store(o, inverse, piece, rows);
    if (thread < 4)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = row(i);
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
      const Seen seen(pieces.rows(), boxes);
      float o[VALUES][8], m[4], l[4];
      bool add = false;
#pragma unroll
      for (int i = 0; i < 4; i++) m[i] = -infinity(), l[i] = 0.f;
#pragma unroll
      for (int n = 0; n < VALUES; n++)
#pragma unroll
        for (int i = 0; i < 8; i++) o[n][i] = 0.f;
      q_ring.wait_full(q_state);
      async_proxy_fence();
      const int first = begin + (taken + own) % 2;
#pragma unroll 1
      for (int tile = first; tile < end; tile += 2) step(o, m, l, add, pieces, seen, tile, tile + 2 >= end);
      if (first >= end && first_thread()) barrier_arrive(q_ring.empty(q_state));
      q_state.advance();
      taken += end - begin;
      finish(o, m, l, pieces);
      more = pieces.next();
    }
    if (own) named_barrier_sync(TAKEN, EXCHANGE);  // the other consumer's last arrival
  }
};
