// A consumer: one warpgroup, 64 keys of every tile.
#pragma once
#include "sm90/attention/backward/block.h"
#include "sm90/attention/backward/fragments.h"

struct Consumer {
  SharedStorage& storage;
  const Maps& maps;
  const Rings& rings;
  const Operands& a;
  const Sequences& sequences;
  const TileCount& count;
  const ScoreArguments& score;
  Band band;
  float scale;
  int group, warp, thread_lane;

  template<int ROWS, int COLUMNS> KS_DEVICE void zero(char* tile, int from) const {
    zero_rows<ROWS, COLUMNS>(tile, from, 1 + group, warp, thread_lane);
  }
  // A gradient, through this warp's rows of V.
  template<int DIM, int COLUMNS>
  KS_DEVICE void store(const float (&x)[COLUMNS / 2], float by, const WorkTile& w, int stage, const TensorMap& map, const Matrices<T>& to) const {
    const int first = RECOMPUTES_ADDRESSES ? warp_index() * 16 : group * 64 + warp * 16;  // which keeps `group` through the steps
    store_gradient<T, KEYS, DIM, COLUMNS>(x, by, storage.v[stage], first, w.tile * KEYS + first, w, map, to, thread_lane);
  }

  // COLUMNS: of this consumer's piece of dq.
  template<int COLUMNS> KS_DEVICE void run() const;
};

template<int COLUMNS> KS_DEVICE void Consumer::run() const {
  PipelineState<KV_STAGES> kv{0, 0};
  PipelineState<STAGES> q{0, 0};
  PipelineState<O_STAGES> own_o{0, 0};
  // Where ds is written next. With two stages that is where ds of the step before the last written lies, with its parity.
  PipelineState<DS_STAGES> ds_out{0, 1};
  const int lane = thread_lane;
  const float c = Config::SOFTCAP ? score.cap : score.scale_log2;

  const u64 q_k_major = whole(descriptor_k_major(shared_address(storage.q)));
  const u64 q_mn_major = whole(descriptor_mn_major(shared_address(storage.q), STEP * 128));
  const u64 o_k_major = whole(descriptor_k_major(shared_address(storage.dout)));
  const u64 o_mn_major = whole(descriptor_mn_major(shared_address(storage.dout), STEP * 128));
  const u64 ds_tiles = whole(descriptor_mn_major(shared_address(storage.ds) + group / PANELS * 64 * 128, 64 * 128));
  const u32 ds_rows = shared_address(storage.ds) + group * DS_BYTES + warp * 16 * 128 + matrix_row(lane) + matrix_chunk(0, lane);
  const u32 lse_rows = shared_address(storage.lse) + lane % 4 * 8;
  constexpr int DELTA = sizeof(storage.lse);  // from the values of lse to those of delta
  // With as many stages of dout as of q, one state serves both.
  auto o = [&]() -> PipelineState<O_STAGES> {
    if constexpr (O_STAGES == STAGES) return {q.stage, q.parity};
    else return own_o;
  };

#pragma unroll 1
  for (;;) {
    rings.k.wait_full(kv);
    const WorkTile& w = storage.work_tiles[work_slot<KV_STAGES>({kv.stage, kv.parity ^ 1})];
    if (w.steps < 0) break;
    const int group = (LISTED || Config::PREFIX) && RECOMPUTES_ADDRESSES ? warp_index() / 4 : this->group;  // not kept from tile to tile
    const int shift = w.S_k - w.S_q, key0 = w.tile * KEYS + group * 64;
    const bool tail = key0 + 64 > w.S_k;
    if (RAGGED_KEYS && (w.tile + 1) * KEYS > w.S_k) {
      rings.v.wait_full(kv);
      zero<KEYS, QK_COLUMNS>(storage.k[kv.stage], w.S_k - w.tile * KEYS);
      zero<KEYS, V_COLUMNS>(storage.v[kv.stage], w.S_k - w.tile * KEYS);
    }
    const u64 k_k_major = whole(descriptor_k_major(shared_address(storage.k[kv.stage]) + group * 64 * 128));
    const u64 v_k_major = whole(descriptor_k_major(shared_address(storage.v[kv.stage]) + group * 64 * 128));
    const u64 k_mn_major = whole(descriptor_mn_major(shared_address(storage.k[kv.stage]) + group % PANELS * KEYS * 128, KEYS * 128));

    float dk[QK_COLUMNS / 2], dv[V_COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < QK_COLUMNS / 2; i++) dk[i] = 0.f;
#pragma unroll
    for (int i = 0; i < V_COLUMNS / 2; i++) dv[i] = 0.f;
    pin(dk), pin(dv);  // else the compiler keeps the zeros of a tile without steps apart, and serialises the products

    if (w.steps > 0) {
      const QueryWalk walk = w.walk();
      // The step's block of queries: as scores are made, and a step behind, as dq is added, to sums of the head whose first block is `head`.
      int m = walk.first, m_added = m;
      int head = count.blocks.first(w.batch, w.q_first) + w.kv_head * count.head_group * count.blocks.head_blocks;
      // Whether none of the first block's queries sees a key of this consumer's.
      const bool skips = SKIPS && walk.way > 0 && w.steps > 1 && m * STEP + STEP <= key0 - shift;
      bool first = !skips;    // whether no ds has been written
      float s[STEP / 2];
      const u32 planes = shared_address(storage.planes);
      Elements elements{score, planes, planes + (group * 4 + warp) * PLANE_BYTES, w, w.kv_head * count.head_group, key0 + warp * 16, lane};
      auto next_queries = [&] {
        if (LISTED) return;
        const bool over = walk.next(m);
        if constexpr (BY_ELEMENT) elements.head += over;
      };

      Pair lse[AHEAD ? STEP / 8 : 1];  // of s's queries
      Elements::StepRows rows;  // of s's queries, where a mask may hide some
      auto load_rows = [&] {
        if constexpr (Elements::FETCHES_ROWS)
          if (const ListedBlock here = storage.listed[q.stage].block; here.masked()) rows = elements.see(here.block() * STEP);
      };
      auto load_lse = [&] {
        if (AHEAD)
#pragma unroll
          for (int i = 0; i < STEP / 8; i++) lse[i] = load_pair(lse_rows + q.stage * ROW_BYTES + i * 32);
      };
      // The stage of the step before, which dk has read.
      auto last_stage = [&] { return q.stage == 0 ? STAGES - 1 : q.stage - 1; };
      auto release_q = [&] {
        if (lane == 0) barrier_arrive(rings.q.empty({last_stage(), 0}));
      };
      // ds to the products of dq.
      auto hand_over = [&](const u32 (&ds)[STEP / 4]) {
#pragma unroll
        for (int i = 0; i < STEP / 16; i++)
          stmatrix(((ds_rows + ds_out.stage * GROUPS * DS_BYTES) ^ i % 4 * 32) + i / 4 * 8192, ds[4 * i], ds[4 * i + 1], ds[4 * i + 2],
                   ds[4 * i + 3]);
        async_proxy_fence();
        warp_barrier();
        if (lane == 0) barrier_arrive(rings.ds.full(ds_out));
        ds_out.advance();
      };
      auto start_s = [&] {
        rings.q.wait_full(q);
        const int here = LISTED ? storage.listed[q.stage].block.block() : m;
        if (RAGGED_QUERIES && here * STEP + STEP > w.S_q) zero<STEP, QK_COLUMNS>(storage.q[q.stage], w.S_q - here * STEP);
        wgmma_fence();
        const u64 y = advanced(q_k_major, q.stage * Q_BYTES);
        multiply_ss<T, STEP, QK_COLUMNS / 16, KEYS * 128, STEP * 128>(s, k_k_major, y, false);
        wgmma_commit();
      };
      auto start_dq = [&](float (&dq)[COLUMNS / 2], const PipelineState<DS_STAGES>& ds_in) {
        const u64 x = advanced(ds_tiles, ds_in.stage * GROUPS * DS_BYTES);
        multiply_ss<T, COLUMNS, KEYS / 16, DS_BYTES, 4 * 2048, 2048, 2048, 1, 1>(dq, x, k_mn_major, false);
        wgmma_commit();
      };
      // This warp's part of a piece to the sums, as fragments lie.
      auto add_dq = [&](float (&dq)[COLUMNS / 2], const PipelineState<DS_STAGES>& ds_in) {
        pin(dq);
        if (first) {  // what the first step multiplies is nothing's ds
          first = false;
          return;
        }
        if (lane == 0) barrier_arrive(rings.ds.empty(ds_in));
        int block = head + m_added;
        if constexpr (LISTED) barrier_wait(rings.semaphores.of(group).full({0, 0}), ds_in.stage), block = rings.semaphores.block(group);
        add_fragments(a.sums + (i64)block * (STEP * QK_COLUMNS) + group * PIECE + warp * 16 * COLUMNS + lane * 4, dq, rings.semaphores, group,
                      ds_in.stage, lane);  // the slot is used once a step: the stage of ds is its parity
        if (!LISTED && walk.next(m_added)) head += count.blocks.head_blocks;
      };
      // One step. On entry s of it and behind that dk of the last are under way or done; on leaving the same of the next.
      auto step = [&](auto last) {
        constexpr bool LAST = decltype(last)::value;
        float dp[STEP / 2];
        u32 p[STEP / 4], ds[STEP / 4];
        // Where scores are no multiples of products, p times their slope (under a softcap 1 − tanh²), rounded: in shared memory where this
        // warp's ds will be, as registers are few.
        constexpr bool SLOPED = Scores::HAS_SLOPE;
        char* const sloped = storage.ds[ds_out.stage][group] + warp * 16 * 128 + lane * 8;
        const u64 q_rows = advanced(q_mn_major, q.stage * Q_BYTES), o_rows = advanced(o_mn_major, o().stage * O_BYTES);
        if (LISTED) m = storage.listed[q.stage].block.block(), elements.head = storage.listed[q.stage].head;
        // p, rounded, while dk of the last step is multiplied
        const int query = m * STEP, ahead = m * STEP - (key0 - shift);  // of the diagonal of the consumer's first key
        if constexpr (SLOPED) rings.ds.wait_empty(ds_out);
        if constexpr (Config::SOFTCAP) {
#pragma unroll
          for (int i = 0; i < STEP / 2; i++) s[i] = tanh_large(s[i] * score.cap_inverse);
        }
        Elements::Slopes slopes;
        if constexpr (BY_ELEMENT) {
          elements.apply(s, slopes, m * STEP);
          if (!LISTED && (some_hidden(band, ahead, tail) || m * STEP + STEP > w.S_q)) elements.hide(s, band, key0, ahead, m * STEP);
          if (!LAST) next_queries(), elements.fetch(m * STEP);
        } else if (!LISTED && some_hidden(band, ahead, tail)) {
          if constexpr (Config::PREFIX) elements.hide(s, band, key0, ahead, query, hidden_score());
          else mask_scores(s, band, ahead, key0, w.S_k, warp, lane);
        }
        if constexpr (LISTED) elements.hide_listed(s, storage.listed[q.stage].block, band, key0, ahead, tail, rows);
#pragma unroll
        for (int i = 0; i < STEP / 8; i++) {
          const Pair own = AHEAD ? lse[i] : load_pair(lse_rows + q.stage * ROW_BYTES + i * 32);
          float x[4];
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const float log = e % 2 ? own.y : own.x;
            x[e] = exp2_fast(BY_ELEMENT ? s[4 * i + e] + log : fmaf(s[4 * i + e], c, log));
          }
          p[2 * i] = pack2(x[0], x[1], T()), p[2 * i + 1] = pack2(x[2], x[3], T());
          if constexpr (SLOPED) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
              if constexpr (BY_ELEMENT) x[e] = x[e] == 0.f ? 0.f : x[e] * slopes.of(4 * i + e);
              else x[e] *= fmaf(-s[4 * i + e], s[4 * i + e], 1.f);
            }
            *(uint2*)(sloped + i / 8 * 8192 + i % 8 * 256) = uint2{pack2(x[0], x[1], T()), pack2(x[2], x[3], T())};
          }
        }
        if (first) rings.v.wait_full(kv);
        rings.dout.wait_full(o());
        if (RAGGED_QUERIES && query + STEP > w.S_q) zero<STEP, V_COLUMNS>(storage.dout[o().stage], w.S_q - query);
        pin(dv);
        wgmma_fence();
        const u64 o_here = advanced(o_k_major, o().stage * O_BYTES);
        multiply_ss<T, STEP, V_COLUMNS / 16, KEYS * 128, STEP * 128>(dp, v_k_major, o_here, false);
        wgmma_commit();
        multiply_rs<T, V_COLUMNS, STEP / 16, 2048>(dv, p, o_rows, true);
        wgmma_commit();
        Pair delta[AHEAD ? STEP / 8 : 1];
        if (AHEAD)
#pragma unroll
          for (int i = 0; i < STEP / 8; i++) delta[i] = load_pair(lse_rows + DELTA + o().stage * ROW_BYTES + i * 32);
        wgmma_wait<1>();
        pin(dp);
        pin(dk);
        if (!first) release_q();
        // ds, rounded, while dv is multiplied
#pragma unroll
        for (int i = 0; i < STEP / 8; i++) {
          const Pair own = AHEAD ? delta[i] : load_pair(lse_rows + DELTA + o().stage * ROW_BYTES + i * 32);
          uint2 weights{p[2 * i], p[2 * i + 1]};
          if (SLOPED) weights = *(const uint2*)(sloped + i / 8 * 8192 + i % 8 * 256);
          float x[4];
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const u32 two = e < 2 ? weights.x : weights.y;
            x[e] = (e % 2 ? unpacked_high(two, T()) : unpacked_low(two, T())) * (dp[4 * i + e] - (e % 2 ? own.y : own.x));
          }
          ds[2 * i] = pack2(x[0], x[1], T()), ds[2 * i + 1] = pack2(x[2], x[3], T());
        }
        if (SLOPED) warp_barrier();
        else rings.ds.wait_empty(ds_out);
        hand_over(ds);
        wgmma_wait<0>();
        pin(dv);
        if (lane == 0) barrier_arrive(rings.dout.empty(o()));
        own_o.advance();
        q.advance();
        if (!BY_ELEMENT) next_queries();
        pin(dk);
        float dq[COLUMNS / 2];
        if (!first) rings.ds.wait_full(ds_out);
        wgmma_fence();
        start_dq(dq, ds_out);
        if (!LAST) start_s();
        multiply_rs<T, QK_COLUMNS, STEP / 16, 2048>(dk, ds, q_rows, true);
        wgmma_commit();
        if (!LAST) load_rows();
        wgmma_wait<LAST ? 1 : 2>();
        add_dq(dq, ds_out);
        if (!LAST) {  // s under way across the loop's end would serialise all products; only dk may be
          load_lse();
          wgmma_wait<1>();
          pin(s);
        }
      };

      if (skips) {  // its ds is zero, and nothing else is made of it
        rings.ds.wait_empty(ds_out);
        const u32 nothing[STEP / 4] = {};
        hand_over(nothing);
        q.advance();
        next_queries();
      }
      elements.fetch(m * STEP);
      start_s();
      load_rows();
      if (skips) {  // dout of that step was asked for before q of this one
        if (lane == 0) barrier_arrive(rings.dout.empty({last_stage(), 0}));
        rings.v.wait_full(kv);
      }
      load_lse();
      wgmma_wait<0>();
      pin(s);
#pragma unroll 1
      for (int i = w.steps - 1 - skips; i > 0; i--) step(bool_constant<false>{});
      step(bool_constant<true>{});
      {
        float dq[COLUMNS / 2];
        auto ds_in = ds_out;
        ds_in.advance();
        rings.ds.wait_full(ds_in);
        wgmma_fence();
        start_dq(dq, ds_in);
        wgmma_wait<1>();
        pin(dk);
        release_q();
        named_barrier_sync(1 + group, 128);  // all four warps are done with this consumer's rows of V
        store<DV, V_COLUMNS>(dv, 1.f, w, kv.stage, maps.dv, a.dv);
        wgmma_wait<0>();
        if (lane == 0) barrier_arrive(rings.k.empty(kv));
        add_dq(dq, ds_in);
        stores_read(lane);
      }
    } else {
      rings.v.wait_full(kv);
      if (lane == 0) barrier_arrive(rings.k.empty(kv));
      store<DV, V_COLUMNS>(dv, 1.f, w, kv.stage, maps.dv, a.dv);
      stores_read(lane);
    }
    store<DQK, QK_COLUMNS>(dk, scale, w, kv.stage, maps.dk, a.dk);
    stores_read(lane);
    if (lane == 0) barrier_arrive(rings.v.empty(kv));
    warp_barrier();
    kv.advance();
  }
  if (lane == 0) tma_store_wait<0>();
}
