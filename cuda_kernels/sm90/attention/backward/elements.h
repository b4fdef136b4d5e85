// Scores and masks by element in the gradients: biases, masks in memory, ALiBi, score_mods and mask_mods.
//
// Scores are transposed, keys × queries (fragments.h), and a bias or a mask lies along the keys. Each warp copies what is its own, 16 keys of
// a step's queries, to shared memory of its own while the step before is multiplied, and reads it there as its fragments lie: of 16
// bits by transposing matrix loads, of others an element at a time. Nobody else waits for it. Scores are computed in base 2, in place of
// products. Bytes of a warp and step: 16·STEP elements of each.
#pragma once
#include "sm90/attention/backward/tiles.h"

constexpr bool BY_ELEMENT = Scores::KIND == ScoreKind::ANY || Config::MASK;
static_assert(!LISTED || !(HAS_BIAS || Config::MASK), "the next step's queries are not known when it is copied");

typedef conditional<HAS_BIAS, Config::BIAS, float>::type Bias;
constexpr int BIAS_BYTES = HAS_BIAS ? sizeof(Bias) : 0;
constexpr int PLANE_BYTES = 16 * STEP * (BIAS_BYTES + Config::MASK);  // of a warp's 16 keys and a step's queries

// STEP rows of 16 keys of a bias or a mask, chunks of 16 bytes; those of some rows change places, so that reads meet other banks.
template<class X> struct StagedPlane {
  static constexpr int SIZE = sizeof(X), PER = 16 / SIZE, AT_ONCE = WARP / SIZE;  // elements of a chunk, rows that a warp copies at once
  static_assert(SIZE == 1 || SIZE == 2 || SIZE == 4, "as eight() reads them");
  u32 at;  // in shared memory

  static KS_DEVICE int place(int row, int chunk) {
    const int moved = SIZE == 2 ? row >> 2 & 1 : SIZE == 4 ? row >> 1 & 3 : 0;
    return row * (16 * SIZE) + (chunk ^ moved) * 16;
  }
  // Of the plane at `from`, query `row` and behind, keys from `key` on; zeros, or nothing, of what is behind the last.
  KS_DEVICE void copy(const X* from, i64 row_stride, i64 column, int row, int key, int S_q, int S_k, int lane) const {
    if (column == 1 && (((u64)from | (u64)row_stride * SIZE) & 15) == 0) {
      const int first = lane / SIZE, chunk = lane % SIZE;
      const int there = max_of(min_of(S_k - key - chunk * PER, PER), 0) * SIZE;
      const X* x = from + (i64)(row + first) * row_stride + key + chunk * PER;
#pragma unroll
      for (int i = 0; i < STEP; i += AT_ONCE, x += AT_ONCE * row_stride)
        async_copy_bytes(at + place(first, chunk) + i * (16 * SIZE), x, row + first + i < S_q ? there : 0);
    } else {
#pragma unroll 4
      for (int i = lane; i < 16 * STEP; i += WARP) {
        const int r = i / 16, c = i % 16;
        const bool there = row + r < S_q && key + c < S_k;
        store(at + place(r, c / PER) + c % PER * SIZE, there ? from[(i64)(row + r) * row_stride + (i64)(key + c) * column] : X{});
      }
    }
  }

  // Of 16 queries of a step, the h-th such: element i is of key lane/4 + 8·(i/2 % 2) and query 8·(i/4) + lane%4·2 + i%2.
  struct Eight {
    typename conditional<SIZE == 2, u32, X>::type of[SIZE == 2 ? 4 : 8];
    KS_DEVICE float operator[](int i) const {
      if constexpr (SIZE == 2) return i % 2 ? unpacked_high(of[i / 2], X()) : unpacked_low(of[i / 2], X());
      else return of[i];
    }
  };
  KS_DEVICE Eight eight(int h, int lane) const {
    Eight x;
    if constexpr (SIZE == 2) {
      ldmatrix_transposed(at + place(lane / 16 * 8 + lane % 8, lane / 8 % 2) + h * (16 * 16 * SIZE), x.of);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, key = lane / 4 + i / 2 % 2 * 8;
        load(at + place(row, key / PER) + key % PER * SIZE + h * (16 * 16 * SIZE), x.of[i]);
      }
    }
    return x;
  }

 private:
  static KS_DEVICE void load(u32 from, float& x) { asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory"); }
  static KS_DEVICE void load(u32 from, unsigned char& x) {
    u32 y;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(y) : "r"(from) : "memory");
    x = y;
  }
  static KS_DEVICE void store(u32 to, float x) { asm volatile("st.shared.f32 [%0], %1;" :: "r"(to), "f"(x) : "memory"); }
  static KS_DEVICE void store(u32 to, unsigned char x) { asm volatile("st.shared.u8 [%0], %1;" :: "r"(to), "r"((u32)x) : "memory"); }
  template<class Y> static KS_DEVICE void store(u32 to, Y x) {
    asm volatile("st.shared.b16 [%0], %1;" :: "r"(to), "h"(*(const unsigned short*)&x) : "memory");
  }
};

// Of a warp's 16 keys, one of eight of a tile, and the queries of one head after the other. `planes`: of the first warp.
struct Elements {
  const ScoreArguments& score;
  u32 planes, own_plane;
  const WorkTile& w;
  int head, own_key, lane;

  // The warp's own memory and first key. Of packed sequences and staggered tiles, under lists and prefixes, and beside a score_mod, no register is
  // left to keep them in.
  static constexpr bool KEPT = Config::Q_VIEW != PACKED && !STAGGERED && !Config::PREFIX && !LISTED && !Expression::HAS_SCORE;
  KS_DEVICE u32 plane() const { return KEPT ? own_plane : planes + warp_index() * PLANE_BYTES; }
  KS_DEVICE int key() const { return KEPT ? own_key : (w.tile * 8 + warp_index()) * 16; }

  // ∂score/∂product of each score, where it is not 1.
  struct Slopes {
    static constexpr bool THERE = BY_ELEMENT && Scores::HAS_SLOPE;
    float values[THERE ? STEP / 2 : 1];
    KS_DEVICE float& of(int i) { return values[THERE ? i : 0]; }
  };

  // What a step from this query on takes of memory.
  KS_DEVICE void fetch(int query) const {
    if constexpr (HAS_BIAS) {
      const auto& x = score.bias;
      StagedPlane<Bias>{plane()}.copy(x.base + w.batch * x.batch + head * x.head, x.row, x.column, query, key(), w.S_q, w.S_k, lane);
    }
    if constexpr (Config::MASK) {
      const auto& x = score.mask;
      StagedPlane<unsigned char>{plane() + BIAS_BYTES * 16 * STEP}.copy(x.base + w.batch * x.batch + head * x.head, x.row, x.column, query, key(),
                                                                       w.S_q, w.S_k, lane);
    }
  }

  // Scores in base 2 of products with the queries from `query` on, or of their tanh under a softcap; −∞ where a mask hides them.
  KS_DEVICE void apply(float (&s)[STEP / 2], Slopes& slopes, int query) const {
    constexpr bool STAGED = HAS_BIAS || Config::MASK;
    if (STAGED) async_copies_wait(), warp_barrier();
    const Expression own = score.captured();
    const Expression::Tile tile = own.tile(w.batch, head, w.S_q, w.S_k);
    const Expression::Column columns[2] = {own.column(tile, key() + lane / 4), own.column(tile, key() + lane / 4 + 8)};
    const float slope = Config::ALIBI ? slope_in_base2(score.slopes.base[w.batch * score.slopes.batch + head * score.slopes.head]) : 0.f;
    const float distance = Config::ALIBI ? (float)(key() + lane / 4 - (query + lane % 4 * 2) - (w.S_k - w.S_q)) : 0.f;
    constexpr bool BUILT_IN = Config::SOFTCAP || Config::ALIBI || HAS_BIAS;
    const float factor = Config::SOFTCAP ? score.cap : BUILT_IN || !Expression::HAS_SCORE ? score.scale_log2 : LN_2 * score.scale_log2;
#pragma unroll
    for (int h = 0; h < STEP / 16; h++) {
      typename StagedPlane<Bias>::Eight bias;
      typename StagedPlane<unsigned char>::Eight seen;
      if constexpr (HAS_BIAS) bias = StagedPlane<Bias>{plane()}.eight(h, lane);
      if constexpr (Config::MASK) seen = StagedPlane<unsigned char>{plane() + BIAS_BYTES * 16 * STEP}.eight(h, lane);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int further = 16 * h + i / 4 * 8 + i % 2, r = i / 2 % 2;
        float& x = s[8 * h + i];
        const float t = x;
        x *= factor;
        if (Config::ALIBI) x = fmaf(-slope, fabsf(distance + (float)(8 * r - further)), x);
        if constexpr (HAS_BIAS) x += in_base2(bias[i]);
        const Expression::Row row = own.row(tile, query + lane % 4 * 2 + further);
        if constexpr (Expression::HAS_SCORE) {
          const float y = BUILT_IN ? LN_2 * x : x;
          x = in_base2(own.score(y, tile, row, columns[r]));
          slopes.of(8 * h + i) = own.slope(y, tile, row, columns[r]);
        } else if constexpr (Scores::HAS_SLOPE) {
          slopes.of(8 * h + i) = 1.f;
        }
        if constexpr (Config::SOFTCAP) slopes.of(8 * h + i) *= fmaf(-t, t, 1.f);
        if constexpr (Config::MASK)
          if (!seen.of[i]) x = -infinity();
      }
    }
    if (STAGED) warp_barrier();  // the next step's may come
  }

  // What a mask_mod knows of a step's queries alone: where that is more than their numbers, each lane computes it of one in 32, and all get it
  // from there.
  struct StepRows {
    static constexpr int WORDS = max_of((int)sizeof(Expression::Row) / 4, 1);
    union Words { Expression::Row row; u32 words[WORDS]; };
    Words own[STEP / WARP];
    StepRows() = default;
    KS_DEVICE StepRows(const Expression& expression, const Expression::Tile& tile, int query, int lane) {
#pragma unroll
      for (int i = 0; i < STEP / WARP; i++) own[i].row = expression.row(tile, query + WARP * i + lane);
    }
    // All lanes ask, each for a query of the same 32, `window`, which lane `from` has.
    KS_DEVICE Expression::Row of(int query, int window, int from) const {
      Words to;
      to.words[0] = query;
#pragma unroll
      for (int i = 1; i < WORDS; i++) to.words[i] = __shfl_sync(~0u, own[window].words[i], from);
      return to.row;
    }
  };
  // Whether it is asked for a step ahead: of memory alone.
  static constexpr bool FETCHES_ROWS = LISTED && Expression::HAS_MASK && Expression::ROW_IS_LOADED && StepRows::WORDS <= 4;
  KS_DEVICE StepRows see(int query) const {
    const Expression own = score.captured();
    return {own, own.tile(w.batch, head, w.S_q, w.S_k), query, lane};
  }
  // Scores, or their tanh, of pairs that a mask_mod hides.
  KS_DEVICE void hide_by_mask(float (&s)[STEP / 2], int query, float hidden, const StepRows& rows) const {
    const Expression own = score.captured();
    const Expression::Tile tile = own.tile(w.batch, head, w.S_q, w.S_k);
    const Expression::Column columns[2] = {own.column(tile, key() + lane / 4), own.column(tile, key() + lane / 4 + 8)};
    if (Expression::COLUMNS_MAY_BE_ALIKE && are_alike(columns[0], columns[1])) {
      u32 seen = 0;
#pragma unroll
      for (int i = 0; i < STEP / WARP; i++) seen |= own_columns(__ballot_sync(~0u, own.visible(tile, rows.own[i].row, columns[0]))) << WARP / 4 * i;
#pragma unroll
      for (int i = 0; i < STEP / 2; i++)
        if (!(seen >> (i / 4 * 2 + i % 2) & 1)) s[i] = hidden;
      return;
    }
#pragma unroll
    for (int two = 0; two < STEP / 4; two++) {
      const int place = two / 2 * 8 + two % 2, further = place + lane % 4 * 2;
      const Expression::Row row = rows.of(query + further, place / WARP, further % WARP);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float& x = s[two / 2 * 4 + 2 * r + two % 2];
        x = own.visible(tile, row, columns[r]) ? x : hidden;
      }
    }
  }

  // Scores of pairs beyond the band and the prefix, the last key or the last query. ahead: as in some_hidden.
  KS_DEVICE void hide(float (&s)[STEP / 2], const Band& band, int key0, int ahead, int query, float hidden = -infinity()) const {
    const int from = ahead - (key() - key0 + lane / 4) + lane % 4 * 2;
    const int prefix = !Config::PREFIX ? 0 : LISTED ? score.of(w.batch, w.S_q, w.S_k).prefix : w.banded.prefix;
    int low[2], high[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const bool early = Config::PREFIX && key() + lane / 4 + 8 * r < prefix;
      low[r] = (Config::CAUSAL || Config::WINDOW) && !early ? 8 * r - band.reach() - from : -STEP;
      high[r] = min_of(w.S_q - query - lane % 4 * 2, Config::WINDOW && !early ? 8 * r + band.left + 1 - from : STEP);
      if (key() + lane / 4 + 8 * r >= w.S_k) low[r] = STEP;
    }
#pragma unroll
    for (int i = 0; i < STEP / 2; i++) {
      const int further = i / 4 * 8 + i % 2, r = i / 2 % 2;
      if (further < low[r] || further >= high[r]) s[i] = hidden;
    }
  }

  // Of a LISTED step: the band, which its block does not know of, and where that is masked the rest.
  KS_DEVICE void hide_listed(float (&s)[STEP / 2], const ListedBlock& block, const Band& band, int key0, int ahead, bool tail,
                             const StepRows& rows) const {
    const float hidden = BY_ELEMENT ? -infinity() : hidden_score();
    const int query = block.block() * STEP;
    if (some_hidden(band, ahead, tail) || query + STEP > w.S_q) hide(s, band, key0, ahead, query, hidden);
    if constexpr (Expression::HAS_MASK)
      if (block.masked()) hide_by_mask(s, query, hidden, FETCHES_ROWS ? rows : see(query));
  }
};
