// Scales of blocks along K. A warp beside the producer copies those of a slice to its stage of the ring: of each of the tile's
// rows, then of each 64 columns. They are under way as early as the slice is, so no consumer waits for global memory.
#pragma once
#include "sm90/gemm/block.h"

static_assert(!Config::SCALE_K || (Config::SCALE_K == BK && Config::SCALE_N % 64 == 0), "a slice's sums have one scale of a row and one of 64 columns");
static_assert(!Config::SCALE_K || (!Config::SUMMED && !Config::POINTERS && SPLIT == 1), "slices are those of one strided product");

struct ScaleLoader {
  SharedStorage& storage;
  const Ring<STAGES>& ring;
  const Arguments& a;
  const Scheduler& scheduler;
  int rank, thread_lane;
  PipelineState<STAGES> state{0, 1};

  KS_DEVICE void run(int first, int step) {
    constexpr int ROWS_EACH = BM / WARP;
    const auto &by_row = a.scales.a, &by_column = a.scales.b;
    const int sources = SOURCE_STAGES * ((!Config::HEADS && a.beta != 0) + Config::RESIDUAL);  // stages that have no scales
#pragma unroll 1
    for (int t = first; t < scheduler.total; t += step) {
      const TileCoord p = scheduler.tile(t, rank);
      // Of rows and columns beyond the last its own: what they scale is not stored.
      int blocks[ROWS_EACH];
#pragma unroll
      for (int i = 0; i < ROWS_EACH; i++) blocks[i] = min_of(p.row + WARP * i + thread_lane, a.M - 1) / max_of(Config::SCALE_M, 1);
      const float* rows = by_row.base + p.batch * by_row.batch + p.head * by_row.head;
      const float* columns = by_column.base + p.batch * by_column.batch + a.b_heads.quotient(p.head) * by_column.head +
                             (i64)(min_of(p.column + 64 * thread_lane, a.N - 1) / max_of(Config::SCALE_N, 1)) * by_column.row;
#pragma unroll 1
      for (int s = 0; s < a.slices + sources; s++, state.advance()) {
        ring.wait_empty(state);
        if (s < a.slices) {
          const u32 to = shared_address(storage.scales[state.stage]) + 4 * thread_lane;
#pragma unroll
          for (int i = 0; i < ROWS_EACH; i++) async_copy_word(to + 4 * WARP * i, rows + (i64)blocks[i] * by_row.row);
          if (thread_lane < PANELS) async_copy_word(to + 4 * BM, columns);
          rows += by_row.k, columns += by_column.k;
        }
        async_copies_arrive(ring.full(state));
      }
    }
  }
};
