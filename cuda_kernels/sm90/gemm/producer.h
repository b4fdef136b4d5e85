// The producer thread: slices of A and B, then the epilogue's source tiles.
#pragma once
#include "sm90/gemm/block.h"

struct Producer {
  SharedStorage& storage;
  const Maps& maps;
  const Ring<STAGES>& ring;
  const Arguments& a;
  const TileScheduler& scheduler;
  const Divider& b_heads;
  int rank;
  PipelineState<STAGES> state{0, 1};

  // The next tile; for lists also its addresses, read a tile ahead to hide their latency.
  struct Next {
    TileCoord tile;
    const void *a, *b;
  };
  KS_DEVICE Next find(int t) const {
    const TileCoord p = scheduler.tile(t, rank);
    if (!KS_POINTERS) return {p};
    return {p, listed((const T*)a.a, p.matrix), listed((const T*)a.b, p.matrix)};
  }
  struct Operands {
    TileCoord tile;
    Matrix a, b;
  };
  KS_DEVICE Operands operands(const Next& x) const {
    const TileCoord& p = x.tile;
    if (KS_POINTERS) return {p, matrix_at(x.a, a.origin), matrix_at(x.b, a.origin)};
    return {p, {p.head * a.a_head, p.batch * a.a_batch}, {b_heads.quotient(p.head) * a.b_head, p.batch * a.b_batch}};
  }

  KS_DEVICE void load_slice(const Operands& x, int k) {
    const u32 full = ring.full(state), to_a = shared_address(storage.stages[state.stage]), to_b = to_a + A_BYTES;
    ring.wait_empty(state);
    barrier_arrive_expect_tx(full, STAGE_BYTES);
    if (!KS_A_TRANSPOSED) {
      tma_load(to_a, maps.a, full, k, x.tile.row, x.a.x2, x.a.x3);
    } else {
#pragma unroll
      for (int i = 0; i < BM / 64; i++)
        tma_load(to_a + i * ROWS_BYTES, maps.a, full, x.tile.row + 64 * i, k, x.a.x2, x.a.x3);
    }
    // Each block of a cluster multicasts its part of B to all.
    auto load_b = [&](int offset, int x0, int x1) {
      if (CLUSTER == 1) tma_load(to_b + offset, maps.b, full, x0, x1, x.b.x2, x.b.x3);
      else tma_load_multicast(to_b + offset, maps.b, full, x0, x1, x.b.x2, x.b.x3, (1 << CLUSTER) - 1);
    };
    if (KS_B_TRANSPOSED) {
      load_b(rank * (B_BYTES / CLUSTER), k, x.tile.column + rank * (BN / CLUSTER));
    } else {
#pragma unroll
      for (int i = 0; i < PANELS; i++)
        load_b(i * ROWS_BYTES + rank * (ROWS_BYTES / CLUSTER), x.tile.column + 64 * i, k + rank * (BK / CLUSTER));
    }
    state.advance();
  }

  KS_DEVICE void load_source(const TensorMap& map, const TileCoord& tile, Matrix matrix) {
#pragma unroll 1
    for (int first = 0; first < C_PANELS; first += SOURCE_PANELS, state.advance()) {
      const int panels = min_of(SOURCE_PANELS, C_PANELS - first);
      const u32 full = ring.full(state), to = shared_address(storage.stages[state.stage]);
      ring.wait_empty(state);
      barrier_arrive_expect_tx(full, panels * A_BYTES);
#pragma unroll 1
      for (int i = 0; i < panels; i++)
#pragma unroll 1
        for (int m = 0; m < BM; m += 64)
          tma_load(to + i * A_BYTES + m * 128, map, full, tile.column + C_COLUMNS * (first + i), tile.row + m, matrix.x2, matrix.x3);
    }
  }

  KS_DEVICE void run(int first, int step) {
    if (first >= scheduler.total) return;
    Next next = find(first);
#pragma unroll 1
    for (int t = first; t < scheduler.total; t += step) {
      const Operands x = operands(next);
      if (t + step < scheduler.total) next = find(t + step);
#pragma unroll 1
      for (int s = 0; s < a.slices; s++) load_slice(x, s * BK);
      if (a.beta != 0) load_source(maps.c, x.tile, matrix_of(a, a.c, x.tile, x.tile.head, 1, 1));
      if (KS_RESIDUAL)
        load_source(maps.residual, x.tile, matrix_of(a, a.residual, x.tile, x.tile.head, a.residual_head, a.residual_batch));
    }
  }
};
