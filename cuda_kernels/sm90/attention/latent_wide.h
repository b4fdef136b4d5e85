// Latent attention's consumers where a tile has 64 rows (latent.h).
#pragma once
#include "sm90/attention/finite.h"
#include "sm90/attention/latent_tiles.h"
#include "sm90/attention/softmax.h"

// What both consumers have of the piece.
struct Consumer {
  SharedStorage& storage;
  const Operands& a;
  const List& list;
  const Ring<STAGES> (&k_rings)[2];
  const Ring<1>& q_ring;
  bool boxes, staggered;
  int warp, thread_lane;
  PipelineState<STAGES> state{0, 0};
  PipelineState<1> q_state{0, 0};

  KS_DEVICE int row(int half) const { return 16 * warp + (thread_lane >> 2) + 8 * half; }
  KS_DEVICE bool first_thread() const { return warp == 0 && thread_lane == 0; }
  KS_DEVICE void release(int part, const PipelineState<STAGES>& from) const {
    if (!first_thread()) return;
    barrier_arrive(k_rings[part].empty(from));
    if (CLUSTER > 1) barrier_arrive_at(k_rings[part].empty(from), cluster_rank() ^ 1);
  }
  // The number of a tile's stage behind, of columns from `column` on.
  KS_DEVICE u32 values(int stage, int column) const {
    return uniform(descriptor_mn_major(shared_address(storage.k[stage]) + column / 64 * PANEL_BYTES, PANEL_BYTES));
  }

  // Sets what is not finite of columns `column` on of a tile's keys from `from` on to zero: not all rows see them.
  KS_DEVICE void filter(int stage, int column, int from) const {
    char* const panels = storage.k[stage] + column / 64 * PANEL_BYTES;
#pragma unroll 1
    for (int i = 8 * max_of(from, 0) + WARP * warp + thread_lane; i < PANEL_BYTES / 16; i += 4 * WARP)
#pragma unroll
      for (int n = 0; n < OWN; n++) {
        uint4& x = ((uint4*)(panels + n * PANEL_BYTES))[i];
        x = finite_part<T>(x);
      }
    async_proxy_fence();
    named_barrier_sync(FILTERED + (column != 0), EXCHANGE / 2);
  }

  // Columns `column` on of the result, or of the state that the block leaves. o: not normalised.
  KS_DEVICE void store(const float (&o)[HALF / 2], const float (&inverse)[2], const Piece& piece, const Rows& rows, int column) const {
    const int first = column + 2 * (thread_lane & 3);
    float* const sums = a.sums + (i64)(2 * (int)block_index() + (piece.begin == 0)) * ROWS * DV;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (row(h) >= rows.count) continue;
      if (piece.whole()) {
        T* const to = a.out.at<Config::OUT_VIEW>(piece.entry, rows.head(row(h)), 0, piece.sequence.q_first)
                    + (i64)rows.query(row(h)) * a.out.row + first;
#pragma unroll
        for (int i = 0; i < HALF / 8; i++)
          *(u32*)(to + 8 * i) = pack2(o[4 * i + 2 * h] * inverse[h], o[4 * i + 2 * h + 1] * inverse[h], T());
      } else {
        float* const to = sums + row(h) * DV + first;
#pragma unroll
        for (int i = 0; i < HALF / 8; i++)
          *(float2*)(to + 8 * i) = float2{o[4 * i + 2 * h] * inverse[h], o[4 * i + 2 * h + 1] * inverse[h]};
      }
    }
  }
};

struct ScoreConsumer : Consumer {
  // Hands factors of the rows, and P where there is one, to the other consumer.
  KS_DEVICE void hand_over(const float (&factors)[2]) const {
    if ((thread_lane & 3) == 0) storage.factors[row(0)] = factors[0], storage.factors[row(1)] = factors[1];
  }
  KS_DEVICE void hand_over(const u32 (&p)[BN / 4]) const {
    const u32 to = shared_address(storage.p[0]) + (16 * warp + (thread_lane & 15)) * 128;
#pragma unroll
    for (int j = 0; j < 4; j++)
      stmatrix(to + ((2 * j + (thread_lane >> 4)) ^ (thread_lane & 7)) * 16, p[4 * j], p[4 * j + 1], p[4 * j + 2], p[4 * j + 3]);
  }

  template<int N> KS_DEVICE void start_part(float (&s)[BN / 2], bool boxed) const {
    const Ring<STAGES>& ring = k_rings[N];
    const u32 x = uniform(descriptor_k_major(shared_address(storage.q))), y = uniform(descriptor_k_major(shared_address(storage.k[state.stage])));
    ring.wait_full(state);
    if (!boxed) async_proxy_fence();  // what cp.async wrote comes before what wgmma reads
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < part_panels<N>; i++) {
      const int panel = panel_of<N>(i) * PANEL_BYTES;
      multiply_ss<T, BN, 4, PANEL_BYTES, PANEL_BYTES>(s, advanced(x, panel), advanced(y, panel), N || i);
    }
    wgmma_commit();
  }
  // As soon as the keys are there, part by part.
  KS_DEVICE void make_scores(float (&s)[BN / 2], bool boxed) const {
    start_part<0>(s, boxed);
    start_part<1>(s, boxed);
    wgmma_wait<0>();
    pin(s);
  }
  KS_DEVICE void start_products(float (&o)[HALF / 2], const u32 (&p)[BN / 4], int stage, bool add) const {
    const u32 v = values(stage, 0);
    wgmma_fence();
    multiply_rs<T, HALF, BN / 16, 2048>(o, p, v, add);
    wgmma_commit();
  }
  // S to P; the rows' references m, sums l (this thread's part) and the factor for what was summed before. `whole`: all rows see all
  // keys of the tile.
  KS_DEVICE void softmax(float (&s)[BN / 2], u32 (&p)[BN / 4], float (&m)[2], float (&l)[2], float (&correction)[2], const Pieces& pieces,
                         int tile, bool whole) const {
    if (!whole) {
      const Rows rows = pieces.rows();
      const int first = tile * BN + 2 * (thread_lane & 3);
      mask_columns(s, {0, 0}, {rows.limit(row(0)) - first, rows.limit(row(1)) - first});
    }
    float top[2], sum[2];
    row_max(s, top);
#pragma unroll
    for (int r = 0; r < 2; r++) update_reference<false>(m[r], correction[r], top[r], a.scale_log2);
    exp2_and_sum<0, BN / 2, true>(s, m, sum, Scaled{a.scale_log2});
#pragma unroll
    for (int r = 0; r < 2; r++) l[r] = l[r] * correction[r] + sum[r];
#pragma unroll
    for (int i = 0; i < BN / 4; i++) p[i] = pack2(s[2 * i], s[2 * i + 1], T());
  }

  // After the piece's last scores.
  KS_DEVICE void release_queries(bool last) {
    if (!last) return;
    if (first_thread()) barrier_arrive(q_ring.empty(q_state));
    q_state.advance();
  }

  KS_DEVICE void run(const Pieces& pieces) {
    bool more = true;
#pragma unroll 1
    while (more) {
      const int begin = pieces.now().begin, end = pieces.now().end;
      const Seen seen(pieces.rows(), boxes);
      float o[HALF / 2], s[BN / 2], m[2] = {-infinity(), -infinity()}, l[2] = {0.f, 0.f}, correction[2];
      u32 p[BN / 4];
      q_ring.wait_full(q_state);
      async_proxy_fence();
      make_scores(s, begin < seen.boxed);
      release_queries(begin + 1 == end);
      softmax(s, p, m, l, correction, pieces, begin, begin < seen.whole);
#pragma unroll 1
      for (int tile = begin; tile < end; tile++) {
        const PipelineState<STAGES> now = state;
        const bool add = tile > begin, more = tile + 1 < end;
        state.advance();
        named_barrier_sync(EMPTY, EXCHANGE);
        if (seen.differ && tile >= seen.whole) filter(now.stage, 0, pieces.rows().least() - tile * BN);
        hand_over(correction);
        hand_over(p);
        if (add) rescale(o, correction);
        // Products are not kept waiting for the next keys: their stage is the next to be loaded.
        start_products(o, p, now.stage, add);
        async_proxy_fence();
        named_barrier_arrive(FULL, EXCHANGE);
        wgmma_wait<0>();
        pin(o);
        release(0, now);
        if (more) make_scores(s, tile + 1 < seen.boxed);
        if (staggered) named_barrier_arrive(SCORES_MADE, EXCHANGE);
        if (more) {
          release_queries(tile + 2 == end);
          softmax(s, p, m, l, correction, pieces, tile + 1, tile + 1 < seen.whole);
        }
      }
      const Piece& piece = pieces.now();
      const Rows rows = pieces.rows();
      float inverse[2], lse[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float sum = quad_sum(l[r]);
        inverse[r] = sum == 0.f ? 0.f : 1.f / sum;
        lse[r] = sum == 0.f ? -infinity() : m[r] + log2_fast(sum);
      }
      named_barrier_sync(EMPTY, EXCHANGE);
      hand_over(inverse);
      named_barrier_arrive(FULL, EXCHANGE);
      store(o, inverse, piece, rows, 0);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        if ((thread_lane & 3) || row(r) >= rows.count) continue;
        if (!piece.whole()) a.sums_lse[(2 * (int)block_index() + (piece.begin == 0)) * ROWS + row(r)] = lse[r];
        else if (Config::LSE)
          a.lse.base[piece.entry * a.lse.batch + rows.head(row(r)) * a.lse.head + piece.sequence.q_first + rows.query(row(r))] =
              0.69314718056f * lse[r];
      }
      more = pieces.next();
    }
    named_barrier_sync(EMPTY, EXCHANGE);  // the other consumer's last arrival
  }
};

struct ColumnConsumer : Consumer {
  KS_DEVICE void take_over(float (&factors)[2]) const {
    named_barrier_sync(FULL, EXCHANGE);
    factors[0] = storage.factors[row(0)], factors[1] = storage.factors[row(1)];
  }
  KS_DEVICE void run(const Pieces& pieces) {
    bool more = true;
    named_barrier_arrive(EMPTY, EXCHANGE);
#pragma unroll 1
    while (more) {
      const int begin = pieces.now().begin, end = pieces.now().end;
      const Seen seen(pieces.rows(), boxes);
      float o[HALF / 2], factors[2];
#pragma unroll 1
      for (int tile = begin; tile < end; tile++) {
        take_over(factors);
        k_rings[1].wait_full(state);
        if (tile >= seen.boxed) async_proxy_fence();
        if (tile > begin) rescale(o, factors);
        if (seen.differ && tile >= seen.whole) filter(state.stage, HALF, pieces.rows().least() - tile * BN);
        if (staggered) named_barrier_sync(SCORES_MADE, EXCHANGE);
        const u32 p = uniform(descriptor_k_major(shared_address(storage.p[0]))), v = values(state.stage, HALF);
        wgmma_fence();
        multiply_ss<T, HALF, BN / 16, 4 * 32, 4 * 2048, 32, 2048, 0, 1>(o, p, v, tile > begin);
        wgmma_commit();
        wgmma_wait<0>();
        named_barrier_arrive(EMPTY, EXCHANGE);
        release(1, state);
        state.advance();
      }
      take_over(factors);
      named_barrier_arrive(EMPTY, EXCHANGE);
      store(o, factors, pieces.now(), pieces.rows(), HALF);
      more = pieces.next();
    }
  }
};
