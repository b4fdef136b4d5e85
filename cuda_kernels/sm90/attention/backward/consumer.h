// A consumer: one warpgroup, 64 keys of every tile.
//
// A thread has two of its warp's 16 keys, lane/4 and lane/4 + 8, and of every 8 queries two, lane%4·2 on: element i of s or dp is
// of key i/2 % 2 and query i/4·8 + lane%4·2 + i%2.
#pragma once
#include "sm90/attention/backward/block.h"

// The two numbers of 16 bits in x, as pack2 has put them.
KS_DEVICE float unpacked_low(u32 x, bf16) { return __uint_as_float(x << 16); }
KS_DEVICE float unpacked_high(u32 x, bf16) { return __uint_as_float(x & 0xffff0000u); }
KS_DEVICE float unpacked_low(u32 x, f16) { return to_sum(f16{(unsigned short)x}); }
KS_DEVICE float unpacked_high(u32 x, f16) { return to_sum(f16{(unsigned short)(x >> 16)}); }

// The score of a hidden pair, or its tanh, where 1 − tanh² must be a number: p is 0 of both.
KS_DEVICE float hidden_score() { return KS_SOFTCAP ? -1e15f : -infinity(); }

struct Consumer {
  SharedStorage& storage;
  const Maps& maps;
  const Rings& rings;
  const Operands& a;
  const Sequences& sequences;
  const TileCount& count;
  Band band;
  float scale, scale_log2, cap, cap_inverse;
  int group, warp, thread_lane;

  KS_DEVICE int adder() const { return group * 4 + warp; }
  // The row of 16 that this lane addresses in stmatrix, in panels of 128-byte rows; `chunk`: the 16 bytes, of the swizzled row.
  KS_DEVICE u32 matrix_row() const { return thread_lane % 16 * 128; }
  KS_DEVICE u32 matrix_chunk(int chunk) const { return ((chunk + thread_lane / 16) ^ thread_lane % 8) * 16; }

  // Sets rows [from, ROWS) of a tile to zero: TMA has brought another sequence's. Every consumer does so before it reads, over
  // zeros that the other may have written.
  template<int ROWS> KS_DEVICE void zero_rows(char* tile, int from) const {
    const int thread = warp * WARP + thread_lane;
#pragma unroll 1
    for (int i = max_of(from, 0) * 8 + thread; i < ROWS * 8; i += 128)
#pragma unroll
      for (int c = 0; c < D / 64; c++) *(uint4*)(tile + c * ROWS * 128 + i * 16) = uint4{0, 0, 0, 0};
    async_proxy_fence();
    named_barrier_sync(1 + group, 128);
  }

  // Scores of hidden pairs. ahead: from the diagonal's query of the consumer's first key, key0, to the step's first.
  KS_DEVICE void mask_scores(float (&s)[STEP / 2], int ahead, int key0, int S_k) const {
    const int mine = warp * 16 + thread_lane / 4, key = key0 + mine, from = ahead - mine + thread_lane % 4 * 2;
    int low[2], high[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      low[r] = KS_CAUSAL || KS_WINDOW ? 8 * r - band.reach() - from : -STEP;
      high[r] = KS_WINDOW ? 8 * r + band.left + 1 - from : STEP;
      if (key + 8 * r >= S_k) low[r] = STEP;
    }
#pragma unroll
    for (int i = 0; i < STEP / 2; i++) {
      const int query = i / 4 * 8 + i % 2, r = i / 2 % 2;
      if (query < low[r] || (KS_WINDOW && query >= high[r])) s[i] = hidden_score();
    }
  }

  // A gradient of this warp's 16 keys: through its own rows of V to global memory. TMA does not write rows beyond a dense tensor's
  // last; a packed sequence's last rows are stored by the threads, as the next sequence follows them.
  KS_DEVICE void store(const float (&x)[D / 2], float by, const WorkTile& w, int stage, const TensorMap& map, const Matrices<T>& to) const {
    const int first = group * 64 + warp * 16, row = w.tile * KEYS + first, lane = thread_lane;
    const int rows = KS_KV_VIEW == PACKED ? w.S_k - row : 16;
#pragma unroll
    for (int c = 0; c < D; c += 64) {
      char* const panel = storage.v[stage] + c / 64 * KEYS * 128 + first * 128;
      const u32 line = shared_address(panel) + matrix_row();
#pragma unroll
      for (int chunk = 0; chunk < 8; chunk += 2) {
        const float* const y = x + c / 2 + chunk * 4;
        stmatrix(line + matrix_chunk(chunk), pack2(y[0] * by, y[1] * by, T()), pack2(y[2] * by, y[3] * by, T()),
                 pack2(y[4] * by, y[5] * by, T()), pack2(y[6] * by, y[7] * by, T()));
      }
      async_proxy_fence();
      warp_barrier();
      if (KS_KV_VIEW != PACKED || rows >= 16) {
        if (lane == 0) tma_store(map, shared_address(panel), c, w.k_first + row, w.kv_head, KS_KV_VIEW == PACKED ? 0 : w.batch);
      } else {
        T* const line_to = to.base + (i64)(w.k_first + row) * to.row + w.kv_head * to.head + c;
#pragma unroll 1
        for (int i = lane; i < rows * 8; i += WARP)
          *(uint4*)(line_to + (i64)(i / 8) * to.row + i % 8 * 8) = *(const uint4*)(panel + i / 8 * 128 + (i % 8 ^ i / 8 % 8) * 16);
      }
    }
    if (lane == 0) tma_store_commit(), tma_store_wait_read<0>();
    warp_barrier();
  }

  KS_DEVICE void run() const;
};

KS_DEVICE void Consumer::run() const {
  PipelineState<KV_STAGES> kv{0, 0};
  PipelineState<STAGES> q{0, 0};
  PipelineState<O_STAGES> own_o{0, 0};
  // Where ds is written next. With two stages that is where ds of the step before the last written lies, with its parity.
  PipelineState<DS_STAGES> ds_out{0, 1};
  const int lane = thread_lane;
  const float c = KS_SOFTCAP ? cap : scale_log2;

  const u64 q_k_major = whole(descriptor_k_major(shared_address(storage.q)));
  const u64 q_mn_major = whole(descriptor_mn_major(shared_address(storage.q), STEP * 128));
  const u64 o_k_major = whole(descriptor_k_major(shared_address(storage.dout)));
  const u64 o_mn_major = whole(descriptor_mn_major(shared_address(storage.dout), STEP * 128));
  const u64 ds_tiles = whole(descriptor_mn_major(shared_address(storage.ds) + group / (D / 64) * 64 * 128, 64 * 128));
  const u32 ds_rows = shared_address(storage.ds) + group * DS_BYTES + warp * 16 * 128 + matrix_row() + matrix_chunk(0);
  const u32 lse_rows = shared_address(storage.lse) + lane % 4 * 8;
  constexpr int DOTS = sizeof(storage.lse);  // from the values of lse to those of dots
  // With as many stages of dout as of q, one state serves both.
  auto o = [&]() -> PipelineState<O_STAGES> {
    if constexpr (O_STAGES == STAGES) return {q.stage, q.parity};
    else return own_o;
  };

#pragma unroll 1
  for (;;) {
    rings.kv.wait_full(kv);
    const WorkTile& w = storage.work_tiles[work_slot({kv.stage, kv.parity ^ 1})];
    if (w.steps < 0) break;
    const int shift = w.S_k - w.S_q, key0 = w.tile * KEYS + group * 64;
    const bool tail = key0 + 64 > w.S_k;
    if (RAGGED_KEYS && (w.tile + 1) * KEYS > w.S_k) {
      zero_rows<KEYS>(storage.k[kv.stage], w.S_k - w.tile * KEYS);
      zero_rows<KEYS>(storage.v[kv.stage], w.S_k - w.tile * KEYS);
    }
    const u64 k_k_major = whole(descriptor_k_major(shared_address(storage.k[kv.stage]) + group * 64 * 128));
    const u64 v_k_major = whole(descriptor_k_major(shared_address(storage.v[kv.stage]) + group * 64 * 128));
    const u64 k_mn_major = whole(descriptor_mn_major(shared_address(storage.k[kv.stage]) + group % (D / 64) * KEYS * 128, KEYS * 128));

    float dk[D / 2], dv[D / 2];
#pragma unroll
    for (int i = 0; i < D / 2; i++) dk[i] = dv[i] = 0.f;
    pin(dk), pin(dv);  // else the compiler keeps the zeros of a tile without steps apart, and serialises the products

    if (w.steps > 0) {
      const int begin = w.begin, end = w.end;
      // The step's block of queries: as scores are made, and a step behind, as dq is added.
      int m = begin, m_added = begin;
      int block = count.blocks.first(w.batch, w.q_first) + w.kv_head * count.head_group * count.blocks.head_blocks + begin;
      bool first = true;      // whether no ds has been written
      int turn = -1;          // in order: the block that was added to last, whose counter is not yet advanced
      float s[STEP / 2];

      // The stage of the step before, which dk has read.
      auto release_q = [&] {
        if (lane == 0) barrier_arrive(rings.q.empty({q.stage == 0 ? STAGES - 1 : q.stage - 1, 0}));
      };
      auto start_s = [&] {
        rings.q.wait_full(q);
        if (RAGGED_QUERIES && m * STEP + STEP > w.S_q) zero_rows<STEP>(storage.q[q.stage], w.S_q - m * STEP);
        wgmma_fence();
        const u64 y = advanced(q_k_major, q.stage * Q_BYTES);
#pragma unroll
        for (int k = 0; k < D / 16; k++)
          Wgmma<T, STEP>::template ss<0, 0>(s, advanced(k_k_major, k / 4 * KEYS * 128 + k % 4 * 32),
                                            advanced(y, k / 4 * STEP * 128 + k % 4 * 32), k != 0);
        wgmma_commit();
      };
      auto start_dq = [&](float (&dq)[32], const PipelineState<DS_STAGES>& ds_in) {
        const u64 x = advanced(ds_tiles, ds_in.stage * GROUPS * DS_BYTES);
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
          Wgmma<T, 64>::template ss<1, 1>(dq, advanced(x, k / 4 * DS_BYTES + k % 4 * 2048), advanced(k_mn_major, k * 2048), k != 0);
        wgmma_commit();
      };
      // In order: the piece added to last is handed to the tile of the keys before. A step late: then its additions are over.
      auto turns = [&](int at) { return a.turns + (i64)at * ADDERS + adder(); };
      auto pass_turn = [&] {
        if (!KS_IN_ORDER || turn < 0) return;
        warp_barrier();
        if (lane == 0) add_release(turns(turn), 1);  // releases what the other lanes have added, too
        turn = -1;
      };
      // How many tiles have added to the next piece: asked for ahead, as the answer takes a while.
      auto ask_turn = [&]() -> u32 { return KS_IN_ORDER && lane == 0 ? load_relaxed(turns(block)) : 0; };
      // Until all tiles of later keys have. The additions after it are made in L2, where the counter is: relaxed loads will do.
      auto take_turn = [&](u32 done) {
        if (!KS_IN_ORDER) return;
        turn = block;
        if (lane == 0) {
          const u32 before = band.tiles_met(m_added * STEP, shift, w.S_k, KEYS) - 1 - w.tile;
          while (done != before) done = load_relaxed(turns(turn));
        }
        warp_barrier();
      };
      // This warp's part of a piece to the sums, as fragments lie.
      auto add_dq = [&](float (&dq)[32], const PipelineState<DS_STAGES>& ds_in, u32 done) {
        pin(dq);
        if (first) {  // what the first step multiplies is nothing's ds
          first = false;
          return;
        }
        if (lane == 0) barrier_arrive(rings.ds.empty(ds_in));
        take_turn(done);
        float* const to = a.sums + (i64)block * (STEP * D) + adder() * WARP_PIECE + lane * 4;
#pragma unroll
        for (int i = 0; i < 8; i++) global_add(to + i * 128, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
        block++;
        if (++m_added == end) {
          m_added = begin;
          block += count.blocks.head_blocks - (end - begin);
        }
      };
      // One step. On entry s of it and behind that dk of the last are under way or done; on leaving the same of the next.
      auto step = [&](auto last) {
        constexpr bool LAST = decltype(last)::value;
        float dp[STEP / 2];
        u32 p[STEP / 4], ds[STEP / 4];
        // Under a softcap, p · (1 − tanh²), rounded: in shared memory where this warp's ds will be, as registers are few.
        char* const sloped = storage.ds[ds_out.stage][group] + warp * 16 * 128 + lane * 8;
        const u64 q_rows = advanced(q_mn_major, q.stage * Q_BYTES), o_rows = advanced(o_mn_major, o().stage * Q_BYTES);
        // p, rounded, while dk of the last step is multiplied
        const int ahead = m * STEP - (key0 - shift);  // of the diagonal of the consumer's first key
        bool masked = tail;
        if (KS_CAUSAL || KS_WINDOW) masked = masked || ahead < 63 - band.reach();
        if (KS_WINDOW) masked = masked || ahead + STEP - 1 > band.left;
        if constexpr (KS_SOFTCAP) {
          rings.ds.wait_empty(ds_out);
#pragma unroll
          for (int i = 0; i < STEP / 2; i++) s[i] = tanh_large(s[i] * cap_inverse);
        }
        if (masked) mask_scores(s, ahead, key0, w.S_k);
#pragma unroll
        for (int i = 0; i < STEP / 8; i++) {
          const Pair lse = load_pair(lse_rows + q.stage * ROW_BYTES + i * 32);
          float x[4];
#pragma unroll
          for (int e = 0; e < 4; e++) x[e] = exp2_fast(fmaf(s[4 * i + e], c, e % 2 ? lse.y : lse.x));
          p[2 * i] = pack2(x[0], x[1], T()), p[2 * i + 1] = pack2(x[2], x[3], T());
          if constexpr (KS_SOFTCAP) {
#pragma unroll
            for (int e = 0; e < 4; e++) x[e] *= fmaf(-s[4 * i + e], s[4 * i + e], 1.f);
            *(uint2*)(sloped + i / 8 * 8192 + i % 8 * 256) = uint2{pack2(x[0], x[1], T()), pack2(x[2], x[3], T())};
          }
        }
        rings.dout.wait_full(o());
        if (RAGGED_QUERIES && m * STEP + STEP > w.S_q) zero_rows<STEP>(storage.dout[o().stage], w.S_q - m * STEP);
        pin(dv);
        wgmma_fence();
        const u64 o_here = advanced(o_k_major, o().stage * Q_BYTES);
#pragma unroll
        for (int k = 0; k < D / 16; k++)
          Wgmma<T, STEP>::template ss<0, 0>(dp, advanced(v_k_major, k / 4 * KEYS * 128 + k % 4 * 32),
                                            advanced(o_here, k / 4 * STEP * 128 + k % 4 * 32), k != 0);
        wgmma_commit();
#pragma unroll
        for (int k = 0; k < STEP / 16; k++) Wgmma<T, D>::rs(dv, p + 4 * k, advanced(o_rows, k * 2048), 1);
        wgmma_commit();
        wgmma_wait<1>();
        pin(dp);
        pin(dk);
        if (!first) release_q();
        // ds, rounded, while dv is multiplied
#pragma unroll
        for (int i = 0; i < STEP / 8; i++) {
          const Pair dots = load_pair(lse_rows + DOTS + o().stage * ROW_BYTES + i * 32);
          uint2 weights{p[2 * i], p[2 * i + 1]};
          if (KS_SOFTCAP) weights = *(const uint2*)(sloped + i / 8 * 8192 + i % 8 * 256);
          float x[4];
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const u32 two = e < 2 ? weights.x : weights.y;
            x[e] = (e % 2 ? unpacked_high(two, T()) : unpacked_low(two, T())) * (dp[4 * i + e] - (e % 2 ? dots.y : dots.x));
          }
          ds[2 * i] = pack2(x[0], x[1], T()), ds[2 * i + 1] = pack2(x[2], x[3], T());
        }
        if (KS_SOFTCAP) warp_barrier();
        else rings.ds.wait_empty(ds_out);
#pragma unroll
        for (int i = 0; i < STEP / 16; i++)
          stmatrix(((ds_rows + ds_out.stage * GROUPS * DS_BYTES) ^ i % 4 * 32) + i / 4 * 8192, ds[4 * i], ds[4 * i + 1], ds[4 * i + 2],
                   ds[4 * i + 3]);
        async_proxy_fence();
        warp_barrier();
        if (lane == 0) barrier_arrive(rings.ds.full(ds_out));
        ds_out.advance();
        const u32 done = ask_turn();
        pass_turn();
        wgmma_wait<0>();
        pin(dv);
        if (lane == 0) barrier_arrive(rings.dout.empty(o()));
        own_o.advance();
        q.advance();
        if (++m == end) m = begin;
        pin(dk);
        float dq[32];
        if (!first) rings.ds.wait_full(ds_out);
        wgmma_fence();
        start_dq(dq, ds_out);
        if (!LAST) start_s();
#pragma unroll
        for (int k = 0; k < STEP / 16; k++) Wgmma<T, D>::rs(dk, ds + 4 * k, advanced(q_rows, k * 2048), 1);
        wgmma_commit();
        wgmma_wait<LAST ? 1 : 2>();
        add_dq(dq, ds_out, done);
        if (!LAST) {  // s under way across the loop's end would serialise all products; only dk may be
          wgmma_wait<1>();
          pin(s);
        }
      };

      start_s();
      wgmma_wait<0>();
      pin(s);
#pragma unroll 1
      for (int i = w.steps - 1; i > 0; i--) step(Flag<false>{});
      step(Flag<true>{});
      {
        float dq[32];
        auto ds_in = ds_out;
        ds_in.advance();
        rings.ds.wait_full(ds_in);
        wgmma_fence();
        start_dq(dq, ds_in);
        wgmma_wait<0>();
        pass_turn();
        add_dq(dq, ds_in, ask_turn());
        pass_turn();
      }
      pin(dk);
      pin(dv);
      release_q();
    }
    named_barrier_sync(1 + group, 128);  // all four warps are done with this consumer's rows of V
    store(dv, 1.f, w, kv.stage, maps.dv, a.dv);
    store(dk, scale, w, kv.stage, maps.dk, a.dk);
    if (lane == 0) barrier_arrive(rings.kv.empty(kv));
    warp_barrier();
    kv.advance();
  }
  if (lane == 0) tma_store_wait<0>();
}
