// The producer thread: slices of A and B, then the epilogue's source tiles.
#pragma once
#include "sm90/gemm/epilogue.h"

// Of B, from one launch to the next of the same: more than that would leave the L2 cache in the order in which it came, all of it
// before it is read again. Not of boxes of a few rows, of which a slice has many: q, k and v of 256 tokens, rotated, took 34 µs for 30.
constexpr int KEPT_BYTES = 40 << 20;
constexpr bool FEW_ROWS_A_BOX = Result::ORDERED || (Config::B_TRANSPOSED && BN / B_BOXES < 64);
static_assert(A_PARTS == 1 || !Config::A_TRANSPOSED, "shared rows of A are boxes along K");

struct Producer {
  SharedStorage& storage;
  const Maps& maps;
  const Ring<STAGES>& ring;
  const Arguments& a;
  const Scheduler& scheduler;
  const FastDivmod &b_heads, &joined;
  const Result& result;
  int rank, split_rank;
  PipelineState<STAGES> state{0, 1};
  const TensorMap* of_list = nullptr;  // a group's maps
  int last = -1;

  KS_DEVICE const TensorMap& b_map() const { return OF_LISTS ? of_list[1] : maps.b; }
  KS_DEVICE const TensorMap& c_map() const { return OF_LISTS ? of_list[2] : maps.c; }
  KS_DEVICE int b_part() const { return B_PARTS > 1 ? rank : 0; }

  // The next tile; for lists also its addresses, read a tile ahead to hide their latency. What is known ahead would not fit the registers
  // where heads are joined or tiles cut.
  static constexpr bool AHEAD = !Config::JOINED && !TAIL;
  struct Next {
    TileCoord tile;
    const void *a, *b;
  };
  KS_DEVICE Next find(int t) const {
    const TileCoord p = scheduler.tile(t, rank);
    if (!Config::POINTERS) return {p};
    return {p, listed((const T*)a.a, p.matrix), listed((const T*)a.b, p.matrix)};
  }
  struct Operands {
    TileCoord tile;
    Matrix a, b;
    int segment;
  };
  // The boxes of a tile that are found by division, once for all its slices. ORDERED: rows of B. JOINED_A: the first element of
  // a head, and four times the head within its operand, whose number is added. JOINED_B: the first element and the head.
  static constexpr int BOXES = Result::ORDERED ? BN / B_PARTS / Result::UNIT_ROWS : Config::JOINED == JOINED_A ? BM / 64
                               : Config::JOINED == JOINED_B ? PANELS : 1;
  struct Boxes { int first[BOXES], head[BOXES]; };
  KS_DEVICE Boxes boxes_of(const TileCoord& p) const {
    Boxes x = {};
#pragma unroll
    for (int i = 0; i < BOXES; i++) {
      if (Result::ORDERED) x.first[i] = result.weight_row(p.column + b_part() * (BN / B_PARTS) + i * Result::UNIT_ROWS);
      if (Config::JOINED == JOINED_A || Config::JOINED == JOINED_B) {
        const int element = (Config::JOINED == JOINED_A ? p.row : p.column) + 64 * i, head = joined.quotient(element);
        const int n = Config::SEGMENTED ? segment_of(head) : 0;
        x.first[i] = element - head * joined.d;
        x.head[i] = Config::JOINED == JOINED_A ? (head - first_of(n)) * 4 + n : head;
      }
    }
    return x;
  }
  KS_DEVICE const TensorMap& a_map(int segment) const {
    if (OF_LISTS) return of_list[0];
    if (!Config::SEGMENTED) return maps.a;
    return segment == 0 ? maps.a : segment == 1 ? maps.a1 : maps.a2;
  }
  KS_DEVICE int segment_of(int head) const { return (head >= a.a1_first) + (head >= a.a2_first); }
  KS_DEVICE int first_of(int segment) const { return segment == 0 ? 0 : segment == 1 ? a.a1_first : a.a2_first; }
  KS_DEVICE Operands operands(const Next& x) const {
    if (Config::POINTERS) return {x.tile, matrix_at(x.a, a.origin), matrix_at(x.b, a.origin), 0};
    return of_head(x.tile, x.tile.head, x.tile.batch);
  }
  // Of one of the products that are summed into a tile, by the head and the batch of its factors.
  KS_DEVICE Operands of_head(const TileCoord& p, int head, int batch) const {
    if (!Config::SEGMENTED) return {p, {head * a.a_head, batch * a.a_batch}, {b_heads.quotient(head) * a.b_head, batch * a.b_batch}, 0};
    const int n = segment_of(head);
    return {p, {head - first_of(n), batch}, {b_heads.quotient(head) * a.b_head, batch * a.b_batch}, n};
  }

  KS_DEVICE void load_slice(const Operands& x, const Boxes& boxes, int k) {
    const u32 full = ring.full(state), to_a = shared_address(storage.stages[state.stage]), to_b = to_a + A_BYTES;
    ring.wait_empty(state);
    barrier_arrive_expect_tx(full, STAGE_BYTES);
    auto load_a = [&](const TensorMap& map, int x0, int x2) {
      const int part = A_PARTS > 1 ? rank : 0, row = x.tile.row + part * (BM / A_PARTS);
      if (A_PARTS == 1) tma_load(to_a, map, full, x0, row, x2, x.a.x3);
      else tma_load_multicast(to_a + part * (A_BYTES / A_PARTS), map, full, x0, row, x2, x.a.x3, (1 << CLUSTER) - 1);
    };
    if (Config::JOINED == JOINED_K) {  // a slice is of one head
      const int head = joined.quotient(k), n = Config::SEGMENTED ? segment_of(head) : 0;
      load_a(a_map(n), k - head * joined.d, head - first_of(n));
    } else if (!Config::A_TRANSPOSED) {
      load_a(a_map(x.segment), k, x.a.x2);
    } else if (Config::JOINED == JOINED_A) {  // 64 of the tile's rows are elements of one head
#pragma unroll
      for (int i = 0; i < BM / 64; i++)
        tma_load(to_a + i * ROWS_BYTES, a_map(boxes.head[i] & 3), full, boxes.first[i], k, boxes.head[i] >> 2, x.a.x3);
    } else {
#pragma unroll
      for (int i = 0; i < BM / 64; i++)
        tma_load(to_a + i * ROWS_BYTES, a_map(x.segment), full, x.tile.row + 64 * i, k, x.a.x2, x.a.x3);
    }
    // Each block of a cluster multicasts its part of what they share to all.
    auto load_b_of = [&](int offset, int x0, int x1, int x2) {
      constexpr int ALL = (1 << CLUSTER) - 1;
      if (Config::B_FIRST && !FEW_ROWS_A_BOX && (i64)a.N * a.slices > KEPT_BYTES / 128) {
        if (B_PARTS == 1) tma_load(to_b + offset, b_map(), full, x0, x1, x2, x.b.x3, mostly_evict_first());
        else tma_load_multicast(to_b + offset, b_map(), full, x0, x1, x2, x.b.x3, ALL, mostly_evict_first());
      } else if (B_PARTS == 1) {
        tma_load(to_b + offset, b_map(), full, x0, x1, x2, x.b.x3);
      } else {
        tma_load_multicast(to_b + offset, b_map(), full, x0, x1, x2, x.b.x3, ALL);
      }
    };
    auto load_b = [&](int offset, int x0, int x1) { load_b_of(offset, x0, x1, x.b.x2); };
    if constexpr (Result::ORDERED) {
#pragma unroll
      for (int i = 0; i < BOXES; i++) load_b((b_part() * BOXES + i) * Result::UNIT_ROWS * 128, k, boxes.first[i]);
    } else if (Config::B_TRANSPOSED) {
#pragma unroll
      for (int i = 0; i < B_BOXES / B_PARTS; i++) {
        const int box = b_part() * (B_BOXES / B_PARTS) + i;
        load_b(box * (B_BYTES / B_BOXES), k, product_column(a, x.tile, box * (BN / B_BOXES)));
      }
    } else if (Config::JOINED == JOINED_B) {
#pragma unroll
      for (int i = 0; i < PANELS; i++)
        load_b_of(i * ROWS_BYTES + b_part() * (ROWS_BYTES / B_PARTS), boxes.first[i], k + b_part() * (BK / B_PARTS), boxes.head[i]);
    } else {
      constexpr int AT_ONCE = Config::SUMMED ? 1 : PANELS;
#pragma unroll AT_ONCE
      for (int i = 0; i < PANELS; i++)
        load_b(i * ROWS_BYTES + b_part() * (ROWS_BYTES / B_PARTS), product_column(a, x.tile, 64 * i), k + b_part() * (BK / B_PARTS));
    }
    state.advance();
  }

  KS_DEVICE void load_source(const TensorMap& map, const TileCoord& tile, Matrix matrix) {
#pragma unroll 1
    for (int first = 0; first < C_PANELS; first += SOURCE_PANELS, state.advance()) {
      const int panels = min_of(SOURCE_PANELS, C_PANELS - first);
      const u32 full = ring.full(state), to = shared_address(storage.stages[state.stage]);
      ring.wait_empty(state);
      barrier_arrive_expect_tx(full, panels * SOURCE_BYTES);
#pragma unroll 1
      for (int i = 0; i < panels; i++)
#pragma unroll 1
        for (int m = 0; m < BM; m += 64)
          tma_load(to + i * SOURCE_BYTES + m * 128, map, full, tile.column + C_COLUMNS * (first + i), tile.row + m, matrix.x2, matrix.x3);
    }
  }

  KS_DEVICE void run(int first, int step) {
    if (first >= scheduler.total) return;
    Next next = find(first);
#pragma unroll 1
    for (int t = first; t < scheduler.total; t += step) {
      if (!AHEAD) next = find(t);
      const Operands x = operands(next);
      if (AHEAD && t + step < scheduler.total) next = find(t + step);
      const Boxes boxes = boxes_of(x.tile);
      if constexpr (OF_LISTS) of_list = maps_of_list(a, x.tile, last, 0, a.beta != 0 ? 3 : 2);
      if (Config::SUMMED) {
#pragma unroll 1
        for (int batch = 0; batch < a.batch_group; batch++)
#pragma unroll 1
          for (int head = 0; head < (Config::JOINED ? 1 : a.head_group); head++) {
            const TileCoord& p = x.tile;
            const Operands term = of_head(p, Config::JOINED ? 0 : p.head * a.head_group + head, p.batch * a.batch_group + batch);
#pragma unroll 1
            for (int s = 0; s < a.slices; s++) load_slice(term, boxes, s * BK);
          }
      } else if (SPLIT > 1) {
        const Part part = part_of(a.slices, split_rank);
#pragma unroll 1
        for (int s = 0; s < part.count; s++) load_slice(x, boxes, (part.first + s) * BK);
        if (split_rank) break;  // the first adds up
      } else {
        const int slices = slices_of(a, x.tile), from = first_of_k(a, x.tile);
#pragma unroll 1
        for (int s = 0; s < slices; s++) load_slice(x, boxes, from + s * BK);
      }
      if (!stores(x.tile)) continue;
      if (!Config::HEADS && !Config::PAIRS && a.beta != 0) load_source(c_map(), x.tile, c_matrix(a, x.tile));
      if (Config::RESIDUAL)
        load_source(maps.residual, x.tile, matrix_of(a, a.residual, x.tile, x.tile.head, a.residual_head, a.residual_batch));
    }
  }
};
