// Fused attention forward: out = softmax(scores) · v, and optionally the log-sum-exp of every row, in one launch.
//
// Algorithm (FlashAttention-2, Dao 2023, arXiv:2307.08691): a block owns BM queries of one head and walks over the keys in
// tiles of BN. Each warp keeps ROWS rows of the output, their reference m and sum l:
//   s = scores;  m' = max(m, max s);  p = 2^(c·(s − m'));  f = 2^(c·(m − m'));  l = l·f + Σp;  o = o·f + p·v
// m is a reference, not always the maximum: it stays while no score exceeds it by more than REFERENCE_RISE in base 2, so that
// outputs are rarely rescaled; any m cancels (docs/accuracy.md). Where a platform's sums begin anywhere at no cost, q·k begins
// with −m (start.h). At the end out = o / l and lse = ln 2 · (c·m + log2 l).
// Where a score is but scale·q·k, s = q·k and c = |scale|·log2 e; else s is the score in base 2 (scores.h) and c = 1. An
// attention sink is a key of value 0, the state's first.
// Tiles of keys that every query of the block sees whole take a way without masks. K and V come through a ring of STAGES
// tiles, copied ahead of use. What is masked cannot reach a row, even where V holds NaN or inf there: such a tile of V is
// multiplied with its non-finite values taken out, which are then given to the rows that see them.
//
// COLUMN_WARPS warps share the same rows, each computing its part of the output's columns (a wide head fits no warp alone).
// `splits` blocks share the same queries: each walks over a part of the keys and writes its own out and lse.
//
// Shared memory: BM·max(DQ·size, DO·size_out) + STAGES·BN·(DQ + DO)·size, with Q_RETURNED the larger of both, DQ and DO being
// the head dims rounded up to 16 (DO to 16·COLUMN_WARPS), and size that of queries, too, where they are of 8 bits and the platform
// keeps them so; for float32 also WARPS·ROWS·BN·size; with scales of blocks STAGES·BN·8. In the ring size is that of keys as the
// platform keeps them.
// Registers: ROWS·(DO/COLUMN_WARPS + BN)/lanes for o and s, ROWS·DQ/(2·lanes) more for queries that stay.
#include "attention/fp8.h"
#include "attention/start.h"
#include "attention/visible_tiles.h"

typedef Config::T T;
typedef Config::OUT Out;
typedef Engine<T, T, Config::PRECISION> E;
typedef Engine<T, KV, Config::PRECISION> EV;  // of products with keys and values as they are stored

constexpr int WARPS = Config::WARPS, COLUMN_WARPS = Config::COLUMN_WARPS, UNIT = 16 * COLUMN_WARPS;
constexpr int DQ = (Config::DQK + 15) / 16 * 16, DO = (Config::DV + UNIT - 1) / UNIT * UNIT;
constexpr int ROWS = Config::ROWS, BM = WARPS / COLUMN_WARPS * ROWS;
constexpr int BN = Config::BN, STAGES = Config::STAGES, MINE = DO / COLUMN_WARPS;
constexpr int THREADS = WARP * WARPS;
// Keys and values share a stage: a step's values come while its scores are computed, the next step's keys while its values are
// multiplied. That is a second barrier a step, for shared memory of half the size, thus for another block on a compute unit.
constexpr bool SHARED_STAGE = Config::SHARED_STAGE;
// Whether a warp's sums leave a thread about 60 registers.
constexpr bool SUMS_FILL_REGISTERS = ROWS * (MINE + BN) / WARP >= 192;
constexpr int AHEAD = COPY_THROUGH_REGISTERS || SHARED_STAGE ? 1 : STAGES - 1;
typedef Engine<T, Query, Config::PRECISION>::Tile<BM, DQ, true> TileQ;
typedef EV::Tile<BN, DQ, true> TileK;   // product over the head dim, which is contiguous
typedef EV::Tile<DO, BN, false> TileV;  // product over the keys, which are the rows
typedef PlainTile<Out, ROWS, MINE> TileO;
constexpr int Q_BYTES = TileQ::BYTES > WARPS * TileO::BYTES ? TileQ::BYTES : WARPS * TileO::BYTES;
constexpr int STAGE_BYTES = TileK::BYTES + TileV::BYTES, P_BYTES = E::operand_bytes<ROWS, BN>();
typedef ScaleRing<BN, THREADS> KeyScales;
constexpr int SCALE_BYTES = Config::KV_SCALES == BLOCK_SCALES ? STAGES * KeyScales::STAGE * 4 : 0;
// Where the ring begins and ends. What lands in it goes through registers where it takes the queries' place: none before all have
// theirs.
constexpr int RING = Config::Q_RETURNED ? 0 : Q_BYTES;
constexpr int RING_END = RING + STAGES * STAGE_BYTES > Q_BYTES ? RING + STAGES * STAGE_BYTES : Q_BYTES;
static_assert(RING_END + WARPS * P_BYTES + SCALE_BYTES <= Config::SHARED_BYTES, "the tiles fit");
static_assert(!Config::Q_RETURNED || (Config::Q_RESIDENT && COPY_THROUGH_REGISTERS), "queries that are in registers, and a later ring");
static_assert(STAGES >= 2 || COPY_THROUGH_REGISTERS || SHARED_STAGE, "a copy that is in flight needs a stage of its own");
static_assert(!SHARED_STAGE || (STAGES == 1 && !COPY_THROUGH_REGISTERS), "one place for keys, one for values");
static_assert(!SHARED_STAGE || Config::KV_SCALES != BLOCK_SCALES, "scales of blocks need a ring of keys and values together");
static_assert(WARPS % COLUMN_WARPS == 0, "warps share rows evenly");

// Whether sums begin with references: those of plain scores.
constexpr bool STARTED = Starts<E>::value && !IN_BASE2 && Config::Q_SCALES != BLOCK_SCALES && Config::KV_SCALES != BLOCK_SCALES;

KS_DEVICE float minimum(float a, float b) { return -maximum(-a, -b); }

// The rows of a head, or where GROUPED of a group of heads, query after query.
template<class T> KS_DEVICE auto grouped_rows(T* base, const FastDivmod& group, int row, i64 head) {
  if constexpr (Config::GROUPED) return GroupedView<T>{base, group, row, head};
  else return StridedView<T>{base, row};
}

// A head's S_k keys or values; of pages: `base` is the head's in page 0, `table` its entry's.
template<class T> KS_DEVICE auto key_rows(T* base, const int* table, const FastDivmod& page, const Matrices<T>& x, int S_k) {
  if constexpr (Config::KV_VIEW == PAGED) return PagedView<T>{base, table, page, x.batch, x.row, S_k - 1};
  else return StridedView<T>{base, x.row};
}

// How the work is cut: into q_tiles of a head's queries, the longest sequence's counted, and into parts of the keys, whose
// results lie `out` and `lse` apart. Of `together` of all `matrices` the longest blocks start first.
struct Parts {
  i64 out, lse;
  int q_tiles, splits, together, matrices;
};

// What a block computes: rows from row0 on, of a head (with GROUPED of a group of heads), over one part of the keys.
struct Place {
  int split, batch, head, row0;
  Sequence own;
};

KS_BODY(THREADS, Config::MIN_BLOCKS)
attention_forward_body(Matrices<const Query> q, Matrices<const KV> k, Matrices<const KV> v, Matrices<Out> out,
                       RowValues<float> lse, ScoreArguments score, const float* sinks, Sequences sequences, Pages pages,
                       int num_heads, FastDivmod group, Parts parts, KvScales kv_scales = {}, QueryScales queries = {}) {
  if (parts.splits > 1) next_kernel_launch();  // the merge
  char* const memory = shared_memory<Config::SHARED_BYTES>();
  const int head_group = group.d, q_tiles = parts.q_tiles;
  const int heads = Config::GROUPED ? num_heads / head_group : num_heads;
  // Under a causal mask the last queries have most to do: they start first. With SECTIONS so do those of `together` heads, as
  // many as keep the device busy, whose keys stay in its cache: else the long blocks of the last heads end alone.
  auto place_of = [&](unsigned index) {
    const int split = index % parts.splits, place = index / parts.splits;
    int matrix, q_tile;
    if constexpr (Config::SECTIONS) {
      const int section = place / (parts.together * q_tiles), first = section * parts.together;
      const int width = min_of(parts.together, parts.matrices - first), within = place - first * q_tiles;
      q_tile = within / width, matrix = first + within % width;
    } else {
      matrix = place / q_tiles, q_tile = place % q_tiles;
    }
    const int batch = matrix / heads;
    return Place{split, batch, matrix % heads, (Config::CAUSAL ? q_tiles - 1 - q_tile : q_tile) * BM, sequences.at(batch)};
  };
  const Place here = place_of(block_index());
  const int split = here.split, batch = here.batch, head = here.head, row0 = here.row0;
  const Sequence own = here.own;

  // The block's rows: queries, or with GROUPED the heads of a group for query after query.
  const int rows = Config::GROUPED ? own.S_q * head_group : own.S_q;
  if (row0 >= rows) return;  // sequences of a batch may be shorter than its longest
  auto query_of = [=](int row) { return Config::GROUPED ? group.quotient(row) : row; };
  auto head_of = [=](int row) { return Config::GROUPED ? row - group.quotient(row) * head_group : 0; };

  const int first_head = Config::GROUPED ? head * head_group : head, kv_head = Config::GROUPED ? head : head / head_group;
  const int kv_heads = num_heads / head_group;
  const Query* const q_base = q.at<Config::Q_VIEW>(batch, first_head, num_heads, own.q_first);
  const auto Q = grouped_rows(q_base, group, q.row, q.head);
  const KV* const k_base = k.at<Config::KV_VIEW>(batch, kv_head, kv_heads, own.k_first);
  const KV* const v_base = v.at<Config::KV_VIEW>(batch, kv_head, kv_heads, own.k_first);
  const int* const table = Config::KV_VIEW == PAGED ? pages.table + batch * pages.table_row : nullptr;
  const auto K = key_rows(k_base, table, pages.size, k, own.S_k), V = key_rows(v_base, table, pages.size, v, own.S_k);

  const Scores scores = score.of(batch, first_head, own.S_q, own.S_k);
  const KvScales own_scales = kv_scales.of(batch, kv_head);
  const float k_scale = queries.of_head(batch, kv_head) * own_scales.of_keys(), v_scale = own_scales.of_values();
  const float factor = k_scale * score.scale_log2;

  // Keys [begin, end) are seen by some query of the block, [all_begin, all_end) by all. Tiles [first, last) are this block's.
  const int i0 = query_of(row0), i1 = query_of(min_of(row0 + BM, rows) - 1);
  const KeyRange any = scores.any(i0, i1), all = scores.all(i0, i1);
  const int begin = any.begin, end = any.end;
  const int all_begin = divide_up(all.begin, BN), all_end = all.end / BN;
  int first = begin / BN, last = divide_up(end, BN);
  if (parts.splits > 1) {
    const int share = divide_up(max_of(last - first, 0), parts.splits);
    first += split * share;
    last = min_of(last, first + share);
  }

  // Of a mask_mod, tiles that no query of the block sees are passed over.
  VisibleWalk<AHEAD> visible(first);
  auto seen = [&](int tile) {
    return seen_by_mask(scores, Config::GROUPED ? head_group : 1, i0, i1, tile * BN, min_of(tile * BN + BN, own.S_k) - 1);
  };

  const TileQ tile_q(memory);
  char* const ring = memory + RING;
  char* const scratch = memory + RING_END + warp_index() * P_BYTES;
  auto tile_k = [&](int stage) { return TileK(ring + stage * STAGE_BYTES); };
  auto tile_v = [&](int stage) { return TileV(ring + stage * STAGE_BYTES + TileK::BYTES); };

  Copy<TileQ, THREADS, Config::VECTOR, DQ == Config::DQK> copy_q;
  Copy<TileK, THREADS, Config::VECTOR, DQ == Config::DQK, SHARED_STAGE> copy_k;
  Copy<TileV, THREADS, Config::VECTOR, DO == Config::DV, SHARED_STAGE> copy_v;
  KeyScales key_scales(memory + RING_END + WARPS * P_BYTES);
  auto fetch = [&](int tile, int stage) {
    if (tile < last) {
      key_scales.fetch(stage, own_scales, [&](int i) {
        const int key = min_of(tile * BN + i * THREADS + KeyScales::me(), own.S_k - 1);
        if (Config::KV_VIEW != PAGED) return ScalePlace{0, own.k_first + key};
        const int n = pages.size.quotient(key);
        return ScalePlace{table[n], key - n * pages.size.d};
      });
      copy_k.fetch(tile_k(stage), K, tile * BN, own.S_k, 0, Config::DQK);
      if (!SHARED_STAGE) copy_v.fetch(tile_v(stage), V, tile * BN, own.S_k, 0, Config::DV);
    }
    copies_commit();
  };
  // The tile that is multiplied `ahead` steps after `tile`.
  auto fetch_ahead = [&](int tile, int ahead, int stage) {
    if constexpr (Expression::HAS_MASK) fetch(visible.next(last, seen), stage);
    else fetch(tile + ahead, stage);
  };
  copy_q.fetch(tile_q, Q, row0, rows, 0, Config::DQK);
  copy_q.land(tile_q);
  copies_commit();
#pragma unroll
  for (int s = 0; s < AHEAD; s++) {
    fetch_ahead(first, s, s);
    key_scales.land();
  }

  const int warp_row = warp_index() / COLUMN_WARPS * ROWS, column0 = warp_index() % COLUMN_WARPS * MINE;
  const int mine = row0 + warp_row;  // this warp's first row
  // A factor that is not positive is applied to the products themselves, so that masks stay −∞ and the largest score wins.
  const float c = IN_BASE2 ? 1.f : factor > 0 ? factor : factor < 0 ? -factor : 1.f;
  Unit unit;
  E::Acc<ROWS, MINE> o;
  E::Row<ROWS> m, l, of_rows;
  E::zero(o);
  E::fill(m, -infinity());
  E::fill(l, 0.f);
  RowStart<E, ROWS, STARTED> start(m, factor, c);
  if (Config::SINKS && split == 0) E::row_map(m, [&](int r, float) { return in_base2(sinks[first_head + head_of(mine + r)]); });

  if constexpr (Config::Q_SCALES == BLOCK_SCALES)
    E::row_map(of_rows, [&](int r, float) {
      const int row = min_of(mine + r, rows - 1);
      return queries.of_query(batch, first_head + head_of(row), own.q_first + query_of(row));
    });

  constexpr int Q_STEP = Config::Q_RESIDENT ? DQ : k_piece<EV, DQ>();
  copies_wait<AHEAD>();
  block_barrier();
  auto q_operand = EV::template operand<ROWS, Q_STEP>(tile_q, warp_row, 0);
  if (Config::Q_RETURNED && STAGES > 1) block_barrier();  // else a step begins with one

  // When the next keys are loaded: once scores are computed; where sums fill the registers, once half of them are free again.
  auto other_turn = [&](int tile) {
    copies_wait<0>();
    block_barrier();  // these values are visible to all, and these keys are no longer read
    fetch_ahead(tile, 1, 0);
  };

  int stage = 0;
  auto step = [&](int tile, auto masked) {
    if constexpr (SHARED_STAGE) {
      copies_wait<0>();
      block_barrier();  // these keys are visible to all, and the last values are no longer read
      copy_v.fetch(tile_v(0), V, tile * BN, own.S_k, 0, Config::DV);
      copies_commit();
    } else {
      copies_wait<AHEAD - 1>();
      if (STAGES == 1) block_barrier();  // everyone has used the tile that lay here
      copy_k.land(tile_k(stage));
      copy_v.land(tile_v(stage));
      key_scales.land();
      block_barrier();  // this tile is visible to all, and the stage refilled below is no longer read
      int next = stage + AHEAD;
      if (next >= STAGES) next -= STAGES;
      fetch_ahead(tile, AHEAD, next);
    }

    const int j0 = tile * BN;
    E::Acc<ROWS, BN> s;
    start.begin(s, m, masked.value);
#pragma unroll Config::UNROLL  // all of a wide head dim at once would take more registers than there are
    for (int d = 0; d < DQ; d += Q_STEP) {
      if (!Config::Q_RESIDENT) q_operand = EV::template operand<ROWS, Q_STEP>(tile_q, warp_row, d);
      EV::mma(s, q_operand, tile_k(stage), 0, d);
    }
    if constexpr (SHARED_STAGE && !SUMS_FILL_REGISTERS) other_turn(tile);
    if constexpr (Config::Q_SCALES == BLOCK_SCALES) E::row_apply(s, of_rows, [](float x, float y) { return x * y; });
    if constexpr (Config::KV_SCALES == BLOCK_SCALES) {
      const float* const k_scales = key_scales.keys(stage);
      E::map(s, [=](int, int j, float x) { return x * k_scales[j]; });
    }
    if constexpr (STARTED) {
      start.finish(s, m);
    } else if constexpr (IN_BASE2) {
      E::map(s, [&](int r, int j, float x) { return scores.apply(k_scale * x, head_of(mine + r), query_of(mine + r), j0 + j); });
    } else {
      if (!(factor > 0)) E::map(s, [=](int, int, float x) { return factor < 0 ? -x : factor * x; });
    }
    if constexpr (masked.value)
      E::map(s, [&](int r, int j, float x) {
        return scores.visible(head_of(mine + r), query_of(mine + r), j0 + j) ? x : -infinity();
      });

    if constexpr (STARTED) {
      start.raise(s, m, l, o);
      E::row_apply(s, m, [=](float x, float) { return exp2_fast(x * c); });
      E::row_add_partial(l, s);
    } else {
      E::Row<ROWS> top, base, fade;
      E::row_max(top, s);
      E::zip(top, top, m, [=](float x, float y) { return (x - y) * c > REFERENCE_RISE ? x : y; });
      E::zip(base, top, top, [=](float x, float) { return x == -infinity() ? 0.f : x * c; });
      // Exactly 1 where the reference stays: over many tiles a rounding each time would add up.
      E::zip(fade, m, top, [=](float x, float y) { return x == -infinity() ? 0.f : exp2_fast((x - y) * c); });
      m = top;
      E::row_apply(s, base, [=](float x, float y) { return exp2_fast(x * c - y); });
      E::zip(l, l, fade, [](float x, float y) { return x * y; });
      E::row_add_partial(l, s);
      if constexpr (Config::KV_SCALES == BLOCK_SCALES) {
        const float* const v_scales = key_scales.values(stage);
        const float shrink = unit.grow<BN>(v_scales, begin - j0, end - j0), inverse = unit.inverse();
        E::map(s, [&](int r, int j, float x) {
          const bool seen = !masked.value || scores.visible(head_of(mine + r), query_of(mine + r), j0 + j);
          return seen ? x * (v_scales[j] * inverse) : 0.f;
        });
        E::zip(fade, fade, fade, [=](float x, float) { return x * shrink; });
      }
      E::row_scale(o, fade);
    }
    const auto p = E::to_operand(s, scratch);
    if constexpr (SHARED_STAGE && SUMS_FILL_REGISTERS) other_turn(tile);
    bool hidden = false;  // whether values that some rows must not see had to be taken out
    if constexpr (HAS_MASK && masked.value) hidden = block_any(take_out_non_finite<THREADS>(tile_v(stage)));
    EV::mma(o, p, tile_v(stage), column0, 0);
    if (hidden) {
#pragma unroll 1
      for (int j = j0; j < min_of(j0 + BN, own.S_k); j++) {
        const KV* const values = V.row(j);
        EV::map(o, [&](int r, int d, float x) {
          const float y = to_sum(values[min_of(column0 + d, Config::DV - 1)]);  // columns beyond the last are not written
          const float excess = y - minimum(maximum(y, -LARGEST), LARGEST);  // 0 where y is finite, else y
          return x + (scores.visible(head_of(mine + r), query_of(mine + r), j) ? excess : 0.f);
        });
      }
    }
    if (++stage == STAGES) stage = 0;
  };
  int tile = first;
  if constexpr (Expression::HAS_MASK) {
    while ((tile = visible.index()) < last) {
      if (tile >= all_begin && tile < all_end && visible.whole()) step(tile, bool_constant<false>{});
      else step(tile, bool_constant<true>{});
    }
  } else if constexpr (Config::WINDOW) {
    for (; tile < last; tile++) {
      if (tile >= all_begin && tile < all_end) step(tile, bool_constant<false>{});
      else step(tile, bool_constant<true>{});
    }
  } else {
    if constexpr (!Config::MASK)
      for (; tile < min_of(all_end, last); tile++) step(tile, bool_constant<false>{});
    for (; tile < last; tile++) step(tile, bool_constant<true>{});
  }
  copies_wait<0>();

  // Where they share a stage registers are few: what the end needs of its place is computed again, instead of kept over the loop.
#ifdef KS_BLOCK_INDEX_AGAIN
  const Place there = SHARED_STAGE ? place_of(KS_BLOCK_INDEX_AGAIN) : here;
#else
  const Place& there = here;
#endif
  const int end_head = Config::GROUPED ? there.head * head_group : there.head;
  const int end_rows = Config::GROUPED ? there.own.S_q * head_group : there.own.S_q;
  const int end_column = SHARED_STAGE ? warp_index() % COLUMN_WARPS * MINE : column0;
  const int end_mine = SHARED_STAGE ? there.row0 + warp_index() / COLUMN_WARPS * ROWS : mine;
  E::row_finish_sum(l);
  if (Config::SINKS && there.split == 0) {
    E::Row<ROWS> own_share = m;
    E::row_map(own_share, [&](int r, float x) {
      return x == -infinity() ? 0.f : exp2_fast(in_base2(sinks[end_head + head_of(end_mine + r)]) - x);
    });
    E::zip(l, l, own_share, [](float x, float y) { return x + y; });
  }
  E::Row<ROWS> inverse;
  const float whole = Config::KV_SCALES == BLOCK_SCALES ? unit.size() : v_scale;
  E::zip(inverse, l, l, [=](float x, float) { return x == 0.f ? 0.f : whole / x; });
  E::row_apply(o, inverse, [](float x, float y) { return x * y; });
  if (Config::LSE && end_column == 0) {
    E::zip(m, m, l, [=](float x, float y) { return y == 0.f ? -infinity() : 0.69314718056f * (x * c + log2_fast(y)); });
    E::each_row(m, [&](int r, float x) {
      const int row = end_mine + r;
      if (row < end_rows) {
        const i64 at = (i64)there.batch * lse.batch + (end_head + head_of(row)) * lse.head + there.split * parts.lse;
        lse.base[at + there.own.q_first + query_of(row)] = x;
      }
    });
  }
  block_barrier();  // the queries are no longer read
  Out* const out_base = out.at<Config::OUT_VIEW>(there.batch, end_head, num_heads, there.own.q_first) + there.split * parts.out;
  const auto O = grouped_rows(out_base, group, out.row, out.head);
  TileO staged(memory + warp_index() * TileO::BYTES);
  EV::to_shared(staged, o);
  warp_barrier();
  warp_copy_out<Config::VECTOR>(staged, O, end_mine, end_rows, end_column, Config::DV);
}
