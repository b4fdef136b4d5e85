// The two consumers of a block. Each makes one product of every step and one gradient of the block's 64 keys:
//   scores:    s = k·qᵀ, p = 2^(s − lse),            dv += p·dout
//   gradients: dp = v·doutᵀ, ds = p·(dp − delta),      dk += ds·q
// p goes from the one to the other through shared memory as fragments lie, warp by warp. ds goes to the products of dq, which each
// makes for its columns, here and in the other block.
#pragma once
#include "sm90/attention/backward/fragments.h"
#include "sm90/attention/backward/wide/block.h"

// The columns of a gradient that one product makes.
template<int COLUMNS, int H> KS_DEVICE float (&part(float (&sum)[COLUMNS / 2]))[part_columns(COLUMNS) / 2] {
  return *(float(*)[part_columns(COLUMNS) / 2])(sum + H * (part_columns(COLUMNS) / 2));
}

// The stage `back` stages before.
template<int STAGES> KS_DEVICE PipelineState<STAGES> before(const PipelineState<STAGES>& x, int back) {
  return {x.stage < back ? x.stage + STAGES - back : x.stage - back, 0};
}

// The address of shared memory, made where it is used: the compiler would keep all of them, and registers are few.
template<class X> KS_DEVICE u32 address_here(const X& x) { return opaque((int)shared_address(&x)); }

struct Consumer {
  SharedStorage& storage;
  const Maps& maps;
  const Rings& rings;
  const Operands& a;
  const Sequences& sequences;
  const TileCount& count;
  Band band;
  float scale, scale_log2, cap, cap_inverse;
  int rank, group, warp, thread_lane;

  template<int COLUMNS> KS_DEVICE void zero(char* tile, int from) const {
    zero_rows<64, COLUMNS>(tile, from, 1 + group, warp, thread_lane);
  }

  // Of the four panels of dq's columns, this consumer's.
  KS_DEVICE int panel() const { return rank * GROUPS + group; }

  // DQ: the columns of this consumer's piece of dq, 0 where it has none.
  template<bool SCORES, int DQ> KS_DEVICE void run() const;
};

template<bool SCORES, int DQ> KS_DEVICE void Consumer::run() const {
  // The ring of the first product's queries, a step ahead, and of the second's: q and dout, or dout and q.
  constexpr int NEAR_STAGES = SCORES ? Q_STAGES : O_STAGES, FAR_STAGES = SCORES ? O_STAGES : Q_STAGES;
  constexpr int NEAR_COLUMNS = SCORES ? QK_COLUMNS : V_COLUMNS, FAR_COLUMNS = SCORES ? V_COLUMNS : QK_COLUMNS, FAR_DIM = SCORES ? DV : DQK;
  constexpr int NEAR_PARTS = parts(NEAR_COLUMNS), FAR_PARTS = parts(FAR_COLUMNS);
  const auto& near_ring = [&]() -> const auto& { if constexpr (SCORES) return rings.q; else return rings.dout; }();
  const auto& far_ring = [&]() -> const auto& { if constexpr (SCORES) return rings.dout; else return rings.q; }();
  char* const near_tiles = SCORES ? storage.q[0] : storage.dout[0];
  char* const far_tiles = SCORES ? storage.dout[0] : storage.q[0];
  constexpr int DQ_COLUMNS = DQ > 0 ? DQ : 64;  // of code that is not called where it has none
  u32 kv_parity = 0;
  PipelineState<NEAR_STAGES> near{0, 0};
  PipelineState<FAR_STAGES> far{0, 0};
  // Where ds is written next, with its parity: with two stages that is where ds of the step before the last written lies.
  PipelineState<DS_STAGES> ds_out{0, 1};
  const int lane = thread_lane;
  const float c = Config::SOFTCAP ? cap : scale_log2;

#pragma unroll 1
  for (;;) {
    barrier_wait(rings.kv.full({0, 0}), kv_parity);
    const WorkTile& w = storage.work_tiles[kv_parity ^ 1];
    if (w.steps < 0) break;
    const int shift = w.S_k - w.S_q, key0 = w.tile * KEYS + rank * BLOCK_KEYS;
    const bool tail = key0 + BLOCK_KEYS > w.S_k;
    if (RAGGED_KEYS && (w.tile + 1) * KEYS > w.S_k) {
      zero<QK_COLUMNS>(storage.k, w.S_k - key0);
      zero<V_COLUMNS>(storage.v, w.S_k - key0);
      zero<GROUPS * 64>(storage.other_k, w.S_k - w.tile * KEYS - (rank ^ 1) * BLOCK_KEYS);
    }

    float sum[FAR_COLUMNS / 2];  // dv or dk
#pragma unroll
    for (int i = 0; i < FAR_COLUMNS / 2; i++) sum[i] = 0.f;
    pin(sum);

    if (w.steps > 0) {
      const QueryWalk walk = w.walk();
      // The step's block of queries: as products are made, and a step behind, as dq is added, to sums of the head whose first block is `head`.
      int m_near = walk.first, m = m_near, m_added = m_near;
      int head = count.blocks.first(w.batch, w.q_first) + w.kv_head * count.head_group * count.blocks.head_blocks;
      bool first = true;      // whether no ds has been written
      float x[STEP / 2];      // s or dp

      auto next_near = [&] {
        if (RAGGED_QUERIES && m_near * STEP + STEP > w.S_q) {
          auto at = near;
#pragma unroll
          for (int h = 0; h < NEAR_PARTS; h++, at.advance()) {
            near_ring.wait_full(at);
            zero<part_columns(NEAR_COLUMNS)>(near_tiles + at.stage * PART_BYTES<NEAR_COLUMNS>, w.S_q - m_near * STEP);
          }
        }
        walk.next(m_near);
      };
      auto start_near = [&](auto h) {
        constexpr int H = decltype(h)::value;
        near_ring.wait_full(near);
        wgmma_fence();
        const u64 own = whole(descriptor_k_major(address_here(SCORES ? *storage.k : *storage.v)));
        const u64 y = whole(descriptor_k_major(address_here(*near_tiles) + near.stage * PART_BYTES<NEAR_COLUMNS>));
        multiply_ss<T, STEP, part_columns(NEAR_COLUMNS) / 16, KEY_PANEL_BYTES, PANEL_BYTES>(x, advanced(own, 2 * H * KEY_PANEL_BYTES), y, H != 0);
        wgmma_commit();
        near.advance();
      };
      Pair lse[SCORES ? STEP / 8 : 1];  // of s's queries: there before s
      auto load_lse = [&] {
        if constexpr (SCORES) {
          const u32 from = address_here(storage.lse) + lane % 4 * 8 + before(near, NEAR_PARTS).stage * ROW_BYTES;
#pragma unroll
          for (int i = 0; i < STEP / 8; i++) lse[i] = load_pair(from + i * 32);
          if (FENCE_FIRST) async_proxy_fence();  // TMA writes the next there once both consumers have handed q back
        }
      };
      auto release_near = [&] {
#pragma unroll
        for (int h = NEAR_PARTS; h > 0; h--) release(near_ring.empty(before(near, h)), lane);
      };
      // The block's columns of dq are a panel for each consumer, of the keys of both blocks: this one's first.
      auto start_dq = [&](float (&dq)[DQ_COLUMNS / 2], const PipelineState<DS_STAGES>& ds_in) {
        wgmma_fence();
        const u64 y = whole(descriptor_mn_major(address_here(storage.ds) + ds_in.stage * CLUSTER * DS_BYTES, KEY_PANEL_BYTES));
        const u64 own = whole(descriptor_mn_major(address_here(storage.k) + panel() * KEY_PANEL_BYTES, KEY_PANEL_BYTES));
        const u64 other = whole(descriptor_mn_major(address_here(storage.other_k) + group * KEY_PANEL_BYTES, KEY_PANEL_BYTES));
        multiply_ss<T, DQ_COLUMNS, BLOCK_KEYS / 16, 4 * 2048, 4 * 2048, 2048, 2048, 1, 1>(dq, y, own, false);
        multiply_ss<T, DQ_COLUMNS, BLOCK_KEYS / 16, 4 * 2048, 4 * 2048, 2048, 2048, 1, 1>(dq, advanced(y, DS_BYTES), other, true);
        wgmma_commit();
      };
      // This warp's part of a piece to the sums, as fragments lie.
      auto add_dq = [&](float (&dq)[DQ_COLUMNS / 2], const PipelineState<DS_STAGES>& ds_in) {
        pin(dq);
        if (first) {  // what the first step multiplies is nothing's ds
          first = false;
          return;
        }
        release(rings.ds.empty(ds_in), lane);
        add_fragments(a.sums + (i64)(head + m_added) * (STEP * QK_COLUMNS) + panel() * PIECE + warp * 16 * DQ_COLUMNS + lane * 4, dq,
                      rings.semaphores, group, ds_in.stage, lane);  // the slot is used once a step: the stage of ds is its parity
        if (walk.next(m_added)) head += count.blocks.head_blocks;
      };

      // Where this thread's p is handed on, and its warp's ds will be: 16 bytes of each 16 queries.
      auto p_fragments = [&] {
        return address_here(storage.ds) + ds_out.stage * CLUSTER * DS_BYTES + warp * WARP_DS_BYTES + lane * 16;
      };
      // p of scores, rounded, to both consumers.
      auto make_p = [&](u32 (&p)[STEP / 4]) {
        const int ahead = m * STEP - (key0 - shift);  // of the diagonal of the block's first key
        if constexpr (Config::SOFTCAP)
#pragma unroll
          for (int i = 0; i < STEP / 2; i++) x[i] = tanh_large(x[i] * cap_inverse);
        if (some_hidden(band, ahead, tail)) mask_scores(x, band, ahead, key0, w.S_k, warp, lane);
#pragma unroll
        for (int i = 0; i < STEP / 16; i++) {
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const float* const s = x + 8 * i + 4 * j;
            float y[4];
#pragma unroll
            for (int e = 0; e < 4; e++) y[e] = exp2_fast(fmaf(s[e], c, e % 2 ? lse[2 * i + j].y : lse[2 * i + j].x));
            p[4 * i + 2 * j] = pack2(y[0], y[1], T()), p[4 * i + 2 * j + 1] = pack2(y[2], y[3], T());
            if constexpr (Config::SOFTCAP) {  // p · (1 − tanh²), in the place of its scores
#pragma unroll
              for (int e = 0; e < 4; e++) y[e] *= fmaf(-s[e], s[e], 1.f);
              x[8 * i + 4 * j] = __uint_as_float(pack2(y[0], y[1], T())), x[8 * i + 4 * j + 1] = __uint_as_float(pack2(y[2], y[3], T()));
            }
          }
        }
        rings.ds.wait_empty(ds_out);
        const u32 to = p_fragments();
#pragma unroll
        for (int i = 0; i < STEP / 16; i++) {
          u32 handed[4];
#pragma unroll
          for (int j = 0; j < 4; j++) handed[j] = Config::SOFTCAP ? __float_as_uint(x[8 * i + j / 2 * 4 + j % 2]) : p[4 * i + j];
          store_fragment(to + i * WARP * 16, handed);
        }
        if (!FENCE_FIRST) async_proxy_fence();  // lse has been read; TMA writes the next there once the other consumer is done with q
        warp_barrier();
        if (lane == 0) barrier_arrive(rings.p.full(ds_out));
      };
      // ds, rounded, to this consumer's registers and to the products of dq.
      auto make_ds = [&](u32 (&ds)[STEP / 4]) {
        far_ring.wait_full(far);  // has delta, too
        const u32 delta_rows = address_here(storage.delta) + lane % 4 * 8 + far.stage * ROW_BYTES;
        barrier_wait(rings.p.full(ds_out), ds_out.parity ^ 1);
        const u32 from = p_fragments();
#pragma unroll
        for (int i = 0; i < STEP / 16; i++) {
          u32 p[4];
          load_fragment(from + i * WARP * 16, p);
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const Pair delta = load_pair(delta_rows + (2 * i + j) * 32);
            float y[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
              const u32 two = p[2 * j + e / 2];
              y[e] = (e % 2 ? unpacked_high(two, T()) : unpacked_low(two, T())) * (x[8 * i + 4 * j + e] - (e % 2 ? delta.y : delta.x));
            }
            ds[4 * i + 2 * j] = pack2(y[0], y[1], T()), ds[4 * i + 2 * j + 1] = pack2(y[2], y[3], T());
          }
        }
        warp_barrier();
        const u32 to = address_here(storage.ds) + warp * WARP_DS_BYTES + matrix_row(lane) + matrix_chunk(0, lane) + ds_out.stage * CLUSTER * DS_BYTES;
#pragma unroll
        for (int i = 0; i < STEP / 16; i++) stmatrix(to ^ i * 32, ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
        async_proxy_fence();
        warp_barrier();
        if (lane == 0) {
          const u32 full = rings.ds.full(ds_out), own = shared_address(storage.ds[ds_out.stage][0]) + warp * WARP_DS_BYTES;
          barrier_arrive_expect_tx(full, WARP_DS_BYTES);  // what the other block's warp sends
          bulk_copy_to(own + DS_BYTES, own, WARP_DS_BYTES, full, rank ^ 1);
        }
      };

      // One step. On entry s or dp of it is done; on leaving that of the next.
      auto step = [&](auto last) {
        constexpr bool LAST = decltype(last)::value;
        u32 y[STEP / 4];
        float dq[DQ_COLUMNS / 2];
        // The keys' consumer is behind: dq of the step before is multiplied while it makes ds, so that there is soon a place for the next p.
        constexpr bool DQ_FIRST = DQ > 0 && !SCORES && FAR_PARTS == 1, DQ_LATER = DQ > 0 && !DQ_FIRST;
        if constexpr (DQ_FIRST) {
          auto ds_in = ds_out;
          ds_in.advance();
          if (!first) rings.ds.wait_full(ds_in);
          start_dq(dq, ds_in);
        }
        if constexpr (SCORES) make_p(y);
        else make_ds(y);
        ds_out.advance();  // to ds of the step before
        pin(sum);
        if (RAGGED_QUERIES && SCORES && m * STEP + STEP > w.S_q) {  // q has been set to zero before s
          auto at = far;
#pragma unroll
          for (int h = 0; h < FAR_PARTS; h++, at.advance()) {
            far_ring.wait_full(at);
            zero<part_columns(FAR_COLUMNS)>(far_tiles + at.stage * PART_BYTES<FAR_COLUMNS>, w.S_q - m * STEP);
          }
        }
        auto start_far = [&](auto h) {
          constexpr int H = decltype(h)::value, COLUMNS = part_columns(FAR_COLUMNS);
          far_ring.wait_full(far);
          if (H == 0) wgmma_fence();
          const u64 rows = whole(descriptor_mn_major(address_here(*far_tiles) + far.stage * PART_BYTES<FAR_COLUMNS>, PANEL_BYTES));
          multiply_rs<T, COLUMNS, STEP / 16, 2048>(part<FAR_COLUMNS, H>(sum), y, rows, true);
          wgmma_commit();
          far.advance();
        };
        auto end_far = [&](auto h) {
          constexpr int H = decltype(h)::value;
          wgmma_wait<DQ_LATER + FAR_PARTS - 1 - H>();
          pin(part<FAR_COLUMNS, H>(sum));
          release(far_ring.empty(before(far, FAR_PARTS - H)), lane);
        };
        // dout comes late: scores' consumer holds it longest. So what is done with is handed back before the next is waited for, and
        // dq is added before the last part of dp.
        constexpr int EARLY_PARTS = LAST ? 0 : SCORES ? NEAR_PARTS : 1;
        start_far(bool_constant<false>{});
        if constexpr (FAR_PARTS == 2) start_far(bool_constant<true>{});
        if constexpr (DQ_LATER) {
          if (!first) rings.ds.wait_full(ds_out);
          start_dq(dq, ds_out);
        }
        if constexpr (DQ_FIRST) {
          wgmma_wait<FAR_PARTS>();
          add_dq(dq, ds_out);
        }
        end_far(bool_constant<false>{});
        if constexpr (FAR_PARTS == 2) end_far(bool_constant<true>{});
        if (!LAST) next_near();
        if constexpr (EARLY_PARTS > 0) start_near(bool_constant<false>{});
        if constexpr (EARLY_PARTS > 1) start_near(bool_constant<true>{});
        if constexpr (DQ_LATER) {
          wgmma_wait<EARLY_PARTS>();
          add_dq(dq, ds_out);
        }
        if constexpr (!LAST) {
          if constexpr (EARLY_PARTS < NEAR_PARTS) start_near(bool_constant<true>{});
          load_lse();
          wgmma_wait<0>();
          pin(x);
          release_near();
        }
        walk.next(m);
      };

      next_near();
      start_near(bool_constant<false>{});
      if constexpr (NEAR_PARTS == 2) start_near(bool_constant<true>{});
      load_lse();
      wgmma_wait<0>();
      pin(x);
      release_near();
#pragma unroll 1
      for (int i = w.steps - 1; i > 0; i--) step(bool_constant<false>{});
      step(bool_constant<true>{});
      if constexpr (DQ > 0) {
        float dq[DQ_COLUMNS / 2];
        auto ds_in = ds_out;
        ds_in.advance();
        rings.ds.wait_full(ds_in);
        start_dq(dq, ds_in);
        wgmma_wait<0>();
        add_dq(dq, ds_in);
      }
    }
    named_barrier_meet(3, CONSUMERS);  // all products of K and V are over
    const int first = warp * 16;
    store_gradient<T, BLOCK_KEYS, FAR_DIM, FAR_COLUMNS>(sum, SCORES ? 1.f : scale, SCORES ? storage.v : storage.k, first, key0 + first, w,
                                  SCORES ? maps.dv : maps.dk, SCORES ? a.dv : a.dk, lane);
    stores_read(lane);
    if (lane == 0) barrier_arrive(rings.kv.empty({0, 0}));
    warp_barrier();
    kv_parity ^= 1;
  }
  if (lane == 0) tma_store_wait<0>();
}
