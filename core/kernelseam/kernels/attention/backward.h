// Fused attention backward: dq, dk, dv (and what the bias takes), deterministic or with atomics.
//
// With p = 2^(x − lse₂), x the scores in base 2 (scores.h), and delta = Σ dout·out of every row (row_delta.h):
//   dp = dout·vᵀ,  dx = p·(dp − delta),  ds = scale·dx (times the score's slope, as 1 − tanh² under a softcap),
//   dv = pᵀ·dout,  dk = dsᵀ·q,  dq = ds·k,  dbias = dx.
// (FlashAttention-2, Dao 2023, arXiv:2307.08691, algorithm 2.)
// Deterministic, the scores are computed twice so that no sum needs atomics: the first `key_blocks` blocks each own OWN keys of
// one KV head and walk over the queries of its group's heads, for dk and dv; the others each own OWN queries of one head
// and walk over the keys, for dq. With atomics (QUERY_ROWS) there are only the former: at each step they also make
// what OWN keys give to dq of STEP queries, and add it to float32 sums (query_sums.h). 5 products instead of 7.
// Blocks keep what they own in shared memory and take the other side in tiles of STEP rows through a ring of STAGES,
// copied ahead of use. Scores are computed with the owned rows as rows: so they are left factors as they are, each warp's own
// rows; or (SCORE_ROWS) warps divide the scores among them and hand p and ds on, rounded, in shared memory.
//
// Bytes of atomics: STEP·DQ·4 a step, for 10·OWN·STEP·D operations: 2.5·OWN operations a byte. At 400 TFLOP/s and OWN = 128
// they are 1.25 TB/s, at OWN = 64 (D = 256) 2.5 TB/s, of which L2 takes some 2 to 3 when a warp adds to whole lines.
// Would each warp add what its own rows give, it were WARPS times that.
//
// Shared memory: OWN·(DQ + DO)·size, STAGES·STEP·(DQ + DO)·size (twice where a tile lies differently as either factor),
// 4·STEP·4; 2·OWN·STEP·size for p and ds that are handed on, else for float32 WARPS·ROWS·STEP·4.
// Registers: (ROWS·(DQ + DO)/COLUMN_WARPS + 2·SCORE_ROWS·SCORE_COLUMNS)/lanes for dk, dv, p and dp; later dq in their place.
#include "attention/query_sums.h"
#include "attention/query_tiles.h"
#include "attention/sequences.h"
#include "attention/visible_tiles.h"

enum { BOTH, KEYS, QUERIES };
typedef Config::T T;
typedef Engine<T, T, Config::PRECISION> E;

constexpr int DO = (Config::DV + UNIT - 1) / UNIT * UNIT;
constexpr int ROWS = Config::ROWS, OWN = WARPS / COLUMN_WARPS * ROWS, STAGES = Config::STAGES;
constexpr int MINE_Q = DQ / COLUMN_WARPS, MINE_V = DO / COLUMN_WARPS;
constexpr int THREADS = WARP * WARPS, AHEAD = COPY_THROUGH_REGISTERS ? 1 : STAGES - 1;
static_assert(STAGES >= 2 || COPY_THROUGH_REGISTERS, "a copy that is in flight needs a stage of its own");

// Whether a bias's gradient has rows of queries that a sequence lacks: they are zeros, whatever lies there in the bias.
constexpr bool SHORT_PLANE = Config::BIAS_GRADIENT && Config::Q_VIEW == PACKED;
// Whether scores are handed on; how many of them a warp computes, and how many warps lie side by side over those of a step.
constexpr bool HANDED = Config::SCORE_ROWS > 0;
constexpr int SCORE_ROWS = HANDED ? Config::SCORE_ROWS : ROWS, SCORE_COLUMNS = HANDED ? OWN * STEP / WARPS / SCORE_ROWS : STEP;
constexpr int ACROSS = HANDED ? STEP / SCORE_COLUMNS : COLUMN_WARPS;
static_assert(!HANDED || SCORE_ROWS * SCORE_COLUMNS * WARPS == OWN * STEP, "warps divide the scores");
static_assert(HANDED || !ATOMIC, "dq sums over keys of other warps");
// Whether tiles that a mask_mod hides are passed over: a gradient by scores is written everywhere, zeros too.
constexpr bool SKIPS = Expression::HAS_MASK && !Config::BIAS_GRADIENT;

// A tile that is a factor both ways: its columns summed over (LAST), and its rows (FIRST).
template<int TILE_ROWS, int COLUMNS> struct TwoWays {
  typedef typename E::template Tile<TILE_ROWS, COLUMNS, true> Last;
  typedef typename E::template Tile<COLUMNS, TILE_ROWS, false> First;
  static constexpr int BYTES = Last::BYTES + (E::ONE_LAYOUT ? 0 : First::BYTES);
  char* memory;
  KS_DEVICE Last last() const { return Last(memory); }
  KS_DEVICE First first() const { return First(memory + (E::ONE_LAYOUT ? 0 : Last::BYTES)); }
};
template<class Tiles, bool EXACT> struct CopyTwoWays {
  Copy<typename Tiles::Last, THREADS, Config::VECTOR, EXACT> last;
  Copy<typename Tiles::First, THREADS, Config::VECTOR, EXACT> first;
  template<class View> KS_DEVICE void fetch(Tiles t, View v, int row0, int row_end, int columns) {
    last.fetch(t.last(), v, row0, row_end, 0, columns);
    if constexpr (!E::ONE_LAYOUT) first.fetch(t.first(), v, row0, row_end, 0, columns);
  }
  KS_DEVICE void land(Tiles t) {
    last.land(t.last());
    if constexpr (!E::ONE_LAYOUT) first.land(t.first());
  }
};

// What is owned: K, or Q, with atomics as a right factor too (FIRST); V, or dout. Only the former stays if left factors
// are in registers.
typedef E::Tile<OWN, DQ, true> OwnQ;
typedef E::Tile<DQ, OWN, false> OwnRight;
typedef E::Tile<OWN, DO, true> OwnV;
typedef TwoWays<STEP, DQ> StepQ;
typedef TwoWays<STEP, DO> StepV;
typedef E::Tile<OWN, STEP, true> P;
typedef TwoWays<OWN, STEP> Ds;
constexpr int KEPT = ATOMIC ? OwnRight::BYTES : 0, OWN_Q = E::ONE_LAYOUT ? 0 : KEPT;
constexpr int OWN_V = OWN_Q + OwnQ::BYTES, OWN_END = OWN_V + OwnV::BYTES;
constexpr int STAGE_BYTES = StepQ::BYTES + StepV::BYTES, P_BYTES = E::operand_bytes<ROWS, STEP>();
constexpr int RING = Config::RESIDENT ? KEPT : OWN_END, LINES = RING + STAGES * STAGE_BYTES, SCRATCH = LINES + 4 * STEP * 4;
constexpr int END = SCRATCH + (HANDED ? P::BYTES + (ATOMIC ? Ds::BYTES : Ds::Last::BYTES) : WARPS * P_BYTES);
static_assert(END <= Config::SHARED_BYTES && OWN_END <= Config::SHARED_BYTES, "the tiles fit");
static_assert(!Config::RESIDENT || E::MATRIX, "operands are registers");
constexpr int STAGED_BYTES = ROWS * (MINE_Q > MINE_V ? MINE_Q : MINE_V) * (int)sizeof(T);
static_assert(WARPS * STAGED_BYTES <= Config::SHARED_BYTES, "results are staged");

// x in base 2 less the row's LSE, as what exp2 takes: a row that sees nothing has no weight anywhere.
KS_DEVICE float lse_base2(float lse) { return lse == -infinity() ? infinity() : LOG2_E * lse; }

// dx times the score's slope. That of a user's score may be infinite or NaN where the score is −inf.
KS_DEVICE float steeper(float dx, float slope) { return Expression::HAS_SCORE && dx == 0.f ? 0.f : dx * slope; }

// sum += left · right over all of K, the left factor's rows from row0 and the right one's outer index from column0.
template<int K, int R, int C, class Left, class Right>
KS_DEVICE void add_product(E::Acc<R, C>& sum, Left left, int row0, Right right, int column0) {
#pragma unroll Config::UNROLL
  for (int k = 0; k < K; k += k_piece<E, K>())
    E::mma(sum, E::template operand<R, k_piece<E, K>()>(left, row0, k), right, column0, k);
}

struct At {
  int query, key;
};

template<int C> KS_DEVICE void write_rows(char* memory, const E::Acc<ROWS, C>& x, StridedView<T> to, int row0, int rows,
                                          int column0, int columns) {
  PlainTile<T, ROWS, C> staged(memory + warp_index() * STAGED_BYTES);  // the same place for any C: no other warp's
  E::to_shared(staged, x);
  warp_barrier();
  warp_copy_out<Config::VECTOR>(staged, to, row0, rows, column0, columns);
  warp_barrier();
}

// What a warp owns as left factors in registers; or nothing, and they are read again each time.
struct Nothing {};
template<class Q, class V> struct LeftFactors {
  Q q;
  V v;
};
KS_DEVICE auto left_factors(OwnQ q, OwnV v, int row0) {
  if constexpr (Config::RESIDENT) {
    auto x = E::template operand<SCORE_ROWS, DQ>(q, row0, 0);
    auto y = E::template operand<SCORE_ROWS, DO>(v, row0, 0);
    return LeftFactors<decltype(x), decltype(y)>{x, y};
  } else {
    return Nothing{};
  }
}

// ---- arguments of the body beside those of scores.h and sequences.h

// The gradient of a bias, its keys side by side.
struct BiasGradient {
  float* base;
  i64 batch, head, row;
};

// Tiles of OWN keys and of OWN queries, the longest sequence's counted; and how many blocks are for keys, where there are both.
struct Blocks {
  int key_tiles, query_tiles, for_keys;
};

KS_BODY(THREADS, Config::MIN_BLOCKS)
attention_backward_body(Matrices<const T> q, Matrices<const T> k, Matrices<const T> v, Matrices<const T> dout,
                        RowValues<const float> lse, RowValues<const float> delta, Matrices<T> dq, Matrices<T> dk,
                        Matrices<T> dv, float* sums, BiasGradient dbias, ScoreArguments score, Sequences sequences,
                        int num_heads, int head_group, Blocks blocks, float scale) {
  char* const memory = shared_memory<Config::SHARED_BYTES>();
  const OwnQ own_q(memory + OWN_Q);
  const OwnV own_v(memory + OWN_V);
  char* const ring = memory + RING;
  float* const lines = (float*)(memory + LINES);
  char* const scratch = memory + SCRATCH + warp_index() * P_BYTES;
  const P p_tile(memory + SCRATCH);
  const Ds ds_tile{memory + SCRATCH + P::BYTES};
  auto tile_q = [&](int stage) { return StepQ{ring + stage * STAGE_BYTES}; };
  auto tile_v = [&](int stage) { return StepV{ring + stage * STAGE_BYTES + StepQ::BYTES}; };
  const int warp_row = warp_index() / COLUMN_WARPS * ROWS, part = warp_index() % COLUMN_WARPS;
  const int score_row = warp_index() / ACROSS * SCORE_ROWS;
  const int score_column = HANDED ? warp_index() % ACROSS * SCORE_COLUMNS : 0;
  const bool for_keys = Config::ROLE == KEYS || (Config::ROLE == BOTH && (int)block_index() < blocks.for_keys);
  const int index = (int)block_index() - (Config::ROLE == BOTH && !for_keys ? blocks.for_keys : 0);
  const int tiles = for_keys ? blocks.key_tiles : blocks.query_tiles, heads = for_keys ? num_heads / head_group : num_heads;
  const int batch = index / tiles / heads, head = index / tiles % heads, own0 = index % tiles * OWN;
  const Sequence own = sequences.at(batch);
  const int most = for_keys ? sequences.S_k : sequences.S_q;  // rows of the gradient's operand, where lengths leave some out
  // Keys that no query sees get zeros; a bias's gradient is written everywhere, zeros too.
  const bool whole_plane = Config::BIAS_GRADIENT && (ATOMIC || !for_keys);
  const int needed = for_keys && !whole_plane ? (Config::KV_VIEW == PACKED ? own.S_k : most) : whole_plane ? most : own.S_q;
  if (own0 >= needed) return;

  // Without queries nothing is seen: not even a bias is there to be read.
  const int S_k_seen = SHORT_PLANE && !own.S_q ? 0 : own.S_k;
  Scores scores = score.of(batch, own.S_q, S_k_seen);
  // From its start in all of the batch to that of an entry: once, so that fewer strides are kept.
  auto entry = [&](auto& operand, int first, int row) { operand.base += batch * operand.batch + (i64)first * row; };
  entry(q, own.q_first, q.row);
  entry(dout, own.q_first, dout.row);
  entry(lse, own.q_first, 1);
  entry(delta, own.q_first, 1);
  entry(k, own.k_first, k.row);
  entry(v, own.k_first, v.row);
  if constexpr (HAS_BIAS) entry(score.bias, 0, 0);
  if (Config::BIAS_GRADIENT) entry(dbias, 0, 0);
  if (Config::MASK) entry(score.mask, 0, 0);
  if (Config::ALIBI) entry(score.slopes, 0, 0);
  auto of_head = [&](int h) {
    if constexpr (HAS_BIAS) scores.bias = score.bias.of(h);
    if (Config::MASK) scores.mask = score.mask.of(h);
    if (Config::ALIBI) scores.slopes = score.slopes.base + h * score.slopes.head, scores.slopes_head = 0;
    scores.user.first_head = h;
  };

  Copy<OwnQ, THREADS, Config::VECTOR, DQ == Config::DQK> copy_own_q;
  Copy<OwnV, THREADS, Config::VECTOR, DO == Config::DV> copy_own_v;
  CopyTwoWays<StepQ, DQ == Config::DQK> copy_q;
  CopyTwoWays<StepV, DO == Config::DV> copy_v;
  // What is owned, copied; and kept in registers, whose place in shared memory is then free.
  auto take = [&](StridedView<const T> Q, StridedView<const T> V, int row_end) {
    copy_own_q.fetch(own_q, Q, own0, row_end, 0, Config::DQK);
    copy_own_q.land(own_q);
    copy_own_v.fetch(own_v, V, own0, row_end, 0, Config::DV);
    copy_own_v.land(own_v);
    if constexpr (ATOMIC && !E::ONE_LAYOUT) {
      Copy<OwnRight, THREADS, Config::VECTOR, DQ == Config::DQK> copy;
      copy.fetch(OwnRight(memory), Q, own0, row_end, 0, Config::DQK);
      copy.land(OwnRight(memory));
    }
    if constexpr (Config::RESIDENT) {
      copies_commit();
      copies_wait<0>();
      block_barrier();
    }
    const auto owned = left_factors(own_q, own_v, score_row);
    if (Config::RESIDENT) block_barrier();
    return owned;
  };
  // Scores of the owned rows with a tile, and dp beside them.
  auto products = [&](auto& s, auto& dp, const auto& owned, int stage) {
    E::zero(s);
    E::zero(dp);
    if constexpr (Config::RESIDENT) {
      E::mma(s, owned.q, tile_q(stage).last(), score_column, 0);
      E::mma(dp, owned.v, tile_v(stage).last(), score_column, 0);
    } else {
      add_product<DQ>(s, own_q, score_row, tile_q(stage).last(), score_column);
      add_product<DO>(dp, own_v, score_row, tile_v(stage).last(), score_column);
    }
  };

  // sum += x · right, x being this warp's p or ds, or those of all warps as they were handed on.
  auto add_scores = [&](auto& sum, const auto& x, auto handed, auto right, int column0) {
    if constexpr (HANDED) add_product<STEP>(sum, handed, warp_row, right, column0);
    else E::mma(sum, E::to_operand(x, scratch), right, column0, 0);
  };
  // dbias of accumulators that begin at query i and key j; which of both their rows are, `at` tells.
  auto write_plane = [&](auto& dx, int h, int i, int j, auto at) {
    float* const to = dbias.base + h * dbias.head;
    E::map(dx, [&](int r, int c, float x) {
      const At place = at(r, c);
      if (i + place.query < sequences.S_q && j + place.key < sequences.S_k)
        to[(i + place.query) * dbias.row + j + place.key] = !SHORT_PLANE || i + place.query < own.S_q ? x : 0.f;
      return x;
    });
  };

  if (Config::ROLE != QUERIES && for_keys) {
    // ---- dk and dv of OWN keys
    const auto owned = take(k.rows(head), v.rows(head), own.S_k);
    // The queries that may see one of these keys: [begin, end).
    const int j1 = min_of(own0 + OWN, own.S_k) - 1, shift = scores.shift();
    const bool everyone = Config::PREFIX && own0 < scores.prefix;
    int begin = 0, end = own0 < own.S_k ? own.S_q : 0;
    if ((Config::CAUSAL || Config::WINDOW) && !everyone) {
      begin = max_of(0, own0 - shift - (Config::WINDOW ? score.right : 0));
      if (Config::WINDOW) end = min_of(end, max_of(0, j1 - shift + score.left + 1));
    }
    if (whole_plane) begin = 0, end = sequences.S_q;
    // Tiles [first, last) of every head's queries, head after head: the one that is used, and the one that is fetched.
    const int first = begin / STEP, last = divide_up(end, STEP);
    const QueryTiles group{head * head_group, first < last ? (head + 1) * head_group : 0, first, last};
    QueryTile ahead = group.begin(), now = ahead;
    // Of a mask_mod, tiles of which no query sees one of the keys are passed over: a walk over those of all heads.
    VisibleWalk<AHEAD> visible(0);
    auto seen = [&](int i) {
      const QueryTile asked = group.at(i);
      Scores of_asked = scores;
      of_asked.user.first_head = asked.head;
      return seen_by_mask(of_asked, 1, asked.tile * STEP, min_of(asked.tile * STEP + STEP, own.S_q) - 1, own0, j1);
    };
    auto fetch = [&](int stage) {
      if constexpr (SKIPS) ahead = group.at(visible.next(group.count(), seen));
      if (group.has(ahead)) {
        copy_q.fetch(tile_q(stage), q.rows(ahead.head), ahead.tile * STEP, own.S_q, Config::DQK);
        copy_v.fetch(tile_v(stage), dout.rows(ahead.head), ahead.tile * STEP, own.S_q, Config::DV);
        if constexpr (!SKIPS) group.advance(ahead);
      }
      copies_commit();
    };
#pragma unroll
    for (int n = 0; n < AHEAD; n++) fetch(n);

    if (ATOMIC) sums = warp_sums<Config::Q_VIEW == PACKED>(sums, batch, own.q_first, divide_up(sequences.S_q, STEP), num_heads);
    E::Acc<ROWS, MINE_Q> gradient_k;
    E::Acc<ROWS, MINE_V> gradient_v;
    E::zero(gradient_k);
    E::zero(gradient_v);
    int stage = 0;
#pragma unroll 1
    for (int parity = 0;; parity ^= 1) {
      bool whole = !Expression::HAS_MASK;  // as far as a mask_mod says it
      if constexpr (SKIPS) now = group.at(visible.index()), whole = visible.whole();
      if (!group.has(now)) break;
      const int h = now.head, i0 = now.tile * STEP;
      // Of the tile's queries: the LSE in base 2, and delta. Two sets, as warps may still read the one before.
      float* const line = lines + parity * 2 * STEP;
      for (int t = thread_index(); t < STEP; t += THREADS) {
        const bool there = i0 + t < own.S_q;
        line[t] = there ? lse_base2(lse.base[h * lse.head + i0 + t]) : infinity();
        line[STEP + t] = there ? delta.base[h * delta.head + i0 + t] : 0.f;
      }
      copies_wait<AHEAD - 1>();
      if (STAGES == 1) block_barrier();
      copy_q.land(tile_q(stage));
      copy_v.land(tile_v(stage));
      block_barrier();
      int next = stage + AHEAD;
      if (next >= STAGES) next -= STAGES;
      fetch(next);

      E::Acc<SCORE_ROWS, SCORE_COLUMNS> s, dp, slope;
      products(s, dp, owned, stage);
      of_head(h);
      const int j = own0 + score_row, i = i0 + score_column;
      const float* const mine = line + score_column;
      if constexpr (Scores::HAS_SLOPE) {
        slope = s;
        E::map(slope, [&](int r, int c, float x) { return scores.slope(x, 0, i + c, j + r); });
      }
      E::map(s, [&](int r, int c, float x) { return exp2_fast(scores.apply(x, 0, i + c, j + r) - mine[c]); });
      const int i1 = min_of(i0 + STEP, own.S_q) - 1;
      // Keys beyond the last have gradients that are not written; but dq must not take anything of them.
      if ((HAS_MASK || Config::LENGTHS || ATOMIC) &&
          !(scores.all(i0, i1).begin <= own0 && own0 + OWN <= scores.all(i0, i1).end && whole))
        E::map(s, [&](int r, int c, float x) { return scores.visible(0, i + c, j + r) ? x : 0.f; });
      if constexpr (HANDED) E::to_shared(p_tile, s, score_row, score_column);
      else add_scores(gradient_v, s, p_tile, tile_v(stage).first(), part * MINE_V);
      E::map2(dp, s, [&](int, int c, float x, float p) { return p == 0.f ? 0.f : p * (x - mine[STEP + c]); });
      if constexpr (Config::BIAS_GRADIENT && ATOMIC) write_plane(dp, h, i, j, [](int r, int c) { return At{c, r}; });
      if constexpr (Scores::HAS_SLOPE) E::map2(dp, slope, [](int, int, float x, float y) { return steeper(x, y); });
      if constexpr (HANDED) {
        E::to_shared(ds_tile.last(), dp, score_row, score_column);
        if constexpr (ATOMIC && !E::ONE_LAYOUT) E::to_shared(ds_tile.first(), dp, score_row, score_column);
        block_barrier();
        add_scores(gradient_v, s, p_tile, tile_v(stage).first(), part * MINE_V);
      }
      add_scores(gradient_k, dp, ds_tile.last(), tile_q(stage).first(), part * MINE_Q);
      if constexpr (ATOMIC) {
        E::Acc<QUERY_ROWS, QUERY_COLUMNS> sum;
        E::zero(sum);
        add_product<OWN>(sum, ds_tile.first(), sums_row(), OwnRight(memory), sums_column());
        // Behind the sequence's queries, where only the plane goes on, its sums have no tiles.
        if (!SHORT_PLANE || i0 < own.S_q) E::atomic_add(sums + sums_offset(now.tile, h, num_heads), sum);
      }
      if constexpr (!SKIPS) group.advance(now);
      if (++stage == STAGES) stage = 0;
    }
    copies_wait<0>();
    block_barrier();
    E::map(gradient_k, [=](int, int, float x) { return x * scale; });
    const int end_row = Config::KV_VIEW == PACKED ? own.S_k : most;
    entry(dk, own.k_first, dk.row);
    entry(dv, own.k_first, dv.row);
    write_rows(memory, gradient_k, dk.rows(head), own0 + warp_row, end_row, part * MINE_Q, Config::DQK);
    write_rows(memory, gradient_v, dv.rows(head), own0 + warp_row, end_row, part * MINE_V, Config::DV);
  } else if constexpr (Config::ROLE != KEYS) {
    // ---- dq of OWN queries
    const int kv_head = head / head_group;
    const StridedView<const T> K = k.rows(kv_head), V = v.rows(kv_head);
    const auto owned = take(q.rows(head), dout.rows(head), own.S_q);
    of_head(head);
    const int i1 = min_of(own0 + OWN, own.S_q) - 1;
    const KeyRange any = Config::BIAS_GRADIENT ? KeyRange{0, sequences.S_k} : scores.any(own0, i1), all = scores.all(own0, i1);
    const int first = any.begin / STEP, last = divide_up(any.end, STEP);
    VisibleWalk<AHEAD> visible(first);
    auto seen = [&](int tile) {
      return seen_by_mask(scores, 1, own0, i1, tile * STEP, min_of(tile * STEP + STEP, own.S_k) - 1);
    };
    auto fetch = [&](int tile, int stage) {
      if (tile < last) {
        copy_q.fetch(tile_q(stage), K, tile * STEP, own.S_k, Config::DQK);
        copy_v.last.fetch(tile_v(stage).last(), V, tile * STEP, own.S_k, 0, Config::DV);
      }
      copies_commit();
    };
    // The tile that is multiplied `ahead` steps after `tile`.
    auto fetch_ahead = [&](int tile, int ahead, int stage) {
      if constexpr (SKIPS) fetch(visible.next(last, seen), stage);
      else fetch(tile + ahead, stage);
    };
#pragma unroll
    for (int n = 0; n < AHEAD; n++) fetch_ahead(first, n, n);

    const int mine = own0 + score_row;
    E::Row<SCORE_ROWS> line, dot;
    E::fill(line, 0.f);
    E::row_map(line, [&](int r, float) {
      if (mine + r >= own.S_q) return infinity();
      return lse_base2(lse.base[head * lse.head + mine + r]);
    });
    E::fill(dot, 0.f);
    E::row_map(dot, [&](int r, float) {
      return mine + r < own.S_q ? delta.base[head * delta.head + mine + r] : 0.f;
    });
    E::Acc<ROWS, MINE_Q> gradient;
    E::zero(gradient);
    int stage = 0;
#pragma unroll 1
    for (int tile = first;; tile++) {
      bool whole = !Expression::HAS_MASK;  // as far as a mask_mod says it
      if constexpr (SKIPS) tile = visible.index(), whole = visible.whole();
      if (tile >= last) break;
      copies_wait<AHEAD - 1>();
      if (STAGES == 1) block_barrier();
      copy_q.land(tile_q(stage));
      copy_v.last.land(tile_v(stage).last());
      block_barrier();
      int next = stage + AHEAD;
      if (next >= STAGES) next -= STAGES;
      fetch_ahead(tile, AHEAD, next);

      const int j0 = tile * STEP, j = j0 + score_column;
      E::Acc<SCORE_ROWS, SCORE_COLUMNS> s, dp, slope;
      products(s, dp, owned, stage);
      if constexpr (Scores::HAS_SLOPE) {
        slope = s;
        E::map(slope, [&](int r, int c, float x) { return scores.slope(x, 0, mine + r, j + c); });
      }
      E::map(s, [&](int r, int c, float x) { return scores.apply(x, 0, mine + r, j + c); });
      E::row_apply(s, line, [](float x, float y) { return exp2_fast(x - y); });
      if (j0 < all.begin || j0 + STEP > all.end || !whole)
        E::map(s, [&](int r, int c, float x) { return scores.visible(0, mine + r, j + c) ? x : 0.f; });
      E::row_apply(dp, dot, [](float x, float y) { return x - y; });
      E::map2(dp, s, [](int, int, float x, float p) { return p == 0.f ? 0.f : p * x; });
      if constexpr (Config::BIAS_GRADIENT)
        if (HANDED || part == 0) write_plane(dp, head, mine, j, [](int r, int c) { return At{r, c}; });
      if constexpr (Scores::HAS_SLOPE) E::map2(dp, slope, [](int, int, float x, float y) { return steeper(x, y); });
      if constexpr (HANDED) {
        E::to_shared(ds_tile.last(), dp, score_row, score_column);
        block_barrier();
      }
      add_scores(gradient, dp, ds_tile.last(), tile_q(stage).first(), part * MINE_Q);
      if (++stage == STAGES) stage = 0;
    }
    copies_wait<0>();
    block_barrier();
    E::map(gradient, [=](int, int, float x) { return x * scale; });
    entry(dq, own.q_first, dq.row);
    write_rows(memory, gradient, dq.rows(head), own0 + warp_row, own.S_q, part * MINE_Q, Config::DQK);
  }
}
