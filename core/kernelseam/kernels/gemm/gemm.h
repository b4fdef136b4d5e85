// Batched GEMM: C[i] = alpha · op(A[i]) · op(B[i]) + beta · C[i] for every matrix i of a strided batch or of a list
// of addresses, in one launch.
//
// Algorithm: a block computes one BM×BN tile of one C. Tiles of A and B come through shared memory in slices of BK,
// STAGES of them in a ring: the copy of a later slice runs while an earlier one is multiplied. Warps split the tile
// WARPS_M × WARPS_N; each holds its accumulators in registers. At the end alpha and beta are applied, the result is
// rounded once, laid out in shared memory and written in whole rows.
//
// Constants (from the host half): KS_T, KS_TC (element types of A and B, and of C), KS_A_TRANSPOSED, KS_B_TRANSPOSED,
// KS_POINTERS, KS_VECTOR_A/B/C (bytes that rows are aligned to), KS_BM, KS_BN, KS_BK, KS_WARPS_M, KS_WARPS_N,
// KS_STAGES, KS_MIN_BLOCKS, KS_SHARED_BYTES.
// Shared memory: STAGES · (BM + BN) · BK elements, or BM · BN elements of C, whichever is more.
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
constexpr int STAGE_BYTES = TileA::BYTES + TileB::BYTES;
static_assert(STAGES * STAGE_BYTES <= KS_SHARED_BYTES, "the ring fits");
static_assert(WARPS_M * WARPS_N * TileC::BYTES <= KS_SHARED_BYTES, "the result fits");
static_assert(STAGES >= 2 || COPY_THROUGH_REGISTERS, "a copy that is in flight needs a stage of its own");

// Where alpha or K is 0 the host passes both as 0: A and B are then not read.
// a, b, c: the first matrices, or lists of addresses. Strides in elements.
KS_KERNEL(THREADS, KS_MIN_BLOCKS)
gemm(const void* a, const void* b, void* c, i64 a_batch, i64 a_head, i64 b_batch, i64 b_head, i64 c_batch, i64 c_head,
     int a_row, int b_row, int c_row, int M, int N, int K, int num_heads, int b_head_group, int tiles_m, int tiles_n,
     Sum alpha, Sum beta) {
  char* const memory = shared_memory<KS_SHARED_BYTES>();
  const unsigned tiles = (unsigned)tiles_m * tiles_n, matrix = block_index() / tiles, tile = block_index() % tiles;
  const int m0 = (int)(tile % tiles_m) * BM, n0 = (int)(tile / tiles_m) * BN;

  StridedView<const T> A{}, B{};
  StridedView<TC> C{};
  if (KS_POINTERS) {
    if (K > 0) A = {((const T* const*)a)[matrix], a_row}, B = {((const T* const*)b)[matrix], b_row};
    C = {((TC* const*)c)[matrix], c_row};
  } else {
    const int batch = matrix / num_heads, head = matrix % num_heads;
    A = {(const T*)a + batch * a_batch + head * a_head, a_row};
    B = {(const T*)b + batch * b_batch + head / b_head_group * b_head, b_row};
    C = {(TC*)c + batch * c_batch + head * c_head, c_row};
  }

  Copy<TileA, THREADS, KS_VECTOR_A, false> copy_a;
  Copy<TileB, THREADS, KS_VECTOR_B, false> copy_b;
  auto tile_a = [&](int stage) { return TileA(memory + stage * STAGE_BYTES); };
  auto tile_b = [&](int stage) { return TileB(memory + stage * STAGE_BYTES + TileA::BYTES); };
  auto fetch = [&](int slice, int stage) {
    const int k0 = slice * BK;
    if (k0 < K) {
      if constexpr (TileA::K_LAST) copy_a.fetch(tile_a(stage), A, m0, M, k0, K);
      else copy_a.fetch(tile_a(stage), A, k0, K, m0, M);
      if constexpr (TileB::K_LAST) copy_b.fetch(tile_b(stage), B, n0, N, k0, K);
      else copy_b.fetch(tile_b(stage), B, k0, K, n0, N);
    }
    copies_commit();
  };

  const int warp_m = warp_index() % WARPS_M * WM, warp_n = warp_index() / WARPS_M * WN;
  E::Acc<WM, WN> acc;
  E::zero(acc);

  const int slices = divide_up(K, BK);
#pragma unroll
  for (int s = 0; s < AHEAD; s++) fetch(s, s);
  int stage = 0;
  for (int slice = 0; slice < slices; slice++) {
    copies_wait<AHEAD - 1>();
    if (STAGES == 1) block_barrier();  // everyone has multiplied the slice that lay here
    copy_a.land(tile_a(stage));
    copy_b.land(tile_b(stage));
    block_barrier();  // this slice is visible to all, and the stage refilled below is no longer read
    int next = stage + AHEAD;
    if (next >= STAGES) next -= STAGES;
    fetch(slice + AHEAD, next);
#pragma unroll
    for (int k = 0; k < BK; k += E::K_STEP) {
      const auto left = E::template operand<WM, E::K_STEP>(tile_a(stage), warp_m, k);
      E::mma(acc, left, tile_b(stage), warp_n, k);
    }
    if (++stage == STAGES) stage = 0;
  }

  E::map(acc, [=](int, int, Sum x) { return alpha * x; });
  if (beta != Sum(0))
    E::map(acc, [&](int i, int j, Sum x) {
      const int row = m0 + warp_m + i, col = n0 + warp_n + j;
      return row < M && col < N ? x + beta * (Sum)to_sum(C.row(row)[col]) : x;
    });
  copies_wait<0>();
  block_barrier();  // the ring is no longer read
  TileC out(memory + warp_index() * TileC::BYTES);
  E::to_shared(out, acc);
  warp_barrier();
  warp_copy_out<KS_VECTOR_C>(out, C, m0 + warp_m, M, n0 + warp_n, N);
}
