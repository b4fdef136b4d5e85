// The producer thread, which loads slices of both factors; and the warps that split the right one.
#pragma once
#include "sm90/gemm/tf32_block.h"

struct Producer {
  SharedStorage& storage;
  const TensorMap &left_map, &right_map;
  const Ring<STAGES>& ring;
  const Arguments& a;
  const TileScheduler& scheduler;
  const FastDivmod& b_heads;
  PipelineState<STAGES> state{0, 1};

  KS_DEVICE void load_slice(const TileCoord& tile, const Matrix& left, const Matrix& right, int k) {
    const u32 full = ring.full(state), to = shared_address(storage.left[state.stage]);
    const int left_row = Config::SWAP_AB ? tile.column : tile.row, right_row = Config::SWAP_AB ? tile.row : tile.column;
    ring.wait_empty(state);
    barrier_arrive_expect_tx(full, STAGE_BYTES);
    if (!Config::LEFT_TRANSPOSED) {
      tma_load(to, left_map, full, k, left_row, left.x2, left.x3);
    } else {
#pragma unroll
      for (int i = 0; i < LEFT / PANEL_ROWS; i++)
        tma_load(to + i * PANEL_BYTES, left_map, full, left_row + PANEL_ROWS * i, k, left.x2, left.x3);
    }
    tma_load(shared_address(storage.right[state.stage]), right_map, full, k, right_row, right.x2, right.x3);
    state.advance();
  }

  KS_DEVICE void run(int first, int step) {
#pragma unroll 1
    for (int t = first; t < scheduler.total; t += step) {
      const TileCoord p = scheduler.tile(t, 0);
      const Matrix of_a = Config::POINTERS ? matrix_at(listed((const float*)a.a, p.matrix), a.origin)
                                      : Matrix{p.head * a.a_head, p.batch * a.a_batch};
      const Matrix of_b = Config::POINTERS ? matrix_at(listed((const float*)a.b, p.matrix), a.origin)
                                      : Matrix{b_heads.quotient(p.head) * a.b_head, p.batch * a.b_batch};
#pragma unroll 1
      for (int s = 0; s < a.slices; s++) load_slice(p, Config::SWAP_AB ? of_b : of_a, Config::SWAP_AB ? of_a : of_b, s * BK);
    }
  }
};

// One of the warps that split a slice of the right factor, in place and into its tile of second parts. Chunks stay where they
// are, so they know nothing of the tile's layout.
struct Splitter {
  SharedStorage& storage;
  const Ring<STAGES>& ring;
  const Arguments& a;
  const TileScheduler& scheduler;
  int warp;
  PipelineState<STAGES> state{0, 0};

  KS_DEVICE void run(int first, int step) {
#pragma unroll 1
    for (int t = first; t < scheduler.total; t += step)
#pragma unroll 1
      for (int s = 0; s < a.slices; s++, state.advance()) {
        ring.wait_full(state);
        char *const from = storage.right[state.stage], *const to = storage.small[PARTS == 2 ? state.stage : 0];
#pragma unroll 4
        for (int i = warp * WARP + lane(); i < RIGHT_BYTES / 16; i += SPLITTERS * WARP) {
          const float4 x = ((const float4*)from)[i];
          uint4 large, small;
          split_tf32(x.x, large.x, small.x), split_tf32(x.y, large.y, small.y);
          split_tf32(x.z, large.z, small.z), split_tf32(x.w, large.w, small.w);
          ((uint4*)from)[i] = large, ((uint4*)to)[i] = small;
        }
        async_proxy_fence();
        warp_barrier();
        if (lane() == 0) barrier_arrive(shared_address(&storage.split[state.stage]));
      }
  }
};
