// Fused attention backward: dq, dk, dv (and what the bias takes) in one launch, deterministic.
//
// With p = 2^(x − lse₂), x the scores in base 2 (scores.h), and dots = Σ dout·out of every row (row_dots.h):
//   dp = dout·vᵀ,  dx = p·(dp − dots),  ds = scale·dx (times 1 − tanh² under a softcap),
//   dv = pᵀ·dout,  dk = dsᵀ·q,  dq = ds·k,  dbias = dx.
// (FlashAttention-2, Dao 2023, arXiv:2307.08691, algorithm 2, with the scores made twice so that no sum needs atomics.)
// The first `key_blocks` blocks each own OWN keys of one KV head and walk over the queries of its group's heads, making dk
// and dv; the others each own OWN queries of one head and walk over the keys, making dq. Both keep what they own in shared
// memory and take the other side in tiles of STEP rows through a ring of STAGES, copied ahead of use. Scores are made with
// the owned rows as rows: so they are left factors as they are.
//
// Constants (from the host half): those of scores.h and sequences.h; KS_T, KS_DQK, KS_DV, KS_VECTOR, KS_BIAS_GRADIENT, KS_ROLE (which of the two blocks there are: one kernel for each needs fewer registers),
// KS_WARPS, KS_COLUMN_WARPS (warps that share their rows and make a part of the columns each), KS_ROWS (owned rows a warp),
// KS_STEP, KS_STAGES, KS_MIN_BLOCKS, KS_SHARED_BYTES.
// Shared memory: OWN·(DQ + DO)·size, STAGES·STEP·(DQ + DO)·size (twice where a tile lies differently as either factor),
// 4·STEP·4; for float32 also WARPS·ROWS·STEP·4.
// Registers: ROWS·((DQ + DO)/COLUMN_WARPS + 2·STEP)/lanes for dk, dv, p and dp.
#include "attention/sequences.h"

enum { BOTH, KEYS, QUERIES };
typedef KS_T T;
typedef Engine<T> E;

constexpr int WARPS = KS_WARPS, COLUMN_WARPS = KS_COLUMN_WARPS, UNIT = 16 * COLUMN_WARPS;
constexpr int DQ = (KS_DQK + UNIT - 1) / UNIT * UNIT, DO = (KS_DV + UNIT - 1) / UNIT * UNIT;
constexpr int ROWS = KS_ROWS, OWN = WARPS / COLUMN_WARPS * ROWS;
constexpr int STEP = KS_STEP, STAGES = KS_STAGES, MINE_Q = DQ / COLUMN_WARPS, MINE_V = DO / COLUMN_WARPS;
constexpr int THREADS = WARP * WARPS, AHEAD = COPY_THROUGH_REGISTERS ? 1 : STAGES - 1;
static_assert(STAGES >= 2 || COPY_THROUGH_REGISTERS, "a copy that is in flight needs a stage of its own");

// A tile of STEP rows that is a factor both ways: its columns summed over (LAST), and its rows (FIRST).
template<int D> struct TwoWays {
  typedef typename E::template Tile<STEP, D, true> Last;
  typedef typename E::template Tile<D, STEP, false> First;
  static constexpr int BYTES = Last::BYTES + (E::ONE_LAYOUT ? 0 : First::BYTES);
  char* memory;
  KS_DEVICE Last last() const { return Last(memory); }
  KS_DEVICE First first() const { return First(memory + (E::ONE_LAYOUT ? 0 : Last::BYTES)); }
};
template<int D, bool EXACT> struct CopyTwoWays {
  Copy<typename TwoWays<D>::Last, THREADS, KS_VECTOR, EXACT> last;
  Copy<typename TwoWays<D>::First, THREADS, KS_VECTOR, EXACT> first;
  template<class View> KS_DEVICE void fetch(TwoWays<D> t, View v, int row0, int row_end, int columns) {
    last.fetch(t.last(), v, row0, row_end, 0, columns);
    if constexpr (!E::ONE_LAYOUT) first.fetch(t.first(), v, row0, row_end, 0, columns);
  }
  KS_DEVICE void land(TwoWays<D> t) {
    last.land(t.last());
    if constexpr (!E::ONE_LAYOUT) first.land(t.first());
  }
};

typedef E::Tile<OWN, DQ, true> OwnQ;  // K, or Q
typedef E::Tile<OWN, DO, true> OwnV;  // V, or dout
constexpr int STAGE_BYTES = TwoWays<DQ>::BYTES + TwoWays<DO>::BYTES, P_BYTES = E::operand_bytes<ROWS, STEP>();
constexpr int RING = OwnQ::BYTES + OwnV::BYTES, LINES = RING + STAGES * STAGE_BYTES, SCRATCH = LINES + 4 * STEP * 4;
static_assert(SCRATCH + WARPS * P_BYTES <= KS_SHARED_BYTES, "the tiles fit");
constexpr int STAGED_BYTES = ROWS * (MINE_Q > MINE_V ? MINE_Q : MINE_V) * (int)sizeof(T);
static_assert(WARPS * STAGED_BYTES <= LINES, "results are staged");

// x in base 2 less the row's LSE, as what exp2 takes: a row that sees nothing has no weight anywhere.
KS_DEVICE float lse_base2(float lse) { return lse == -infinity() ? infinity() : LOG2_E * lse; }
// What a softcap's gradient is multiplied by, from the raw product.
KS_DEVICE float cap_slope(float x, const Scores& scores) {
  const float t = tanh_fast(x * scores.cap_inverse);
  return 1.f - t * t;
}

template<class P> struct Pointee;
template<class X> struct Pointee<X*> { typedef X type; };

template<int C> KS_DEVICE void write_rows(char* memory, const E::Acc<ROWS, C>& x, StridedView<T> to, int row0, int rows,
                                          int column0, int columns) {
  PlainTile<T, ROWS, C> staged(memory + warp_index() * STAGED_BYTES);  // the same place for any C: no other warp's
  E::to_shared(staged, x);
  warp_barrier();
  warp_copy_out<KS_VECTOR>(staged, to, row0, rows, column0, columns);
  warp_barrier();
}

KS_KERNEL(THREADS, KS_MIN_BLOCKS)
attention_backward(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* dots, T* dq, T* dk,
                   T* dv, float* dbias, const typename Choose<HAS_BIAS, KS_BIAS, float>::type* bias,
                   const unsigned char* mask, const float* slopes, const int* prefixes, const int* lengths,
                   const int* q_offsets, const int* k_offsets, i64 q_batch, i64 q_head, i64 k_batch, i64 k_head,
                   i64 v_batch, i64 v_head, i64 dout_batch, i64 dout_head, i64 dq_batch, i64 dq_head, i64 dk_batch,
                   i64 dk_head, i64 dv_batch, i64 dv_head, i64 lse_batch, i64 lse_head, i64 dots_batch, i64 dots_head,
                   i64 dbias_batch, i64 dbias_head, i64 dbias_row, i64 bias_batch, i64 bias_head, i64 bias_row,
                   i64 bias_column, i64 mask_batch, i64 mask_head, i64 mask_row, i64 mask_column, i64 slopes_batch,
                   i64 slopes_head, int q_row, int k_row, int v_row, int dout_row, int dq_row, int dk_row, int dv_row,
                   int num_heads, int head_group, int S_q_most, int S_k_most, int key_tiles, int query_tiles,
                   int key_blocks, int left, int right, float scale, float scale_log2, float cap, float cap_inverse) {
  char* const memory = shared_memory<KS_SHARED_BYTES>();
  const OwnQ own_q(memory);
  const OwnV own_v(memory + OwnQ::BYTES);
  char* const ring = memory + RING;
  float* const lines = (float*)(memory + LINES);
  char* const scratch = memory + SCRATCH + warp_index() * P_BYTES;
  auto tile_q = [&](int stage) { return TwoWays<DQ>{ring + stage * STAGE_BYTES}; };
  auto tile_v = [&](int stage) { return TwoWays<DO>{ring + stage * STAGE_BYTES + TwoWays<DQ>::BYTES}; };
  const int warp_row = warp_index() / COLUMN_WARPS * ROWS, part = warp_index() % COLUMN_WARPS;
  const bool for_keys = KS_ROLE == KEYS || (KS_ROLE == BOTH && (int)block_index() < key_blocks);
  const int index = (int)block_index() - (KS_ROLE == BOTH && !for_keys ? key_blocks : 0);
  const int tiles = for_keys ? key_tiles : query_tiles, heads = for_keys ? num_heads / head_group : num_heads;
  const int batch = index / tiles / heads, head = index / tiles % heads, own0 = index % tiles * OWN;
  const Sequence own = sequence_of(batch, S_q_most, S_k_most, q_offsets, k_offsets, lengths);
  const int most = for_keys ? S_k_most : S_q_most;  // rows of the gradient's operand, where lengths leave some out
  // Keys that no query sees get zeros; a bias's gradient is written everywhere, zeros too.
  const int needed = for_keys ? (KS_KV_VIEW == PACKED ? own.S_k : most) : KS_BIAS_GRADIENT ? most : own.S_q;
  if (own0 >= needed) return;

  Scores scores{own.S_q, own.S_k, left, right, KS_PREFIX ? min_of(max_of(prefixes[batch], 0), own.S_k) : 0,
                scale_log2, cap, cap_inverse};
  // From its start in all of the batch to that of an entry: once, so that fewer strides are kept.
  auto entry = [&](auto*& base, i64 batch_stride, int first, int row) { base += batch * batch_stride + (i64)first * row; };
  entry(q, q_batch, own.q_first, q_row);
  entry(dout, dout_batch, own.q_first, dout_row);
  entry(lse, lse_batch, own.q_first, 1);
  entry(dots, dots_batch, own.q_first, 1);
  entry(k, k_batch, own.k_first, k_row);
  entry(v, v_batch, own.k_first, v_row);
  if constexpr (HAS_BIAS) entry(bias, bias_batch, 0, 0);
  if (KS_BIAS_GRADIENT) entry(dbias, dbias_batch, 0, 0);
  if (KS_MASK) entry(mask, mask_batch, 0, 0);
  if (KS_ALIBI) entry(slopes, slopes_batch, 0, 0);
  auto of_head = [&](int h) {
    if constexpr (HAS_BIAS) scores.bias = {bias + h * bias_head, 0, (int)bias_row, (int)bias_column};
    if (KS_MASK) scores.mask = {mask + h * mask_head, 0, (int)mask_row, (int)mask_column};
    if (KS_ALIBI) scores.slopes = slopes + h * slopes_head, scores.slopes_head = 0;
  };
  auto rows_of = [](auto* base, int h, i64 head_stride, int row) {
    return StridedView<typename Pointee<decltype(base)>::type>{base + h * head_stride, row};
  };

  Copy<OwnQ, THREADS, KS_VECTOR, DQ == KS_DQK> copy_own_q;
  Copy<OwnV, THREADS, KS_VECTOR, DO == KS_DV> copy_own_v;
  CopyTwoWays<DQ, DQ == KS_DQK> copy_q;
  CopyTwoWays<DO, DO == KS_DV> copy_v;
  // Scores of the owned rows with a tile, and dp beside them.
  auto products = [&](auto& s, auto& dp, int stage) {
    E::zero(s);
    E::zero(dp);
#pragma unroll 4
    for (int d = 0; d < DQ; d += E::K_STEP)
      E::mma(s, E::template operand<ROWS, E::K_STEP>(own_q, warp_row, d), tile_q(stage).last(), 0, d);
#pragma unroll 4
    for (int d = 0; d < DO; d += E::K_STEP)
      E::mma(dp, E::template operand<ROWS, E::K_STEP>(own_v, warp_row, d), tile_v(stage).last(), 0, d);
  };

  if (KS_ROLE != QUERIES && for_keys) {
    // ---- dk and dv of OWN keys
    const StridedView<const T> K = rows_of(k, head, k_head, k_row), V = rows_of(v, head, v_head, v_row);
    copy_own_q.fetch(own_q, K, own0, own.S_k, 0, KS_DQK);
    copy_own_q.land(own_q);
    copy_own_v.fetch(own_v, V, own0, own.S_k, 0, KS_DV);
    copy_own_v.land(own_v);
    // The queries that may see one of these keys: [begin, end).
    const int j1 = min_of(own0 + OWN, own.S_k) - 1, shift = scores.shift();
    const bool everyone = KS_PREFIX && own0 < scores.prefix;
    int begin = 0, end = own0 < own.S_k ? own.S_q : 0;
    if ((KS_CAUSAL || KS_WINDOW) && !everyone) {
      begin = max_of(0, own0 - shift - (KS_WINDOW ? right : 0));
      if (KS_WINDOW) end = min_of(end, max_of(0, j1 - shift + left + 1));
    }
    // Tiles [first, last) of every head's queries, head after head: the one that is used, and the one that is fetched.
    const int first = begin / STEP, last = divide_up(end, STEP);
    struct Turn {
      int head, tile;
      KS_DEVICE void next(int first, int last) {
        if (++tile >= last) tile = first, head++;
      }
    };
    const int end_head = first < last ? (head + 1) * head_group : 0;
    Turn ahead{head * head_group, first}, now = ahead;
    auto fetch = [&](int stage) {
      if (ahead.head < end_head) {
        copy_q.fetch(tile_q(stage), rows_of(q, ahead.head, q_head, q_row), ahead.tile * STEP, own.S_q, KS_DQK);
        copy_v.fetch(tile_v(stage), rows_of(dout, ahead.head, dout_head, dout_row), ahead.tile * STEP, own.S_q, KS_DV);
        ahead.next(first, last);
      }
      copies_commit();
    };
#pragma unroll
    for (int n = 0; n < AHEAD; n++) fetch(n);

    E::Acc<ROWS, MINE_Q> gradient_k;
    E::Acc<ROWS, MINE_V> gradient_v;
    E::zero(gradient_k);
    E::zero(gradient_v);
    int stage = 0;
#pragma unroll 1
    for (int parity = 0; now.head < end_head; now.next(first, last), parity ^= 1) {
      const int h = now.head, i0 = now.tile * STEP;
      // Of the tile's queries: the LSE in base 2, and dots. Two sets, so that nobody still reads the one written.
      float* const line = lines + parity * 2 * STEP;
      for (int t = thread_index(); t < STEP; t += THREADS) {
        const bool there = i0 + t < own.S_q;
        line[t] = there ? lse_base2(lse[h * lse_head + i0 + t]) : infinity();
        line[STEP + t] = there ? dots[h * dots_head + i0 + t] : 0.f;
      }
      copies_wait<AHEAD - 1>();
      if (STAGES == 1) block_barrier();
      copy_q.land(tile_q(stage));
      copy_v.land(tile_v(stage));
      block_barrier();
      int next = stage + AHEAD;
      if (next >= STAGES) next -= STAGES;
      fetch(next);

      E::Acc<ROWS, STEP> s, dp, slope;
      products(s, dp, stage);
      of_head(h);
      const int j = own0 + warp_row;
      if constexpr (KS_SOFTCAP) {
        slope = s;
        E::map(slope, [&](int, int, float x) { return cap_slope(x, scores); });
      }
      E::map(s, [&](int r, int c, float x) { return exp2_fast(scores.score(x, 0, i0 + c, j + r) - line[c]); });
      const int i1 = min_of(i0 + STEP, own.S_q) - 1;
      if ((HIDES || KS_LENGTHS) && !(scores.all_begin(i1) <= own0 && own0 + OWN <= scores.all_end(i0)))
        E::map(s, [&](int r, int c, float x) { return scores.sees(0, i0 + c, j + r) ? x : 0.f; });
      E::mma(gradient_v, E::to_operand(s, scratch), tile_v(stage).first(), part * MINE_V, 0);
      E::map2(dp, s, [&](int, int c, float x, float p) { return p == 0.f ? 0.f : p * (x - line[STEP + c]); });
      if constexpr (KS_SOFTCAP) E::map2(dp, slope, [](int, int, float x, float y) { return x * y; });
      E::mma(gradient_k, E::to_operand(dp, scratch), tile_q(stage).first(), part * MINE_Q, 0);
      if (++stage == STAGES) stage = 0;
    }
    copies_wait<0>();
    block_barrier();
    E::map(gradient_k, [=](int, int, float x) { return x * scale; });
    const int end_row = KS_KV_VIEW == PACKED ? own.S_k : most;
    entry(dk, dk_batch, own.k_first, dk_row);
    entry(dv, dv_batch, own.k_first, dv_row);
    write_rows(memory, gradient_k, rows_of(dk, head, dk_head, dk_row), own0 + warp_row, end_row, part * MINE_Q, KS_DQK);
    write_rows(memory, gradient_v, rows_of(dv, head, dv_head, dv_row), own0 + warp_row, end_row, part * MINE_V, KS_DV);
  } else if constexpr (KS_ROLE != KEYS) {
    // ---- dq of OWN queries
    const int kv_head = head / head_group;
    const StridedView<const T> K = rows_of(k, kv_head, k_head, k_row), V = rows_of(v, kv_head, v_head, v_row);
    copy_own_q.fetch(own_q, rows_of(q, head, q_head, q_row), own0, own.S_q, 0, KS_DQK);
    copy_own_q.land(own_q);
    copy_own_v.fetch(own_v, rows_of(dout, head, dout_head, dout_row), own0, own.S_q, 0, KS_DV);
    copy_own_v.land(own_v);
    of_head(head);
    const int i1 = min_of(own0 + OWN, own.S_q) - 1;
    const int begin = KS_BIAS_GRADIENT ? 0 : scores.begin(own0), end = KS_BIAS_GRADIENT ? S_k_most : scores.end(i1);
    const int first = begin / STEP, last = divide_up(end, STEP);
    auto fetch = [&](int tile, int stage) {
      if (tile < last) {
        copy_q.fetch(tile_q(stage), K, tile * STEP, own.S_k, KS_DQK);
        copy_v.last.fetch(tile_v(stage).last(), V, tile * STEP, own.S_k, 0, KS_DV);
      }
      copies_commit();
    };
#pragma unroll
    for (int n = 0; n < AHEAD; n++) fetch(first + n, n);

    const int mine = own0 + warp_row;
    E::Row<ROWS> line, dot;
    E::fill(line, 0.f);
    E::row_map(line, [&](int r, float) {
      if (mine + r >= own.S_q) return infinity();
      return lse_base2(lse[head * lse_head + mine + r]);
    });
    E::fill(dot, 0.f);
    E::row_map(dot, [&](int r, float) {
      return mine + r < own.S_q ? dots[head * dots_head + mine + r] : 0.f;
    });
    E::Acc<ROWS, MINE_Q> gradient;
    E::zero(gradient);
    int stage = 0;
#pragma unroll 1
    for (int tile = first; tile < last; tile++) {
      copies_wait<AHEAD - 1>();
      if (STAGES == 1) block_barrier();
      copy_q.land(tile_q(stage));
      copy_v.last.land(tile_v(stage).last());
      block_barrier();
      int next = stage + AHEAD;
      if (next >= STAGES) next -= STAGES;
      fetch(tile + AHEAD, next);

      const int j0 = tile * STEP;
      E::Acc<ROWS, STEP> s, dp, slope;
      products(s, dp, stage);
      if constexpr (KS_SOFTCAP) {
        slope = s;
        E::map(slope, [&](int, int, float x) { return cap_slope(x, scores); });
      }
      E::map(s, [&](int r, int c, float x) { return scores.score(x, 0, mine + r, j0 + c); });
      E::row_apply(s, line, [](float x, float y) { return exp2_fast(x - y); });
      if (j0 < scores.all_begin(i1) || j0 + STEP > scores.all_end(own0))
        E::map(s, [&](int r, int c, float x) { return scores.sees(0, mine + r, j0 + c) ? x : 0.f; });
      E::row_apply(dp, dot, [](float x, float y) { return x - y; });
      E::map2(dp, s, [](int, int, float x, float p) { return p == 0.f ? 0.f : p * x; });
      if constexpr (KS_BIAS_GRADIENT) {
        float* const to = dbias + head * dbias_head;
        if (part == 0)
          E::map(dp, [&](int r, int c, float x) {
            if (mine + r < S_q_most && j0 + c < S_k_most) to[(mine + r) * dbias_row + j0 + c] = x;
            return x;
          });
      }
      if constexpr (KS_SOFTCAP) E::map2(dp, slope, [](int, int, float x, float y) { return x * y; });
      E::mma(gradient, E::to_operand(dp, scratch), tile_q(stage).first(), part * MINE_Q, 0);
      if (++stage == STAGES) stage = 0;
    }
    copies_wait<0>();
    block_barrier();
    E::map(gradient, [=](int, int, float x) { return x * scale; });
    entry(dq, dq_batch, own.q_first, dq_row);
    write_rows(memory, gradient, rows_of(dq, head, dq_head, dq_row), mine, own.S_q, part * MINE_Q, KS_DQK);
  }
}
