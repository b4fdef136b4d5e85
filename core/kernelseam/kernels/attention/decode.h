// Fused attention forward of few queries over many keys, in one launch: persistent thread blocks share all keys of the batch evenly,
// and the last to arrive at a sequence and KV head joins its parts.
//
// Algorithm (flash-decoding with a work list cut as stream-K cuts products; Dao et al. 2023; Osama et al., PPoPP 2023): an item is
// a KV head of a sequence with up to ROWS of its rows, the queries of the group's heads. Its keys are tiles of BN, and ITEM_COST
// places before them stand for the time that an item takes beside its tiles. All places of all items are one list (decode_list.h), of
// which each block takes an equal part: it finds where its part begins by a prefix sum over the sequences' lengths, in device memory.
// A block's warps take tiles in turn, each with a ring of its own and an online softmax of its own (forward.h), so that no barrier
// holds up the copies; copies run on into the next item. Tiles that a mask_mod hides are passed over (visible_tiles.h). At an item's
// end the warps' states
//   (m, l, o):  m' = max m_w,  l' = Σ l_w·2^(m_w − m'),  o' = Σ o_w·2^(m_w − m')
// are joined through the stages that were read last. Where the item is the block's alone the result is o'/l'. Else the block leaves
// its state in the workspace and counts itself; the last of the item's blocks joins the states in the order of the keys, writes the
// result and leaves the counter 0. What a part is joined with is the same from launch to launch: so are the bits.
//
// Shared memory: ROWS·DQ·size for queries (their own size, where the platform keeps them so); WARPS·STAGES·max(BN·(DQ + DO)·size,
// ROWS·DO·4) for rings, in which the states are joined (size being that of keys as the platform keeps them); WARPS·(8·ROWS + 16·BN +
// 16) for m, l, and where rows lie in pages; with scales of blocks WARPS·STAGES·BN·8.
// Registers: ROWS·(DO + BN)/lanes for o and s, ROWS·DQ/(2·lanes) more for queries that stay, BN·(DQ + DO)/(2·lanes) for copies
// that go through registers. What is used once an item is computed there (`opaque`), not ahead and kept.
#include "attention/decode_list.h"
#include "attention/decode_tiles.h"
#include "attention/looked_up_rows.h"
#include "attention/visible_tiles.h"

KS_DEVICE float minimum(float a, float b) { return -maximum(-a, -b); }

KS_BODY(THREADS, Config::MIN_BLOCKS)
attention_decode_body(Matrices<const Query> q, Matrices<const KV> k, Matrices<const KV> v, Matrices<Out> out, RowValues<float> lse,
                      ScoreArguments score, const float* sinks, Sequences sequences, Pages pages, int num_heads, FastDivmod group,
                      Parts parts, KvScales kv_scales = {}, QueryScales queries = {}) {
  char* const memory = shared_memory<Config::SHARED_BYTES>();
  const int head_group = group.d, kv_heads = num_heads / head_group, warp = warp_index();

  // ---- the block's share of the list

  auto entry_of = [&](int batch) {
    Entry e{sequences.at(batch), 0, 0, 0};
    e.own.S_k = max_of(e.own.S_k, 0);  // whatever the lengths say
    const Scores s = score.of(batch, e.own.S_q, e.own.S_k);
    e.row_tiles = divide_up(e.own.S_q * head_group, ROWS);
    const KeyRange any = s.any(0, e.own.S_q - 1);
    e.first = any.begin / BN;
    e.last = max_of(divide_up(any.end, BN), e.first);
    return e;
  };
  int items = 0, longest = 0;  // of those that a lane has counted
  auto count = [&](int batch) {
    if (batch >= parts.batch) return 0;
    const Entry e = entry_of(batch);
    const int own = e.row_tiles * kv_heads;
    items += own, longest = own ? max_of(longest, e.places()) : longest;
    return e.places() * own;
  };
  int here = count(lane()), total = here;
#pragma unroll 1
  for (int b = WARP; b < parts.batch; b += WARP) total += count(b + lane());
  total = warp_sum(total);
  if (total == 0) return;
  const int all_items = warp_sum(items);
  // No block has less than an item with a tile for each of its warps.
  const int most_blocks = min_of(parts.blocks, total / (ITEM_COST + WARPS));
  const Cut cut(total, most_blocks, all_items, warp_max(longest));
  const int block = (int)block_index();
  if (block >= cut.blocks) return;
  const int begin = cut.begin(block), share = cut.begin(block + 1) - begin;

  Piece piece;
  int place = 0;  // of the block's first, within its sequence
#pragma unroll 1
  for (int b = 0, before = 0;; b += WARP) {
    if (b > 0) here = count(b + lane());
    int end = here, all = here;
#pragma unroll
    for (int m = 1; m < WARP; m *= 2) {
      const int other = shuffle_xor(all, m);
      if (lane() & m) end += other;
      all += other;
    }
    if (begin < before + all) {
      const int offset = begin - (before + end - here);
      const bool found = offset >= 0 && offset < here;
      piece.batch = warp_sum(found ? b + lane() : 0);
      place = warp_sum(found ? offset : 0);
      break;
    }
    before += all;
  }
  // The place of the first tile of the piece's item.
  int item_begin;
  {
    piece.entry = entry_of(piece.batch);
    const int places = piece.entry.places(), item = place / places, row_tiles = piece.entry.row_tiles;
    piece.head = item / row_tiles, piece.row_tile = item - piece.head * row_tiles;
    const int at = place - item * places - ITEM_COST, ahead = max_of(-at, 0);  // places to the first tile
    item_begin = begin - at;
    piece.tile = piece.entry.first + max_of(at, 0);
    piece.end = min_of(piece.entry.first + piece.entry.tiles(), piece.tile + share - ahead);
    piece.left = share - ahead - (piece.end - piece.tile);
    if (share <= ahead) return;  // the item's tiles are the next block's
  }

  // What is used once an item.
  if constexpr (few_uniform_registers())
    q = in_lanes(q), out = in_lanes(out), lse = in_lanes(lse), sinks = in_lanes(sinks), parts = in_lanes(parts);

  // ---- the warp's ring

  const TileQ tile_q(memory);
  char* const rings = memory + TileQ::BYTES;
  char* const ring = rings + warp * STAGES * STAGE_BYTES;
  PageRow* const all_rows = (PageRow*)(rings + WARPS * STAGES * STAGE_BYTES), *const page_rows = all_rows + warp * BN;
  float* const scales = (float*)(all_rows + WARPS * BN);  // [warp, row]: m, l
  int* const read_last = (int*)(scales + WARPS * ROWS * 2);  // a warp's stage with its state
  typedef ScaleRing<BN, WARP> KeyScales;
  KeyScales key_scales((char*)(read_last + 4 * WARPS) + warp * STAGES * KeyScales::STAGE * 4);
  auto tile_k = [&](int stage) { return TileK(ring + stage * STAGE_BYTES); };
  auto tile_v = [&](int stage) { return TileV(ring + stage * STAGE_BYTES + TileK::BYTES); };

  // The first of the warp's tiles from `tile` on, before the piece's end, that a mask_mod does not hide from its rows.
  typedef VisibleTiles<WARPS> Tiles;
  auto stop_of = [](const Piece& p) { return min_of(p.end, p.entry.last); };
  auto seen_from = [&](Tiles& tiles, const Piece& p, int tile) {
    if constexpr (!Expression::HAS_MASK) return VisibleTile{tile, true};
    else
      return tiles.next(tile, stop_of(p), [&](int tile) {
        const Sequence own = p.entry.own;
        const int row0 = p.row_tile * ROWS, row1 = min_of(row0 + ROWS, own.S_q * head_group) - 1, j0 = tile * BN;
        const Scores scores = score.of(p.batch, p.head * head_group, own.S_q, own.S_k);
        return seen_by_mask(scores, head_group, group.quotient(row0), group.quotient(row1), j0, min_of(j0 + BN, own.S_k) - 1);
      });
  };

  // The next tile to be copied, and where its rows lie, which was asked for one copy earlier.
  Piece ahead = piece;
  Tiles to_copy;
  ahead.tile = seen_from(to_copy, ahead, piece.tile + warp).index;
  bool more_ahead = true;
  int page[LOOK_UPS];
  auto ahead_key = [&](int i) { return min_of(ahead.tile * BN + i * WARP + lane(), ahead.entry.own.S_k - 1); };
  auto find_ahead = [&] {
    while (more_ahead && ahead.tile >= stop_of(ahead)) {
      more_ahead = ahead.advance(kv_heads, entry_of);
      to_copy = {};
      if (more_ahead) ahead.tile = seen_from(to_copy, ahead, ahead.tile + warp).index;
    }
    if constexpr (Config::KV_VIEW == PAGED) {
      if (!more_ahead) return;
      const int* const table = pages.table + ahead.batch * pages.table_row;
#pragma unroll
      for (int i = 0; i < LOOK_UPS; i++) page[i] = table[pages.size.quotient(ahead_key(i))];
    }
  };
  Copy<TileQ, THREADS, Config::VECTOR, DQ == Config::DQK, COPY_THROUGH_REGISTERS> copy_q;
  Copy<TileK, WARP, Config::VECTOR, DQ == Config::DQK, true> copy_k;
  Copy<TileV, WARP, Config::VECTOR, DO == Config::DV, true> copy_v;
  auto fetch = [&](int stage) {
    if (more_ahead) {
      const int first = ahead.tile * BN, S_k = ahead.entry.own.S_k;
      const KV* const k_base = k.at<Config::KV_VIEW>(ahead.batch, ahead.head, kv_heads, ahead.entry.own.k_first);
      const KV* const v_base = v.at<Config::KV_VIEW>(ahead.batch, ahead.head, kv_heads, ahead.entry.own.k_first);
      key_scales.fetch(stage, kv_scales.of(ahead.batch, ahead.head), [&](int i) {
        const int key = ahead_key(i);
        if (Config::KV_VIEW == PAGED) return ScalePlace{page[i], key - pages.size.quotient(key) * pages.size.d};
        return ScalePlace{0, ahead.entry.own.k_first + key};
      });
      if constexpr (Config::KV_VIEW == PAGED) {
        warp_barrier();
#pragma unroll
        for (int i = 0; i < LOOK_UPS; i++) {
          const i64 key = ahead_key(i), row = key - (i64)pages.size.quotient((int)key) * pages.size.d;
          if (BN % WARP == 0 || i * WARP + lane() < BN)
            page_rows[i * WARP + lane()] = {page[i] * k.batch + row * k.row, page[i] * v.batch + row * v.row};
        }
        warp_barrier();
        copy_k.fetch(tile_k(stage), LookedUpView<const KV, BN, &PageRow::k>{k_base, page_rows, first}, first, S_k, 0, Config::DQK);
        copy_v.fetch(tile_v(stage), LookedUpView<const KV, BN, &PageRow::v>{v_base, page_rows, first}, first, S_k, 0, Config::DV);
      } else {
        copy_k.fetch(tile_k(stage), StridedView<const KV>{k_base, k.row}, first, S_k, 0, Config::DQK);
        copy_v.fetch(tile_v(stage), StridedView<const KV>{v_base, v.row}, first, S_k, 0, Config::DV);
      }
      ahead.tile = seen_from(to_copy, ahead, ahead.tile + WARPS).index;
      find_ahead();
    }
    copies_commit();
  };
  find_ahead();
#pragma unroll 1  // code that runs once costs more to be loaded than to be run
  for (int s = 0; s < AHEAD; s++) fetch(s), key_scales.land();

  int stage = 0;
  bool more = true;
  while (more) {
    const Sequence own = piece.entry.own;
    const int batch = piece.batch, first_head = piece.head * head_group, row0 = piece.row_tile * ROWS;
    const int rows = min_of(own.S_q * head_group - row0, ROWS);
    auto query_of = [=](int row) { return group.quotient(row0 + row); };
    auto head_of = [=](int row) { return row0 + row - group.quotient(row0 + row) * head_group; };
    const Scores scores = score.of(batch, first_head, own.S_q, own.S_k);
    const KvScales own_scales = kv_scales.of(batch, piece.head);
    const float k_scale = queries.of_head(batch, piece.head) * own_scales.of_keys(), v_scale = own_scales.of_values();
    const float factor = k_scale * score.scale_log2;
    // A factor that is not positive is applied to the products themselves, so that masks stay −∞ and the largest score wins.
    const float c = IN_BASE2 ? 1.f : factor > 0 ? factor : factor < 0 ? -factor : 1.f;

    // ---- the queries: not asynchronously, or they would have to be waited for among keys
    const GroupedView<const Query> Q{q.at<Config::Q_VIEW>(batch, first_head, num_heads, own.q_first), group, q.row, q.head};
    copy_q.load(tile_q, Q, row0, row0 + rows, 0, Config::DQK);
    block_barrier();  // and what was joined last has been read
    constexpr int Q_STEP = Config::Q_RESIDENT ? DQ : k_piece<EV, DQ>();
    auto q_operand = EV::template operand<ROWS, Q_STEP>(tile_q, 0, 0);

    // ---- the warp's tiles

    E::Acc<ROWS, DO> o;
    E::Row<ROWS> m, l, of_rows;
    if constexpr (Config::Q_SCALES == BLOCK_SCALES)
      E::row_map(of_rows, [&](int r, float) {
        const int row = min_of(r, rows - 1);
        return queries.of_query(batch, first_head + head_of(row), own.q_first + query_of(row));
      });
    E::zero(o);
    E::fill(m, -infinity());
    E::fill(l, 0.f);
    Unit unit;
    const KeyRange seen = scores.any(query_of(0), query_of(rows - 1));
    // `masked`: whether some row does not see the whole tile.
    auto step = [&](int tile, bool masked) {
      const int j0 = tile * BN;
      E::Acc<ROWS, BN> s;
      E::zero(s);
#pragma unroll 4
      for (int d = 0; d < DQ; d += Q_STEP) {
        if (!Config::Q_RESIDENT) q_operand = EV::template operand<ROWS, Q_STEP>(tile_q, 0, d);
        EV::mma(s, q_operand, tile_k(stage), 0, d);
      }
      if constexpr (Config::Q_SCALES == BLOCK_SCALES) E::row_apply(s, of_rows, [](float x, float y) { return x * y; });
      if constexpr (Config::KV_SCALES == BLOCK_SCALES) {
        const float* const k_scales = key_scales.keys(stage);
        E::map(s, [=](int, int j, float x) { return x * k_scales[j]; });
      }
      if constexpr (IN_BASE2) {
        E::map(s, [&](int r, int j, float x) { return scores.apply(k_scale * x, head_of(r), query_of(r), j0 + j); });
      } else {
        if (!(factor > 0)) E::map(s, [=](int, int, float x) { return factor < 0 ? -x : factor * x; });
      }
      if (masked)
        E::map(s, [&](int r, int j, float x) { return scores.visible(head_of(r), query_of(r), j0 + j) ? x : -infinity(); });
      E::Row<ROWS> top, base, fade;
      E::row_max(top, s);
      E::zip(top, top, m, [](float x, float y) { return maximum(x, y); });
      E::zip(base, top, top, [=](float x, float) { return x == -infinity() ? 0.f : x * c; });
      // Exactly 1 where the maximum stays: over many tiles a rounding each time would add up.
      E::zip(fade, m, top, [=](float x, float y) { return x == -infinity() ? 0.f : exp2_fast((x - y) * c); });
      m = top;
      E::row_apply(s, base, [=](float x, float y) { return exp2_fast(x * c - y); });
      E::zip(l, l, fade, [](float x, float y) { return x * y; });
      E::row_add_partial(l, s);
      if constexpr (Config::KV_SCALES == BLOCK_SCALES) {
        const float* const v_scales = key_scales.values(stage);
        const float shrink = unit.grow<BN>(v_scales, seen.begin - j0, seen.end - j0), inverse = unit.inverse();
        E::map(s, [&](int r, int j, float x) {
          return masked && !scores.visible(head_of(r), query_of(r), j0 + j) ? 0.f : x * (v_scales[j] * inverse);
        });
        E::zip(fade, fade, fade, [=](float x, float) { return x * shrink; });
      }
      E::row_apply(o, fade, [](float x, float y) { return x * y; });
      const auto p = E::to_operand(s, nullptr);
      bool hidden = false;  // whether values that some rows must not see had to be taken out
      if (HAS_MASK && masked) hidden = warp_sum(take_out_non_finite<WARP>(tile_v(stage))) > 0, warp_barrier();
      EV::mma(o, p, tile_v(stage), 0, 0);
      if (HAS_MASK && hidden) {
        const KV* const v_base = v.at<Config::KV_VIEW>(batch, piece.head, kv_heads, own.k_first);
#pragma unroll 1
        for (int j = j0; j < min_of(j0 + BN, own.S_k); j++) {
          const KV* values;
          if constexpr (Config::KV_VIEW == PAGED) {
            const int n = pages.size.quotient(j);
            values = v_base + pages.table[batch * pages.table_row + n] * v.batch + (i64)(j - n * pages.size.d) * v.row;
          } else {
            values = v_base + (i64)j * v.row;
          }
          EV::map(o, [&](int r, int d, float x) {
            const float y = to_sum(values[min_of(d, Config::DV - 1)]);  // columns beyond the last are not written
            const float excess = y - minimum(maximum(y, -LARGEST), LARGEST);  // 0 where y is finite, else y
            return opaque(x + (scores.visible(head_of(r), query_of(r), j) ? excess : 0.f));
          });
        }
      }
    };
    // Tiles that every row sees whole are not masked.
    const KeyRange all = scores.all(query_of(0), query_of(rows - 1));
    const int all_begin = divide_up(all.begin, BN), all_end = all.end / BN;
    const int stop = stop_of(piece);
    Tiles to_multiply;
    int used = stage;
    bool any = false;
#pragma unroll 1
    for (int tile = piece.tile + warp;; tile += WARPS) {
      const VisibleTile here = seen_from(to_multiply, piece, tile);
      tile = here.index;
      if (tile >= stop) break;
      copies_wait<AHEAD - 1>();
      if (STAGES == 1) warp_barrier();  // every lane has used the tile that lay here
      copy_k.land(tile_k(stage));
      copy_v.land(tile_v(stage));
      key_scales.land();
      warp_barrier();  // this tile is visible to all lanes, and the stage refilled below is no longer read
      int next = stage + AHEAD;
      if (next >= STAGES) next -= STAGES;
      fetch(next);
      step(tile, !here.whole || tile < all_begin || tile >= all_end);
      used = stage, any = true;
      if (++stage == STAGES) stage = 0;
    }

    // ---- the warps' states become one

    E::row_finish_sum(l);
    E::row_map(m, [=](int, float x) { return x * c; });
    if (Config::KV_SCALES != NO_SCALES) {
      const float whole = Config::KV_SCALES == BLOCK_SCALES ? unit.size() : v_scale;
      E::row_apply(o, l, [=](float x, float) { return x * whole; });
    }
    if (any) {
      warp_barrier();
      EV::to_shared(TileO(ring + used * STAGE_BYTES), o, opaque(0));
    }
    const int first_scale = opaque(warp * ROWS);
    E::each_row(m, [&](int r, float x) { scales[(first_scale + r) * 2] = x; });
    E::each_row(l, [&](int r, float x) { scales[(first_scale + r) * 2 + 1] = x; });
    if (lane() == 0) read_last[warp] = used;
    block_barrier();

    const GroupedView<Out> O{out.at<Config::OUT_VIEW>(batch, first_head, num_heads, own.q_first), group, out.row, out.head};
    auto write = [&](int r, int d, Joined z) {
      if constexpr (Config::SINKS) {
        const float sink = in_base2(sinks[first_head + head_of(r)]);
        const float m[1] = {sink}, l[1] = {sink == -infinity() ? 0.f : 1.f};
        const Chunk<float> x[1] = {};
        z.add(m, l, x);
      }
      const float inverse = z.sum == 0.f ? 0.f : 1.f / z.sum;
      Out* const to = O.row(row0 + r) + d;
      if constexpr (Config::VECTOR == 16 && Config::DV % COLUMNS == 0) {
        struct alignas(COLUMNS * sizeof(Out)) Stored { Out v[COLUMNS]; } y;
#pragma unroll
        for (int e = 0; e < COLUMNS; e++) y.v[e] = convert<Out>(z.y.v[e] * inverse);
        if (d < Config::DV) *(Stored*)to = y;
      } else {
#pragma unroll
        for (int e = 0; e < COLUMNS; e++)
          if (d + e < Config::DV) to[e] = convert<Out>(z.y.v[e] * inverse);
      }
      if (Config::LSE && d == 0) {
        const i64 at = (i64)batch * lse.batch + (first_head + head_of(r)) * lse.head;
        lse.base[at + own.q_first + query_of(r)] = z.sum == 0.f ? -infinity() : 0.69314718056f * (z.top + log2_fast(z.sum));
      }
    };
    const int tiles = piece.entry.tiles();
    const bool whole = piece.end - piece.tile == tiles;
    // The blocks that have tiles of this item.
    Cut places = cut;
    places.span = opaque(cut.span), places.share();  // anew: registers are few
    const int first_block = whole ? block : places.taker(item_begin);
    const int last_block = whole ? block : places.taker(item_begin + tiles - 1);
    auto state_of = [=](int b) { return 2 * b + (b == first_block); };
#pragma unroll 1
    for (int i = opaque(thread_index()); i < rows * GROUPS; i += THREADS) {
      const int r = i / GROUPS, d = i % GROUPS * COLUMNS;
      Joined z;
      float m[WARPS], l[WARPS];
      Chunk<float> x[WARPS];
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        m[w] = scales[(w * ROWS + r) * 2], l[w] = scales[(w * ROWS + r) * 2 + 1];
        x[w] = Chunk<float>{};
        // A warp that saw no key has left no state there: its stage may be one that a copy is on its way to.
        if (l[w] != 0.f) x[w] = TileO(rings + (w * STAGES + read_last[w]) * STAGE_BYTES).chunk(r, d);
      }
      z.add(m, l, x);
      if (whole) {
        write(r, d, z);
      } else {
        const i64 row = (i64)state_of(block) * ROWS + r;
        *(Chunk<float>*)(parts.sums + row * DO + d) = z.y;
        if (d == 0) parts.scales[row * 2] = z.top, parts.scales[row * 2 + 1] = z.sum;
      }
    }

    // ---- the blocks' states become one, by the last to arrive
    if (!whole) {
      arrival_fence();
      block_barrier();
      bool last = false;
      if (thread_index() == 0) {
        int* const counter = parts.counters + first_block;
        last = arrive(counter) == last_block - first_block;
        if (last) *counter = 0;
      }
      if (block_any(last)) {
        arrival_fence();
        // Columns that a thread joins side by side; loads in flight of each.
        constexpr int SIDE = ROWS * GROUPS > THREADS ? 2 : 1, AT_ONCE = 12 / SIDE;
        const int chunks = rows * GROUPS;
#pragma unroll 1
        for (int i = opaque(thread_index()); i < chunks; i += SIDE * THREADS) {
          Joined z[SIDE];
          auto chunk = [=](int s) { return min_of(i + s * THREADS, chunks - 1); };
#pragma unroll 1
          for (int b = first_block; b <= last_block; b += AT_ONCE) {
            float m[SIDE][AT_ONCE], l[SIDE][AT_ONCE];
            Chunk<float> x[SIDE][AT_ONCE];
#pragma unroll
            for (int s = 0; s < SIDE; s++)
#pragma unroll
              for (int e = 0; e < AT_ONCE; e++) {
                const i64 row = (i64)state_of(min_of(b + e, last_block)) * ROWS + chunk(s) / GROUPS;
                m[s][e] = parts.scales[row * 2], l[s][e] = b + e <= last_block ? parts.scales[row * 2 + 1] : 0.f;
                x[s][e] = *(const Chunk<float>*)(parts.sums + row * DO + chunk(s) % GROUPS * COLUMNS);
              }
#pragma unroll
            for (int s = 0; s < SIDE; s++) z[s].add(m[s], l[s], x[s]);
          }
#pragma unroll
          for (int s = 0; s < SIDE; s++)
            if (i + s * THREADS < chunks) write(chunk(s) / GROUPS, chunk(s) % GROUPS * COLUMNS, z[s]);
        }
      }
    }
    item_begin += tiles + ITEM_COST;
    more = piece.advance(kv_heads, entry_of);
  }
  copies_wait<0>();
}
