// Fused attention forward: out = softmax(scale · q·kᵀ) · v, and optionally the log-sum-exp of every row, in one launch.
//
// Algorithm (FlashAttention-2, Dao 2023, arXiv:2307.08691): a block owns BM = WARPS · ROWS queries of one head and walks
// over the keys in tiles of BN. Each warp keeps ROWS rows of the output, their running maximum m and sum l:
//   s = q·kᵀ;  m' = max(m, max s);  p = 2^(c·(s − m'));  l = l·2^(c·(m − m')) + Σp;  o = o·2^(c·(m − m')) + p·v
// with c = |scale|·log2 e. At the end out = o / l and lse = ln 2 · (c·m + log2 l). Tiles of keys that every query of the
// block sees whole take a way without masks. K and V come through a ring of STAGES tiles, copied ahead of use.
//
// Causal, aligned at the bottom right: key j is visible to query i iff j ≤ i + (S_k − S_q).
// A row that sees no key gives zeros and an LSE of −inf. What is masked cannot reach a row, even where V holds NaN or
// inf there: such a tile of V is multiplied with its non-finite values taken out, which are then given to the rows
// that see them.
//
// Constants (from the host half): KS_T, KS_DQK, KS_DV, KS_CAUSAL, KS_LSE, KS_VECTOR, KS_WARPS, KS_ROWS (queries a warp),
// KS_BN, KS_STAGES, KS_Q_RESIDENT (the queries stay in registers), KS_MIN_BLOCKS, KS_SHARED_BYTES.
// Shared memory: BM · max(DQ, DO) + STAGES · BN · (DQ + DO) elements, DQ and DO being the head dims rounded up to 16;
// for float32 also BM · BN.
// Registers: ROWS·(DO + BN)/lanes for o and s, ROWS·DQ/(2·lanes) more for queries that stay.
#include "tile/tile.h"

typedef KS_T T;
typedef Engine<T> E;
typedef E::Sum Sum;

constexpr int DQ = (KS_DQK + 15) / 16 * 16, DO = (KS_DV + 15) / 16 * 16;
constexpr int WARPS = KS_WARPS, ROWS = KS_ROWS, BM = WARPS * ROWS, BN = KS_BN, STAGES = KS_STAGES;
constexpr int THREADS = WARP * WARPS;
constexpr int AHEAD = COPY_THROUGH_REGISTERS ? 1 : STAGES - 1;
typedef E::Tile<BM, DQ, true> TileQ;
typedef E::Tile<BN, DQ, true> TileK;   // product over the head dim, which is contiguous
typedef E::Tile<DO, BN, false> TileV;  // product over the keys, which are the rows
typedef PlainTile<T, ROWS, DO> TileO;
constexpr int Q_BYTES = TileQ::BYTES > WARPS * TileO::BYTES ? TileQ::BYTES : WARPS * TileO::BYTES;
constexpr int STAGE_BYTES = TileK::BYTES + TileV::BYTES, P_BYTES = E::operand_bytes<ROWS, BN>();
static_assert(Q_BYTES + STAGES * STAGE_BYTES + WARPS * P_BYTES <= KS_SHARED_BYTES, "the tiles fit");
static_assert(STAGES >= 2 || COPY_THROUGH_REGISTERS, "a copy that is in flight needs a stage of its own");

constexpr float LARGEST = 3.4028234663852886e38f;
KS_DEVICE float minimum(float a, float b) { return -maximum(-a, -b); }

KS_KERNEL(THREADS, KS_MIN_BLOCKS)
attention_forward(const T* q, const T* k, const T* v, T* out, float* lse, i64 q_batch, i64 q_head, i64 k_batch,
                  i64 k_head, i64 v_batch, i64 v_head, i64 out_batch, i64 out_head, i64 lse_batch, i64 lse_head,
                  int q_row, int k_row, int v_row, int out_row, int num_heads, int head_group, int S_q, int S_k,
                  int q_tiles, float scale_log2) {
  char* const memory = shared_memory<KS_SHARED_BYTES>();
  const int head = block_index() / q_tiles % num_heads, batch = block_index() / q_tiles / num_heads;
  // Under a causal mask the last queries have most to do: they start first.
  const int turn = block_index() % q_tiles, q0 = (KS_CAUSAL ? q_tiles - 1 - turn : turn) * BM;
  const StridedView<const T> Q{q + batch * q_batch + head * q_head, q_row};
  const StridedView<const T> K{k + batch * k_batch + head / head_group * k_head, k_row};
  const StridedView<const T> V{v + batch * v_batch + head / head_group * v_head, v_row};
  const StridedView<T> O{out + batch * out_batch + head * out_head, out_row};

  // Keys [0, whole) are seen by every query of the block, [whole, end) by some.
  const int shift = S_k - S_q;
  const int end = KS_CAUSAL ? min_of(S_k, max_of(0, min_of(q0 + BM, S_q) + shift)) : S_k;
  const int whole = KS_CAUSAL ? min_of(end, max_of(0, q0 + shift + 1)) : S_k;
  const int tiles = divide_up(end, BN), whole_tiles = whole / BN;

  const TileQ tile_q(memory);
  char* const ring = memory + Q_BYTES;
  char* const scratch = ring + STAGES * STAGE_BYTES + warp_index() * P_BYTES;
  auto tile_k = [&](int stage) { return TileK(ring + stage * STAGE_BYTES); };
  auto tile_v = [&](int stage) { return TileV(ring + stage * STAGE_BYTES + TileK::BYTES); };

  Copy<TileQ, THREADS, KS_VECTOR, DQ == KS_DQK> copy_q;
  Copy<TileK, THREADS, KS_VECTOR, DQ == KS_DQK> copy_k;
  Copy<TileV, THREADS, KS_VECTOR, DO == KS_DV> copy_v;
  auto fetch = [&](int tile, int stage) {
    if (tile < tiles) {
      copy_k.fetch(tile_k(stage), K, tile * BN, S_k, 0, KS_DQK);
      copy_v.fetch(tile_v(stage), V, tile * BN, S_k, 0, KS_DV);
    }
    copies_commit();
  };
  copy_q.fetch(tile_q, Q, q0, S_q, 0, KS_DQK);
  copy_q.land(tile_q);
  copies_commit();
#pragma unroll
  for (int s = 0; s < AHEAD; s++) fetch(s, s);

  const int row0 = q0 + warp_index() * ROWS;
  // A scale that is not positive is applied to the scores themselves, so that masks stay −∞ and the largest score wins.
  const float c = scale_log2 > 0 ? scale_log2 : scale_log2 < 0 ? -scale_log2 : 1.f;
  E::Acc<ROWS, DO> o;
  E::Row<ROWS> m, l;
  E::zero(o);
  E::fill(m, -infinity());
  E::fill(l, 0.f);

  constexpr int Q_STEP = KS_Q_RESIDENT ? DQ : E::K_STEP;
  copies_wait<AHEAD>();
  block_barrier();
  auto q_operand = E::template operand<ROWS, Q_STEP>(tile_q, warp_index() * ROWS, 0);

  int stage = 0;
  auto step = [&](int tile, auto masked) {
    copies_wait<AHEAD - 1>();
    if (STAGES == 1) block_barrier();  // everyone has used the tile that lay here
    copy_k.land(tile_k(stage));
    copy_v.land(tile_v(stage));
    block_barrier();  // this tile is visible to all, and the stage refilled below is no longer read
    int next = stage + AHEAD;
    if (next >= STAGES) next -= STAGES;
    fetch(tile + AHEAD, next);

    E::Acc<ROWS, BN> s;
    E::zero(s);
#pragma unroll 4  // all of a wide head dim at once would take more registers than there are
    for (int d = 0; d < DQ; d += Q_STEP) {
      if (!KS_Q_RESIDENT) q_operand = E::template operand<ROWS, Q_STEP>(tile_q, warp_index() * ROWS, d);
      E::mma(s, q_operand, tile_k(stage), 0, d);
    }
    if (scale_log2 <= 0) E::map(s, [=](int, int, float x) { return scale_log2 < 0 ? -x : 0 * x; });
    if constexpr (masked.value) {
      const int j0 = tile * BN;
      E::map(s, [&](int i, int j, float x) {
        const bool visible = j0 + j < S_k && (!KS_CAUSAL || j0 + j <= row0 + i + shift);
        return visible ? x : -infinity();
      });
    }

    E::Row<ROWS> top, base, fade;
    E::row_max(top, s);
    E::zip(top, top, m, [](float x, float y) { return maximum(x, y); });
    E::zip(base, top, top, [=](float x, float) { return x == -infinity() ? 0.f : x * c; });
    E::zip(fade, m, base, [=](float x, float y) { return exp2_fast(x * c - y); });
    m = top;
    E::row_apply(s, base, [=](float x, float y) { return exp2_fast(x * c - y); });
    E::zip(l, l, fade, [](float x, float y) { return x * y; });
    E::row_add_partial(l, s);
    E::row_apply(o, fade, [](float x, float y) { return x * y; });
    const auto p = E::to_operand(s, scratch);
    bool hidden = false;  // whether values that some rows must not see had to be taken out
    if constexpr (KS_CAUSAL && masked.value) hidden = block_any(take_out_non_finite<THREADS>(tile_v(stage)));
    E::mma(o, p, tile_v(stage), 0, 0);
    if (hidden) {
#pragma unroll 1
      for (int j = tile * BN; j < min_of(tile * BN + BN, S_k); j++)
        E::map(o, [&](int i, int d, float x) {
          if constexpr (SCALAR_CONDITIONS) {
            // A row that does not see key j takes again what it had of its last one: that changes no class of a number.
            const int seen = max_of(min_of(j, row0 + i + shift), 0);
            const float y = to_sum(V.row(seen)[min_of(d, KS_DV - 1)]);  // columns beyond the last are not written
            return x + (y - minimum(maximum(y, -LARGEST), LARGEST));    // y − y where it is finite, else y
          } else {
            if (j > row0 + i + shift || d >= KS_DV) return x;
            const float y = to_sum(V.row(j)[d]);
            return finite(y) ? x : x + y;
          }
        });
    }
    if (++stage == STAGES) stage = 0;
  };
  int tile = 0;
  for (; tile < whole_tiles; tile++) step(tile, Flag<false>{});
  for (; tile < tiles; tile++) step(tile, Flag<true>{});
  copies_wait<0>();

  E::row_finish_sum(l);
  E::Row<ROWS> inverse;
  E::zip(inverse, l, l, [](float x, float) { return x == 0.f ? 0.f : 1.f / x; });
  E::row_apply(o, inverse, [](float x, float y) { return SCALAR_CONDITIONS && y == 0.f ? 0.f : x * y; });
  if (KS_LSE) {
    float* const rows = lse + batch * lse_batch + head * lse_head;
    E::zip(m, m, l, [=](float x, float y) { return y == 0.f ? -infinity() : 0.69314718056f * (x * c + log2_fast(y)); });
    E::each_row(m, [&](int i, float x) { if (row0 + i < S_q) rows[row0 + i] = x; });
  }
  block_barrier();  // the queries are no longer read
  TileO staged(memory + warp_index() * TileO::BYTES);
  E::to_shared(staged, o);
  warp_barrier();
  warp_copy_out<KS_VECTOR>(staged, O, row0, S_q, 0, KS_DV);
}
