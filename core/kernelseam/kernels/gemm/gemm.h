// Batched GEMM: C[i] = alpha · op(A[i]) · op(B[i]) + beta · C[i] for every matrix i of a strided batch or of a list
// of addresses, in one launch.
//
// Algorithm: the work is cut into BM×BN tiles of all the C's. As many blocks start as the device holds at once, and each
// takes every gridDim-th tile. Tiles of A and B come through shared memory in slices of BK, STAGES of them in a ring that
// runs on from one tile of C to the next: the first slices of the next tile are copied while this one is multiplied and
// written. Warps split a tile WARPS_M × WARPS_N; each holds its accumulators in registers. At the end of a tile alpha and
// beta are applied, the result is rounded once, laid out in shared memory and written in whole rows.
// Where KS_PERSISTENT is 0 there are as many blocks as tiles, each computes one, and the result is laid out where the ring
// was: less shared memory and fewer registers, for devices that rather hold several blocks at once.
//
// Constants (from the host half): KS_T, KS_TC (element types of A and B, and of C), KS_A_TRANSPOSED, KS_B_TRANSPOSED,
// KS_POINTERS, KS_VECTOR_A/B/C (bytes that rows are aligned to), KS_BM, KS_BN, KS_BK, KS_WARPS_M, KS_WARPS_N,
// KS_STAGES, KS_PERSISTENT, KS_MIN_BLOCKS, KS_SHARED_BYTES.
// Shared memory: STAGES · (BM + BN) · BK elements, and (or, not persistent, at least) BM · BN elements of C.
// Registers: BM·BN / threads accumulators, plus one slice's operands.
#include "tile/tile.h"

typedef KS_T T;
typedef KS_TC TC;
typedef Engine<T> E;
typedef E::Sum Sum;

constexpr int BM = KS_BM, BN = KS_BN, BK = KS_BK, WARPS_M = KS_WARPS_M, WARPS_N = KS_WARPS_N, STAGES = KS_STAGES;
constexpr int THREADS = WARP * WARPS_M * WARPS_N, WM = BM / WARPS_M, WN = BN / WARPS_N;
constexpr int AHEAD = COPY_THROUGH_REGISTERS ? 1 : STAGES - 1;
typedef E::Tile<BM, BK, !KS_A_TRANSPOSED> TileA;
typedef E::Tile<BN, BK, KS_B_TRANSPOSED> TileB;
typedef PlainTile<TC, WM, WN> TileC;
constexpr int STAGE_BYTES = TileA::BYTES + TileB::BYTES, RESULT = KS_PERSISTENT ? STAGES * STAGE_BYTES : 0;
static_assert(STAGES * STAGE_BYTES <= KS_SHARED_BYTES, "the ring fits");
static_assert(RESULT + WARPS_M * WARPS_N * TileC::BYTES <= KS_SHARED_BYTES, "the result fits");
static_assert(STAGES >= 2 || COPY_THROUGH_REGISTERS, "a copy that is in flight needs a stage of its own");

// Where alpha or K is 0 the host passes both as 0: A and B are then not read.
// a, b, c: the first matrices, or lists of addresses. Strides in elements.
KS_KERNEL(THREADS, KS_MIN_BLOCKS)
gemm(const void* a, const void* b, void* c, i64 a_batch, i64 a_head, i64 b_batch, i64 b_head, i64 c_batch, i64 c_head,
     int a_row, int b_row, int c_row, int M, int N, int K, int num_heads, int b_head_group, int tiles_m, int tiles_n,
     unsigned total, unsigned blocks, Sum alpha, Sum beta) {
  char* const memory = shared_memory<KS_SHARED_BYTES>();
  const int slices = divide_up(K, BK), warp_m = warp_index() % WARPS_M * WM, warp_n = warp_index() / WARPS_M * WN;

  // A tile of C, counted up without divisions: its place in its matrix, and its matrix.
  struct Place {
    int m, n, head, batch;
    // 1 where x passed its end, and x brought back.
    static KS_DEVICE int carry(int& x, int end) {
      const bool over = x >= end;
      x -= over ? end : 0;
      return over;
    }
    KS_DEVICE void operator+=(const Place& step) {  // by less than a grid of tiles
      m += step.m;
      n += step.n + carry(m, step.tiles_m);
      head += step.head + carry(n, step.tiles_n);
      batch += step.batch + carry(head, step.heads);
    }
    int tiles_m, tiles_n, heads;
  };
  auto place = [&](unsigned tile) {
    const unsigned strip = tile / tiles_m, matrix = strip / tiles_n, batch = matrix / num_heads;
    return Place{(int)(tile - strip * tiles_m), (int)(strip - matrix * tiles_n), (int)(matrix - batch * num_heads),
                 (int)batch, tiles_m, tiles_n, num_heads};
  };
  const Place step = KS_PERSISTENT ? place(blocks) : Place{};
  auto matrix_at = [&](auto base, const Place& at, i64 by_batch, i64 by_head, int group) {
    if (KS_POINTERS) return listed(base, (i64)at.batch * num_heads + at.head);
    return base + at.batch * by_batch + (group == 1 ? at.head : at.head / group) * by_head;
  };

  // The ring's far end: what is to be copied next.
  Copy<TileA, THREADS, KS_VECTOR_A, false> copy_a;
  Copy<TileB, THREADS, KS_VECTOR_B, false> copy_b;
  auto tile_a = [&](int stage) { return TileA(memory + stage * STAGE_BYTES); };
  auto tile_b = [&](int stage) { return TileB(memory + stage * STAGE_BYTES + TileA::BYTES); };
  unsigned next_tile = block_index();
  Place next = place(next_tile), at = next;
  int next_slice = 0, far = 0;
  StridedView<const T> A{nullptr, a_row}, B{nullptr, b_row};
  auto fetch = [&] {
    if (next_tile < total) {
      if (next_slice == 0) {
        A.base = matrix_at((const T*)a, next, a_batch, a_head, 1);
        B.base = matrix_at((const T*)b, next, b_batch, b_head, b_head_group);
      }
      const int k0 = next_slice * BK, m0 = next.m * BM, n0 = next.n * BN;
      if constexpr (TileA::K_LAST) copy_a.fetch(tile_a(far), A, m0, M, k0, K);
      else copy_a.fetch(tile_a(far), A, k0, K, m0, M);
      if constexpr (TileB::K_LAST) copy_b.fetch(tile_b(far), B, n0, N, k0, K);
      else copy_b.fetch(tile_b(far), B, k0, K, n0, N);
      if (++next_slice == slices) next_slice = 0, next_tile = KS_PERSISTENT ? next_tile + blocks : total, next += step;
    }
    if (++far == STAGES) far = 0;
    copies_commit();
  };
  if (slices)
#pragma unroll
    for (int s = 0; s < AHEAD; s++) fetch();

  int stage = 0;
  for (unsigned tile = block_index(); tile < total; tile += blocks, at += step) {
    E::Acc<WM, WN> acc;
    E::zero(acc);
    for (int slice = 0; slice < slices; slice++) {
      copies_wait<AHEAD - 1>();
      if (STAGES == 1) block_barrier();  // everyone has multiplied the slice that lay here
      copy_a.land(tile_a(stage));
      copy_b.land(tile_b(stage));
      block_barrier();  // this slice is visible to all, and the stage refilled below is no longer read
      fetch();
#pragma unroll
      for (int k = 0; k < BK; k += E::K_STEP) {
        const auto left = E::template operand<WM, E::K_STEP>(tile_a(stage), warp_m, k);
        E::mma(acc, left, tile_b(stage), warp_n, k);
      }
      if (++stage == STAGES) stage = 0;
    }

    const int row0 = at.m * BM + warp_m, col0 = at.n * BN + warp_n;
    const StridedView<TC> C{matrix_at((TC*)c, at, c_batch, c_head, 1), c_row};
    if (alpha != Sum(1)) E::map(acc, [=](int, int, Sum x) { return alpha * x; });
    if (beta != Sum(0))
      E::map(acc, [&](int i, int j, Sum x) {
        return row0 + i < M && col0 + j < N ? x + beta * (Sum)to_sum(C.row(row0 + i)[col0 + j]) : x;
      });
    TileC out(memory + RESULT + warp_index() * TileC::BYTES);
    if (KS_PERSISTENT) warp_barrier();  // the warp has written its last tile from here
    else block_barrier();  // the ring is no longer read
    E::to_shared(out, acc);
    warp_barrier();
    warp_copy_out<KS_VECTOR_C>(out, C, row0, M, col0, N);
    if (!KS_PERSISTENT) break;
  }
}
