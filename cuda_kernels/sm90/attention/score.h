// The loop's Score policy: how a block's products q·k become weights, and which keys a query sees. `scores` (attention/scores.h) says both
// of a single product; this is what a warpgroup does with a block of them, as its KIND allows:
//
//   MULTIPLE  products stay: their factor is left to the exponential, and largest scores are those of products.
//   CAPPED    softcap's tanh is a polynomial within the exponent where all of a warp's products are small; else it is applied first.
//   ANY       scores are computed in place. Within the loop of unmasked blocks they are not clamped, as what exceeds float32's range
//             shows in the sums; elsewhere they are what apply() says (EXACT).
//
// A thread has two rows of a block (softmax.h). What of a score or a mask depends on the head or on the query is computed once a tile and
// row (Rows), what depends on the key once a block for both rows. The loop asks
//   factor(scale)                     what a tile's products are multiplied by, `scale` being that of numbers of 8 bits
//   rows(rows, own, x, bias, lane)    of the rows x and x + 8 of a tile; `bias`: where a warp's rows of it lie in shared memory
//   see(rows, first, lane)            what a mask in memory says of a block that comes
//   copy_bias(rows, …)                a bias of a block that comes to shared memory (plane.h), from where begin() reads it
//   ahead<EXACT>(rows, from, whole)   what is computed of a block's keys before products have come; `whole`: masks hide none
//   begin<EXACT>(s, f, rows, ahead, from)   products to what the others take, in place; which form that is. EXACT: scores of keys that a mask
//                                     which is no band hides become −∞; `from`: the key of the thread's first column
//   hide(s, own, x, y, from)          so do those of keys outside of the bands of the queries x and y
//   largest(s, top, form)             the rows' largest scores, of which form.c is a multiple in base 2
//   exponentials(s, m, sum, form)     weights in place of a part of the scores, above references m, and their sums
//   apply(s, f, own, x, from)         rare: of products that were made again, scores in units of f.c
#pragma once
#include "sm90/attention/softmax.h"
#include "sm90/attention/plane.h"

static_assert(!(Config::PREFIX && Config::WINDOW), "hide() takes a range of keys a row");

template<int BN> struct TileScore {
  static constexpr bool CAPPED = Scores::KIND == ScoreKind::CAPPED, ANY = Scores::KIND == ScoreKind::ANY, HAS_MASK = !Scores::BANDED;
  static constexpr bool BY_ELEMENT = ANY || HAS_MASK, MASK_ALONE = HAS_MASK && !ANY;
  static_assert(!(ANY || Config::MASK) || GROUP_HEADS == 1, "of rows of several heads, keys are hidden by a mask_mod which reads no head");
  // Whether scores may rise from block to block in ways that nobody knows.
  static constexpr bool MAY_RISE = Expression::HAS_SCORE;
  // ALiBi's rise over the keys behind the diagonal, which come first.
  static constexpr bool RISES = Config::ALIBI && (!Config::CAUSAL || Config::PREFIX);
  Scores scores;
  const SmallCap& small_cap;
  const ScoreArguments& arguments;

  // What is applied in place, where it is no factor above 0, and what is left to the exponential.
  struct Factor { float here, c; };
  // Where all keys lie before the diagonal, ALiBi is left to the exponential, too: of a row `shift` at the thread's first column, and `slope`.
  struct Form { SoftcapMode mode; float c, shift[2], slope[2]; };
  static constexpr bool SCALED = !Config::SOFTCAP && !Expression::HAS_SCORE;  // products keep their factor in unmasked blocks
  KS_DEVICE Factor factor(float own) const {
    const float scale = CAPPED || ANY ? 1.f : scores.scale_log2;
    if constexpr (!Config::Q_SCALES) return {1.f, scale};
    const float c = fabsf(own) * scale;
    if (CAPPED || ANY) return {own, 1.f};
    if (c > 0.f) return {own < 0.f ? -1.f : 1.f, c};
    return {own * 0.f, 1.f};
  }
  static KS_DEVICE void multiply(float (&s)[BN / 2], const Factor& f) {
    if (Config::Q_SCALES && f.here != 1.f) {
#pragma unroll
      for (int i = 0; i < BN / 2; i++) s[i] *= f.here;
    }
  }

  typedef typename conditional<HAS_BIAS, Config::BIAS, float>::type Bias;
  struct Row {
    Expression::Tile tile;
    Expression::Row row;
    float slope, origin;  // ALiBi's in base 2, and the key at distance 0
  };
  struct NoRows {
    static constexpr int BYTES = 0;
    struct Eight {};
  };
  typedef typename conditional<HAS_BIAS, PlaneRows<Bias, BN>, NoRows>::type BiasRows;
  struct KnownRows {
    Row row[2];
    BiasRows bias;
    u32 mask[Config::MASK ? 2 : 1];  // of the rows, of the block at hand (tiles.h: MaskRow)
  };
  typedef typename conditional<BY_ELEMENT, KnownRows, NoRows>::type Rows;
  KS_DEVICE void rows(Rows& known, const Scores& own, int x, u32 bias, int lane) const {
    if constexpr (BY_ELEMENT) {
      if constexpr (HAS_BIAS) known.bias = BiasRows(arguments.bias, own.bias, x - lane / 4, bias, lane);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int h = group_head_of(x + 8 * r), i = query_of(x + 8 * r);
        Row& row = known.row[r];
        row.tile = own.user.of_head(h), row.row = own.user.own.row(row.tile, i);
        if (Config::ALIBI) row.slope = slope_in_base2(own.slopes[h * own.slopes_head]), row.origin = (float)(i + own.shift());
      }
    }
  }

  // A warp's rows of a bias by a block of keys, from `key` on. `left`: rows of the sequence, from the warp's first on.
  KS_DEVICE void copy_bias(const Rows& rows, const Scores& own, int first, int key, int lane) const {
    if constexpr (HAS_BIAS) rows.bias.copy(arguments.bias, own.bias, first, own.S_q - first, key, own.S_k, lane);
  }

  // What the rows from `first` on see of a block.
  KS_DEVICE void see(Rows& rows, const MaskRow* first, int lane) const {
    if constexpr (Config::MASK) rows.mask[0] = first[0].words[lane % 4], rows.mask[1] = first[8].words[lane % 4];
  }

  // What depends on a key alone, of COUNT times 32 keys of a warp from `first` on: each lane computes it of one in 32, and all get it from there.
  template<int COUNT> struct SharedColumns {
    static constexpr int WORDS = max_of((int)sizeof(Expression::Column) / 4, 1);
    union Words { Expression::Column column; u32 words[WORDS]; };
    Words own[COUNT];
    SharedColumns() = default;
    KS_DEVICE SharedColumns(const Expression& expression, const Expression::Tile& tile, int first) {
#pragma unroll
      for (int i = 0; i < COUNT; i++) own[i].column = expression.column(tile, first + WARP * i + lane());
    }
    KS_DEVICE Expression::Column of(int key, int place) const {
      Words to;
      to.words[0] = key;
#pragma unroll
      for (int i = 1; i < WORDS; i++) to.words[i] = __shfl_sync(~0u, own[place / WARP].words[i], place % WARP);
      return to.column;
    }
  };
  struct OwnColumns {
    Expression expression;
    Expression::Tile tile;
    OwnColumns() = default;
    KS_DEVICE OwnColumns(const Expression& expression, const Expression::Tile& tile, int) : expression(expression), tile(tile) {}
    KS_DEVICE Expression::Column of(int key, int) const { return expression.column(tile, key); }
  };
  template<int PART> using Columns =
      typename conditional<(sizeof(Expression::Column) > 4 && PART % 16 == 0), SharedColumns<PART / 16>, OwnColumns>::type;  // else a number at hand
  // What depends on the distance q − k alone: a warp's 16 rows are at 31 distances of 16 keys. Each lane computes it of one of these, and the rows
  // x + 8 have of a column what the rows x have of the one 8 before.
  static constexpr bool BY_DISTANCE = Expression::HAS_DIAGONAL && GROUP_HEADS == 1;
  template<int WINDOWS> struct SharedDiagonals {
    static constexpr bool BITS = Expression::DIAGONAL_IS_BIT;
    static constexpr int WORDS = max_of((int)sizeof(Expression::Diagonal) / 4, 2);
    union Words { Expression::Diagonal diagonal; u32 words[WORDS]; };
    u32 own[WINDOWS][WORDS - 1];
    int place;  // of the lane that has the distance of this one's first row and column
    SharedDiagonals() = default;
    // `distance`: of the lane's first row and column.
    KS_DEVICE SharedDiagonals(const Expression& expression, const Expression::Tile& tile, int distance) {
      place = lane() / 4 - 2 * (lane() % 4) + 15;
#pragma unroll
      for (int i = 0; i < WINDOWS; i++) {
        Words x;
        x.diagonal = expression.diagonal(tile, distance + lane() - place - 16 * i);
        if constexpr (BITS) {
          own[i][0] = __ballot_sync(~0u, x.words[1] & 1) >> (place - 9);
        } else {
#pragma unroll
          for (int j = 1; j < WORDS; j++) own[i][j - 1] = x.words[j];
        }
      }
    }
    // Of the thread's row r, in the pair `pair` of its columns, the column e. All lanes ask for the same.
    KS_DEVICE Expression::Diagonal of(int distance, int pair, int r, int e) const {
      const int further = 8 * (r - pair % 2) - e;
      Words to;
      to.words[0] = distance;
      if constexpr (BITS) {
        to.words[1] = own[pair / 2][0] >> (9 + further) & 1;
      } else {
#pragma unroll
        for (int j = 1; j < WORDS; j++) to.words[j] = __shfl_sync(~0u, own[pair / 2][j - 1], place + further);
      }
      return to.diagonal;
    }
  };
  struct NoDiagonals {
    NoDiagonals() = default;
    KS_DEVICE NoDiagonals(const Expression&, const Expression::Tile&, int) {}
    KS_DEVICE Expression::Diagonal of(int, int, int, int) const { return {}; }
  };
  // What is known of PART elements' keys and distances before their products.
  template<int PART> struct Known {
    Columns<PART> columns;
    typename conditional<(BY_DISTANCE && PART % 8 == 0), SharedDiagonals<PART / 8>, NoDiagonals>::type diagonals;
  };
  template<int PART> KS_DEVICE Known<PART> known(const Rows& rows, int from, int done) const {
    const Expression own = arguments.captured();
    const Expression::Tile& tile = rows.row[0].tile;
    const int first = from + 2 * done;
    int distance = 0;
    if constexpr (BY_DISTANCE) distance = rows.row[0].row.q_idx - first;
    return {{own, tile, first - 2 * (lane() % 4)}, {own, tile, distance}};
  }
  // A long expression is in the code once for a part: unrolled it would be thousands of instructions.
  static constexpr int OPERATIONS = BY_DISTANCE ? Expression::OPERATIONS_BESIDE : Expression::OPERATIONS;
  template<bool EXACT> static constexpr bool IN_PARTS = OPERATIONS > (EXACT ? 12 : 24);
  // Which keys of a block the thread's rows see: bit j of a row is that of its column j, so that hiding one takes an instruction.
  struct Sight {
    u32 row[2];
    // What a row sees of the keys from `low` on, up to `high`, counted from the thread's first column.
    KS_DEVICE void narrow(int r, int low, int high) {
      auto before = [](int key) {  // its columns before a key
        const int columns = key / 8 * 2 + min_of(key % 8, 2);
        return key <= 0 ? 0u : columns < 32 ? (1u << columns) - 1 : ~0u;
      };
      row[r] &= before(high) & ~before(low);
    }
  };
  template<int PART> KS_DEVICE void look(u32 (&seen)[2], const Rows& rows, const Known<PART>& known, int from, int done) const {
    const Expression own = arguments.captured();
    const int lane_columns = 2 * (lane() % 4);
#pragma unroll
    for (int j = 0; j < PART / 2; j++) {
      const int further = j / 2 * 8 + j % 2, key = from + 4 * done + further;
      const Expression::Column column = known.columns.of(key, further + lane_columns);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const Row& row = rows.row[r];
        if constexpr (BY_DISTANCE) {
          const auto diagonal = known.diagonals.of(row.row.q_idx - key, j / 2, r, j % 2);
          if (own.visible(row.tile, row.row, column, diagonal)) seen[r] |= 1u << j;
        } else {
          if (own.visible(row.tile, row.row, column)) seen[r] |= 1u << j;
        }
      }
    }
  }
  KS_DEVICE Sight sight(const Rows& rows, int from) const {
    static_assert(BN <= 128, "a word a row");
    u32 seen[2] = {~0u, ~0u};
    if constexpr (Expression::HAS_MASK && IN_PARTS<true>) {
      seen[0] = seen[1] = 0;
#pragma unroll 1
      for (int done = 0; done < BN / 2; done += 16) {
        u32 part[2] = {0, 0};
        look(part, rows, known<16>(rows, from, done), from, done / 2);
        seen[0] |= part[0] << done / 2, seen[1] |= part[1] << done / 2;
      }
    } else if constexpr (Expression::HAS_MASK) {
      seen[0] = seen[1] = 0;
      look(seen, rows, known<BN / 2>(rows, from, 0), from, 0);
    }
    if constexpr (Config::MASK) seen[0] &= rows.mask[0], seen[1] &= rows.mask[1];
    return {{seen[0], seen[1]}};
  }
  // What is computed before a block's products have come.
  struct NothingAhead {};
  template<bool EXACT> static constexpr bool LOOKS_AHEAD = ANY && !IN_PARTS<EXACT>;
  template<bool EXACT> struct Ahead {
    typename conditional<LOOKS_AHEAD<EXACT>, Known<BN / 2>, NothingAhead>::type known;
    typename conditional<(EXACT && HAS_MASK), Sight, NothingAhead>::type sight;
  };
  template<bool EXACT> KS_DEVICE Ahead<EXACT> ahead(const Rows& rows, int from, bool whole = false) const {
    Ahead<EXACT> x{};
    if constexpr (EXACT && HAS_MASK) x.sight = MASK_ALONE && whole ? Sight{{~0u, ~0u}} : sight(rows, from);
    if constexpr (LOOKS_AHEAD<EXACT>) x.known = known<BN / 2>(rows, from, 0);
    return x;
  }
  // Keys outside of the bands of the queries x and y count as hidden.
  KS_DEVICE void narrow(Sight& sight, const Scores& own, int x, int y, int from) const {
    const KeyRange first = own.any(x, x), second = own.any(y, y);
    sight.narrow(0, first.begin - from, first.end - from), sight.narrow(1, second.begin - from, second.end - from);
  }
  KS_DEVICE void hide(float (&s)[BN / 2], const Sight& sight) const {
#pragma unroll
    for (int i = 0; i < BN / 2; i++)
      if (!(sight.row[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1)) s[i] = -infinity();
  }

  // In place: of PART elements of the thread's, behind `done`; `from`: the key of the first of all.
  template<bool EXACT, bool BEFORE, int PART>
  KS_DEVICE void change(float (&s)[PART], const Factor& f, const Rows& rows, const Known<PART>& known, int from, int done) const {
    if constexpr (ANY) {
      const Expression own = arguments.captured();
      const float natural = scores.scale_log2 * LN_2;
      const float unscaled = !EXACT && SCALED ? reciprocal_fast(scores.scale_log2) : 1.f;  // a score of base 2, in units of the others
      constexpr int STEP = HAS_BIAS ? 8 : 4;
      const int lane_columns = 2 * (lane() % 4);
      constexpr bool BUILT_IN = Config::SOFTCAP || Config::ALIBI || HAS_BIAS;
#pragma unroll
      for (int i = 0; i < PART; i += STEP) {
        if (i % 8 == 0) asm volatile("" ::: "memory");  // loads are not all issued ahead: registers
        typename BiasRows::Eight bias;
        if constexpr (HAS_BIAS) bias = rows.bias.eight(2 * (done + i));
#pragma unroll
        for (int two = 0; two < STEP / 2; two++) {
          const int further = two / 2 * 8 + two % 2, key = from + 2 * (done + i) + further;
          const Expression::Column column = known.columns.of(key, 2 * i + further + lane_columns);
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const Row& row = rows.row[r];
            const int place = two / 2 * 4 + 2 * r + two % 2;
            float& x = s[i + place];
            int distance = 0;
            if constexpr (BY_DISTANCE) distance = row.row.q_idx - key;
            const Expression::Diagonal diagonal = known.diagonals.of(distance, i / 4 + two / 2, r, two % 2);
            x *= f.here;
            if (Config::SOFTCAP) x = scores.cap * tanh_fast(x * scores.cap_inverse);
            else if (EXACT || !SCALED) x *= BUILT_IN ? scores.scale_log2 : natural;
            if (Config::ALIBI && !BEFORE) x = fmaf(-row.slope * unscaled, fabsf((float)(from + 2 * done) - row.origin + (float)(2 * i + further)), x);
            if constexpr (HAS_BIAS) {
              const float y = bias[place];
              x = EXACT ? x + in_base2(y) : fmaf(y, LOG2_E * unscaled, x);
            }
            if (Expression::HAS_SCORE) {
              if (BUILT_IN) x *= LN_2;
              if constexpr (BY_DISTANCE) x = own.score(x, row.tile, row.row, column, diagonal);
              else x = own.score(x, row.tile, row.row, column);
              if (EXACT) x = in_base2(x);
            }
          }
        }
      }
    }
  }

  template<bool EXACT, bool BEFORE = false>
  KS_DEVICE Form begin(float (&s)[BN / 2], const Factor& f, const Rows& rows, const Ahead<EXACT>& ahead, int from, bool hides = EXACT) const {
    if (!ANY) multiply(s, f);
    if constexpr (HAS_BIAS) async_copies_wait(), warp_barrier();
    constexpr bool SHIFTS = Config::ALIBI && SCALED && BEFORE;
    constexpr bool SCALES_ALONE = SHIFTS && !HAS_BIAS;
    SoftcapMode mode = APPLIED;
    if (CAPPED) mode = cap_large(s, scores.cap, scores.cap_inverse, small_cap);  // before keys are hidden: of −∞ it would make −cap
    if constexpr (ANY && !SCALES_ALONE) {
      if constexpr (IN_PARTS<EXACT>)
        in_turns<16>(s, [&](float (&part)[16], int done) { change<EXACT, false>(part, f, rows, known<16>(rows, from, done), from, done); });
      else change<EXACT, SHIFTS>(s, f, rows, ahead.known, from, 0);
    }
    if constexpr (EXACT && HAS_MASK)
      if (hides) hide(s, ahead.sight);
    if constexpr (HAS_BIAS) warp_barrier();  // the next block's may come
    if constexpr (SHIFTS) {
      // Behind the diagonal, where keys are OUTWARDS, ALiBi falls.
      auto slope = [&](const Row& row) { return OUTWARDS && (float)from >= row.origin ? -row.slope : row.slope; };
      const float x = slope(rows.row[0]), y = slope(rows.row[1]);
      const float c = SCALES_ALONE ? scores.scale_log2 * f.here : scores.scale_log2;
      return {APPLIED, c, {x * ((float)from - rows.row[0].origin), y * ((float)from - rows.row[1].origin)}, {x, y}};
    }
    if (ANY) return {APPLIED, EXACT ? 1.f : SCALED ? scores.scale_log2 : Expression::HAS_SCORE ? LOG2_E : 1.f};
    return {mode, f.c};
  }
  KS_DEVICE void hide(float (&s)[BN / 2], const Scores& own, int x, int y, int from) const {
    const KeyRange first = own.any(x, x), second = own.any(y, y);
    const int low[2] = {first.begin - from, second.begin - from};
    const int high[2] = {first.end - from, second.end - from};
    mask_columns(s, low, high);
  }
  // Rare: what each of the thread's queries, x and x + 8, does not see.
  KS_DEVICE void hide_each(float (&s)[BN / 2], const Scores& own, int x, int from) const {
    in_turns<4>(s, [&](float (&part)[4], int done) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = x + i / 2 * 8;
        if (!own.visible(group_head_of(row), query_of(row), from + 2 * done + i % 2)) part[i] = -infinity();
      }
    });
  }
  // A softcap that is not yet applied to products keeps their order.
  KS_DEVICE void largest(const float (&s)[BN / 2], float (&top)[2], const Form& form) const {
    row_max(s, top);
#pragma unroll
    for (int r = 0; r < 2; r++)
      if (CAPPED && form.mode != APPLIED && top[r] != -infinity()) top[r] = Capped<true>{small_cap}(top[r], 0.f);
  }
  // The short polynomial serves unmasked blocks alone: elsewhere it would be code, a tenth of a kernel's, for few blocks.
  template<int FROM, int TO, bool MASKED>
  KS_DEVICE bool exponentials(float (&s)[BN / 2], const float (&m)[2], float (&sum)[2], const Form& form) const {
    if (CAPPED && form.mode == SHORT && !MASKED) return exp2_and_sum<FROM, TO, MASKED>(s, m, sum, Capped<false>{small_cap});
    if (CAPPED && form.mode != APPLIED) return exp2_and_sum<FROM, TO, MASKED>(s, m, sum, Capped<true>{small_cap});
    if constexpr (Config::ALIBI && SCALED && !MASKED) {
      const float base[2] = {m[0] - form.shift[0], m[1] - form.shift[1]};
      return exp2_and_sum<FROM, TO, false>(s, base, sum, Sloped{form.c, {form.slope[0], form.slope[1]}});
    }
    return exp2_and_sum<FROM, TO, MASKED>(s, m, sum, Scaled{form.c});
  }
  KS_DEVICE void apply(float (&s)[BN / 2], const Factor& f, const Scores& own, int x, int from) const {
    if constexpr (ANY) {
      in_turns<16>(s, [&](float (&part)[16], int done) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
          const int row = x + i / 2 % 2 * 8;
          part[i] = own.apply(part[i] * f.here, group_head_of(row), query_of(row), from + 2 * done + i / 4 * 8 + i % 2);
        }
      });
    } else {
      multiply(s, f);
      if (CAPPED) cap_scores(s, scores.cap, scores.cap_inverse);
    }
  }
};
