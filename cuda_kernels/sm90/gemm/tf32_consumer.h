// A consumer warpgroup: 64 rows of the left factor times the tile's RIGHT columns.
#pragma once
#include "sm90/gemm/tf32_block.h"

struct Consumer {
  static constexpr int STEPS = BK / 8, HALF = RIGHT / 2;
  SharedStorage& storage;
  const Ring<STAGES>& ring;
  const Arguments& a;
  const TileScheduler& scheduler;
  int group, warp, thread_lane;
  PipelineState<STAGES> state{0, 0};

  // ---- the left factor's fragments: of 8 of k a lane holds two rows, `half` 0 and 1, at k = lane % 4 and 4 on

  // The consumer's row that is a lane's row `half`. A left factor that lies along its rows is read in pairs of neighbours, in an
  // order in which 16 lanes' pairs of four k, whose chunks the swizzle permutes by k, lie in different banks.
  KS_DEVICE int row_of(int half) const {
    const int i = thread_lane >> 2;
    if (!Config::LEFT_TRANSPOSED) return 16 * warp + i + 8 * half;
    return 32 * (warp >> 1) + 4 * chunk() + 2 * (i & 1) + half;
  }
  KS_DEVICE int chunk() const {
    const int i = thread_lane >> 2;
    return 2 * (warp & 1) + 4 * (i >> 1 & 1) + (i >> 2);
  }

  KS_DEVICE void load_left(u32 (&x)[STEPS][4], int stage) const {
    const u32 tile = shared_address(storage.left[stage]) + group * 64 * 128;
    if (Config::LEFT_TRANSPOSED) {
      const int k = thread_lane & 3;
      const u32 from = tile + (warp >> 1) * PANEL_BYTES + k * 128 + (chunk() ^ k) * 16 + (thread_lane >> 2 & 1) * 8;
#pragma unroll
      for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int j = 0; j < 2; j++) {  // of the 8 rows that a chunk's place goes by, those 4 on flip its third bit
          const Pair pair = load_pair((from ^ 64 * j) + (2 * s + j) * 512);
          x[s][2 * j] = __float_as_uint(pair.x), x[s][2 * j + 1] = __float_as_uint(pair.y);
        }
    } else {
      const int row = 16 * warp + (thread_lane & 15);
      const u32 from = tile + row * 128 + ((thread_lane >> 4) ^ (row & 7)) * 16;
#pragma unroll
      for (int s = 0; s < STEPS; s++) ldmatrix(from ^ 32 * s, x[s]);
    }
  }

  // Of each warp, as each reads fragments for itself: reads by the generic proxy, which come before TMA's next writes there.
  KS_DEVICE void release(int stage) const {
    async_proxy_fence();
    warp_barrier();
    if (thread_lane == 0) barrier_arrive(ring.barriers + 8 * (STAGES + stage));
  }

  // ---- TF32: slices are multiplied one after another; a slice's fragments are loaded while the one before is multiplied

  KS_DEVICE void multiply(float (&acc)[RIGHT / 2], const u32 (&x)[STEPS][4], int stage, int add) const {
    const u32 right = descriptor_k_major(shared_address(storage.right[stage]));
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < STEPS; s++) Wgmma<float, RIGHT>::rs(acc, x[s], advanced(right, 32 * s), s | add);
    wgmma_commit();
  }

  KS_DEVICE void mainloop(float (&acc)[RIGHT / 2]) {
    u32 even[STEPS][4], odd[STEPS][4];
    int stage = state.stage;
    ring.wait_full(state);
    load_left(even, stage);
    // Multiplies a slice, lets go of the one before it, and loads the next one's fragments.
    auto slice = [&](const u32 (&x)[STEPS][4], u32 (&next)[STEPS][4], int s) {
      const int previous = stage;
      stage = state.stage;
      multiply(acc, x, stage, s);
      state.advance();
      wgmma_wait<1>();
      if (s) release(previous);
      if (s + 1 < a.slices) {
        ring.wait_full(state);
        load_left(next, state.stage);
      }
    };
#pragma unroll 1
    for (int s = 0; s < a.slices; s += 2) {
      slice(even, odd, s);
      if (s + 1 < a.slices) slice(odd, even, s + 1);
    }
    wgmma_wait<0>();
    release(stage);
  }

  // ---- three products

  KS_DEVICE void mainloop_split(float (&acc)[2][HALF / 2]) {
    float part[2][HALF / 2];
#pragma unroll
    for (int i = 0; i < HALF; i++) acc[i / (HALF / 2)][i % (HALF / 2)] = 0;
#pragma unroll 1
    for (int n = 0; n < a.slices; n++) {
      u32 large[STEPS][4], small[STEPS][4];
      ring.wait_full(state);
      load_left(large, state.stage);
#pragma unroll
      for (int i = 0; i < 4 * STEPS; i++)
        split_tf32(__uint_as_float(large[i / 4][i % 4]), large[i / 4][i % 4], small[i / 4][i % 4]);
      const u32 right_large = descriptor_k_major(shared_address(storage.right[state.stage]));
      const u32 right_small = descriptor_k_major(shared_address(storage.small[PARTS == 2 ? state.stage : 0]));
      barrier_wait(shared_address(&storage.split[state.stage]), state.parity);
      auto multiply_small = [&](float (&d)[HALF / 2], int half) {
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
          Wgmma<float, HALF>::rs(d, small[s], advanced(right_large, half * HALF * 128 + 32 * s), s);
          Wgmma<float, HALF>::rs(d, large[s], advanced(right_small, half * HALF * 128 + 32 * s), 1);
        }
        wgmma_commit();
      };
      auto multiply_large = [&](float (&d)[HALF / 2], int half) {
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < STEPS; s++)
          Wgmma<float, HALF>::rs(d, large[s], advanced(right_large, half * HALF * 128 + 32 * s), s);
        wgmma_commit();
      };
      // Of an infinity nothing is left but NaN, and infinity · 0 is NaN: then the large parts say all.
      auto add_small = [&](float (&sum)[HALF / 2], const float (&d)[HALF / 2]) {
#pragma unroll
        for (int i = 0; i < HALF / 2; i++) sum[i] += finite(d[i]) ? d[i] : 0.f;
      };
      auto add = [&](float (&sum)[HALF / 2], const float (&d)[HALF / 2]) {
#pragma unroll
        for (int i = 0; i < HALF / 2; i++) sum[i] += d[i];
      };
      wgmma_fence();
      multiply_small(part[0], 0);
      multiply_small(part[1], 1);
      wgmma_wait<1>();
      add_small(acc[0], part[0]);
      multiply_large(part[0], 0);
      wgmma_wait<1>();
      add_small(acc[1], part[1]);
      multiply_large(part[1], 1);
      wgmma_wait<1>();
      add(acc[0], part[0]);
      wgmma_wait<0>();
      release(state.stage);
      state.advance();
      add(acc[1], part[1]);
    }
  }

  // ---- the result: pairs of neighbours in a row of C, 8 a batch, whose loads (beta · C, residual) go together

  template<int VECTOR> static KS_DEVICE float2 load_two(const float* from, bool both) {
    if (VECTOR >= 8 && both) return *(const float2*)from;
    return {from[0], both ? from[1] : 0.f};
  }

  KS_DEVICE void store(const float* acc, const TileCoord& p) const {
    float* const c = Config::POINTERS ? listed((float*)a.c, p.matrix) : (float*)a.c + p.batch * a.c_batch + p.head * a.c_head;
    const float* const residual = Config::POINTERS && Config::RESIDUAL ? listed((const float*)a.residual, p.matrix)
        : (const float*)a.residual + p.batch * a.residual_batch + p.head * a.residual_head;
    const auto* bias = (const Bias::type*)a.bias;
    if constexpr (Bias::THERE)
      bias = Config::POINTERS ? listed((const Bias::type*)a.bias, p.matrix) : bias + p.batch * a.bias_batch + p.head * a.bias_head;
    constexpr int PAIRS = RIGHT / 4, BATCH = 8;
    // Pair e: of C not turned, of row half e % 2 and columns 8·(e / 2) on; of C turned, of row 8·(e / 2) + e % 2 on, both halves.
    const int place = opaque(thread_lane);
    const int row0 = Config::SWAP_AB ? p.row + 2 * (place & 3) : p.row + 64 * group + row_of(0), row1 = row_of(1) - row_of(0);
    const int column0 = Config::SWAP_AB ? p.column + 64 * group + row_of(0) : p.column + 2 * (place & 3);
#pragma unroll
    for (int first = 0; first < PAIRS; first += BATCH) {
      auto row_at = [&](int e) { return row0 + (Config::SWAP_AB ? 8 * (e / 2) + e % 2 : row1 * (e % 2)); };
      auto column_at = [&](int e) { return column0 + (Config::SWAP_AB ? 0 : 8 * (e / 2)); };
      float2 y[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const int e = first + i, at = Config::SWAP_AB ? 4 * (e / 2) + e % 2 : 4 * (e / 2) + 2 * (e % 2);
        y[i] = {a.alpha * acc[at], a.alpha * acc[at + (Config::SWAP_AB ? 2 : 1)]};
        if constexpr (Bias::THERE) {
          if (column_at(e) < a.N) y[i].x += to_sum(bias[column_at(e)]);
          if (column_at(e) + 1 < a.N) y[i].y += to_sum(bias[column_at(e) + 1]);
        }
      }
      auto add = [&](const float* from, int stride, float factor, auto vector) {
        float2 x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
          const int row = row_at(first + i), column = column_at(first + i);
          x[i] = {0.f, 0.f};
          if (row < a.M && column < a.N)
            x[i] = load_two<decltype(vector)::BYTES>(from + (i64)row * stride + column, column + 1 < a.N);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) y[i].x = fmaf(factor, x[i].x, y[i].x), y[i].y = fmaf(factor, x[i].y, y[i].y);
      };
      if (a.beta != 0) add(c, a.c_row, a.beta, Bytes<Config::VECTOR_C>());
      if (Config::RESIDUAL) add(residual, a.residual_row, 1.f, Bytes<Config::VECTOR_R>());
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const int row = row_at(first + i), column = column_at(first + i);
        if (row >= a.M || column >= a.N) continue;
        float* const to = c + (i64)row * a.c_row + column;
        if (Config::VECTOR_C >= 8 && column + 1 < a.N) {
          *(float2*)to = y[i];
        } else {
          to[0] = y[i].x;
          if (column + 1 < a.N) to[1] = y[i].y;
        }
      }
    }
  }
  template<int N> struct Bytes { static constexpr int BYTES = N; };

  KS_DEVICE void run(int first, int step) {
#pragma unroll 1
    for (int t = first; t < scheduler.total; t += step) {
      const TileCoord p = scheduler.tile(t, 0);
      if constexpr (PRODUCTS == 3) {
        float acc[2][HALF / 2];
        mainloop_split(acc);
        store(&acc[0][0], p);
      } else {
        float acc[RIGHT / 2];
        mainloop(acc);
        store(acc, p);
      }
    }
  }
};
