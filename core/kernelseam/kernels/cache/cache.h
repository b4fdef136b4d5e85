// Rows of k and v between tokens and the pages of a cache; to append, normalised (RMS norm), rotated and rounded to e4m3, and q
// beside them. What is computed stands in PagedCache (descriptors/cache/cache.py).
//
// LANES neighbouring lanes have ROW_HEADS heads of q, of k or of v of one token. A row is chunks of N elements, 16 bytes of the wider
// type where its rows allow that, else one. A lane has PAIRS pairs of chunks of each row: those that lie half the rotated elements
// apart, so that both elements of a half-split pair are its own, and of what is not rotated such that neighbouring lanes have
// neighbouring chunks: a warp reads and writes whole lines. All rows are loaded before their token's place is known; it, cosines and
// sines are found once for all of them. Sums and largest magnitudes of a row go over its lanes by shuffles, in which all lanes of a
// warp take part. q may be written over: no lane reads what another writes.
//
// Shared memory: none. Registers: 2·PAIRS·ROW_HEADS chunks in their type, 4·PAIRS·N floats for a row, its cosines and sines.
#include "generated/config.h"
#include "tile/tile.h"
#include "tile/element.h"

typedef Config::T T;
typedef Config::PAGES P;
typedef optional<Config::NORM> Norm;
typedef Norm::type Weight;

enum { APPEND, GATHER, COPY };
enum { OWN_NUMBER, GIVEN, LENGTHS };  // a token's position
enum { NO_SCALES, OF_HEADS, OF_TOKENS };
enum { HALF_SPLIT = 1, INTERLEAVED = 2 };

constexpr int D = Config::D, DV = Config::DV, LANES = Config::LANES, HEADS = Config::ROW_HEADS;
constexpr int N = Config::WIDE ? 16 / (int)(sizeof(T) > sizeof(P) ? sizeof(T) : sizeof(P)) : 1;
constexpr int CHUNKS = ((D > DV ? D : DV) + N - 1) / N;
constexpr int HALF = Config::ROTARY == HALF_SPLIT ? Config::ROTARY_DIM / 2 / N : 0, REST = (CHUNKS - 2 * HALF + 1) / 2;  // pairs
constexpr int PAIRS = (HALF + REST + LANES - 1) / LANES, GROUPS = Config::THREADS / LANES;
static_assert(WARP % LANES == 0, "a row's lanes are in one warp");
constexpr float LEAST_SCALE = 7.52316385e-37f;  // 2^−120: its inverse is no subnormal

template<class X, int COUNT = N> struct alignas(COUNT * sizeof(X) < 16 ? COUNT * sizeof(X) : 16) Elements { X v[COUNT]; };
typedef float Row[PAIRS][2][N];
template<class X> using RowOf = Elements<X>[PAIRS][2];

// The first element of a chunk; beyond all rows where there is none.
KS_DEVICE int column_of(int pair, int side) {
  const int i = thread_index() % LANES + pair * LANES;
  if (i >= HALF + REST) return CHUNKS * N;
  if (Config::ROTARY == INTERLEAVED && N == 1) return 2 * i + side;
  return N * (i < HALF ? i + side * HALF : HALF + i + side * REST);
}
// A lane's chunks of a row of `dim` elements, others being 0.
template<class X> KS_DEVICE void load(RowOf<X>& to, const X* from, int dim) {
#pragma unroll
  for (int j = 0; j < PAIRS; j++)
#pragma unroll
    for (int side = 0; side < 2; side++) {
      const int column = column_of(j, side);
      if (column < dim) to[j][side] = *(const Elements<X>*)(from + column);
      else
#pragma unroll
        for (int e = 0; e < N; e++) to[j][side].v[e] = zero_of<X>();
    }
}
template<class X> KS_DEVICE void store(X* to, const RowOf<X>& from, int dim) {
#pragma unroll
  for (int j = 0; j < PAIRS; j++)
#pragma unroll
    for (int side = 0; side < 2; side++) {
      const int column = column_of(j, side);
      if (column < dim) *(Elements<X>*)(to + column) = from[j][side];
    }
}
template<class X> KS_DEVICE void to_floats(Row& to, const RowOf<X>& from) {
#pragma unroll
  for (int j = 0; j < PAIRS; j++)
#pragma unroll
    for (int side = 0; side < 2; side++)
#pragma unroll
      for (int e = 0; e < N; e++) to[j][side][e] = to_sum(from[j][side].v[e]);
}
template<class X> KS_DEVICE void store_floats(X* to, const Row& from, int dim) {
  RowOf<X> x;
#pragma unroll
  for (int j = 0; j < PAIRS; j++)
#pragma unroll
    for (int side = 0; side < 2; side++)
#pragma unroll
      for (int e = 0; e < N; e++) x[j][side].v[e] = convert<X>(from[j][side][e]);
  store(to, x, dim);
}
KS_DEVICE void scaled(Row& x, float factor) {
  if (!Config::CACHE_SCALES) return;
#pragma unroll
  for (int j = 0; j < PAIRS; j++)
#pragma unroll
    for (int side = 0; side < 2; side++)
#pragma unroll
      for (int e = 0; e < N; e++) x[j][side][e] *= factor;
}

// Rows of tokens (outer: the entry of the batch) or of pages.
template<class X> struct Rows {
  X* base;
  i64 outer, head, row;
  KS_DEVICE X* at(i64 o, int h, int r) const { return base + o * outer + h * head + r * row; }
  // These or others, member by member: a reference to either would put both into memory.
  KS_DEVICE Rows or_if(bool there, const Rows& other) const {
    return {there ? other.base : base, there ? other.outer : outer, there ? other.head : head, there ? other.row : row};
  }
};

struct Place { bool stored; int page, row, position; };

// Where tokens lie.
struct Places {
  const void* slots;
  const int *table, *lengths, *positions, *offsets, *sources;
  i64 slots_batch, slots_row, table_row, positions_batch, positions_row;
  int S, sequences, table_width, pages;
  FastDivmod page;

  KS_DEVICE Place of(int batch, int s) const {
    int entry = batch, begin = 0, end = S, position = s;
    if (Config::PACKED) {
      int low = 0, high = sequences + 1;  // offsets below low are at most s, those from high on above
#pragma unroll 1
      while (low < high) {
        const int middle = (low + high) / 2;
        if (offsets[middle] <= s) low = middle + 1;
        else high = middle;
      }
      entry = low - 1;
      if (entry < 0 || entry >= sequences) return {};
      begin = offsets[entry], end = offsets[entry + 1];
    }
    if (Config::POSITION == GIVEN) position = positions[batch * positions_batch + s * positions_row];
    else if (Config::POSITION == LENGTHS && Config::DIRECTION == APPEND) position = lengths[entry] - (end - s);
    else position = s - begin;
    if (Config::SLOTS) {
      const i64 place = batch * slots_batch + s * slots_row;
      const i64 slot = Config::SLOTS == 8 ? ((const i64*)slots)[place] : ((const int*)slots)[place];
      if (slot < 0 || slot >= (i64)pages * page.d) return {};
      const int number = page.quotient((int)slot);
      return {true, number, (int)slot - number * page.d, position};
    }
    const bool ends = Config::POSITION == LENGTHS && Config::DIRECTION == GATHER && position >= lengths[entry];
    if (position < 0 || ends) return {};
    const int column = page.quotient(position);
    if (column >= table_width) return {};
    const int number = table[entry * table_row + column];
    return {number >= 0 && number < pages, number, position - column * page.d, position};
  }
};

// Cosines and sines: rows of rotary_dim / 2.
struct Rotation {
  const float *cosines, *sines;
  i64 row;
  int end;  // positions from here on have none
};

// A lane's cosines and sines. Half-split: of a pair of chunks; interleaved: of one chunk, N / 2 each, and of the other.
struct Angles {
  static constexpr int COUNT = N == 1 ? 1 : Config::ROTARY == INTERLEAVED ? N / 2 : N, SIDES = N > 1 && Config::ROTARY == INTERLEAVED ? 2 : 1;
  Elements<float, COUNT> cosines[PAIRS][SIDES], sines[PAIRS][SIDES];

  KS_DEVICE void load(const Rotation& rotation, int position) {
    const i64 at = max_of(min_of(position, rotation.end - 1), 0) * rotation.row;
#pragma unroll
    for (int j = 0; j < PAIRS; j++)
#pragma unroll
      for (int side = 0; side < SIDES; side++) {
        const int column = column_of(j, side), first = Config::ROTARY == INTERLEAVED ? column / 2 : column;
        if (first >= Config::ROTARY_DIM / 2) continue;
        cosines[j][side] = *(const Elements<float, COUNT>*)(rotation.cosines + at + first);
        sines[j][side] = *(const Elements<float, COUNT>*)(rotation.sines + at + first);
      }
  }
  static KS_DEVICE void rotate(float& x, float& y, float c, float s) {
    const float first = x;
    x = first * c - y * s;
    y = y * c + first * s;
  }
  KS_DEVICE void apply(Row& x) const {
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      if (Config::ROTARY == HALF_SPLIT || N == 1) {
        if (column_of(j, 0) >= (Config::ROTARY == HALF_SPLIT ? Config::ROTARY_DIM / 2 : Config::ROTARY_DIM)) continue;
#pragma unroll
        for (int e = 0; e < COUNT; e++) rotate(x[j][0][e], x[j][1][e], cosines[j][0].v[e], sines[j][0].v[e]);
      } else {
#pragma unroll
        for (int side = 0; side < SIDES; side++) {
          if (column_of(j, side) >= Config::ROTARY_DIM) continue;
#pragma unroll
          for (int e = 0; e + 1 < N; e += 2) rotate(x[j][side][e], x[j][side][e + 1], cosines[j][side].v[e / 2], sines[j][side].v[e / 2]);
        }
      }
    }
  }
};

// What all elements of a row of q or k are multiplied by, and their weights.
KS_DEVICE void normalise(Row& x, const Weight* weights, float eps, bool is_value) {
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < PAIRS; j++)
#pragma unroll
    for (int side = 0; side < 2; side++)
#pragma unroll
      for (int e = 0; e < N; e++) sum += x[j][side][e] * x[j][side][e];
#pragma unroll
  for (int m = 1; m < LANES; m *= 2) sum += shuffle_xor(sum, m);
  if (is_value) return;
  const float factor = element_rsqrt(sum / (float)D + eps);
  RowOf<Weight> w;
  load(w, weights, D);
#pragma unroll
  for (int j = 0; j < PAIRS; j++)
#pragma unroll
    for (int side = 0; side < 2; side++)
#pragma unroll
      for (int e = 0; e < N; e++) x[j][side][e] *= factor * to_sum(w[j][side].v[e]);
}

// The scale of a row of pages of 8 bits: its largest magnitude is e4m3's largest number.
KS_DEVICE float scale_of(const Row& x) {
  float most = 0.f;
#pragma unroll
  for (int j = 0; j < PAIRS; j++)
#pragma unroll
    for (int side = 0; side < 2; side++)
#pragma unroll
      for (int e = 0; e < N; e++) most = maximum(most, maximum(x[j][side][e], -x[j][side][e]));
#pragma unroll
  for (int m = 1; m < LANES; m *= 2) most = maximum(most, shuffle_xor(most, m));
  return maximum(most / Config::LARGEST, LEAST_SCALE);
}

KS_BODY(Config::THREADS, 1)
paged_cache_body(Rows<T> k, Rows<T> v, Rows<P> k_pages, Rows<P> v_pages, Places places, int num_heads, int kv_heads, int q_groups,
                 int kv_groups, FastDivmod groups, FastDivmod tokens, int total, Rows<T> q = {}, Rows<T> q_out = {},
                 Rotation rotation = {}, const Weight* q_norm = {}, const Weight* k_norm = {}, float eps = {},
                 Rows<float> k_scales = {}, Rows<float> v_scales = {}) {
  const int number = (int)block_index() * GROUPS + thread_index() / LANES;
  const bool inside = number < total;
  const int token = inside ? groups.quotient(number) : 0, own = inside ? number - token * groups.d : 0;
  const int batch = tokens.quotient(token), s = token - batch * tokens.d;
  const bool is_query = own < q_groups, is_value = own >= q_groups + kv_groups;
  const int first = (is_query ? own : is_value ? own - q_groups - kv_groups : own - q_groups) * HEADS;
  const int heads = inside ? min_of((is_query ? num_heads : kv_heads) - first, HEADS) : 0, dim = is_value ? DV : D;
  const Rows<T> rows = k.or_if(is_value, v).or_if(is_query, q);
  T* const row = rows.at(Config::DIRECTION == COPY ? places.sources[batch] : batch, first, s);
  const Rows<P> pages = k_pages.or_if(is_value, v_pages);
  const Rows<float> scales = k_scales.or_if(is_value, v_scales);

  if constexpr (Config::DIRECTION == GATHER) {
    const Place place = inside ? places.of(batch, s) : Place{};
    if (!place.stored) return;
    RowOf<P> x[HEADS];
    float factors[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      if (h >= heads) continue;
      load(x[h], pages.at(place.page, first + h, place.row), dim);
      factors[h] = Config::CACHE_SCALES == OF_TOKENS  ? *scales.at(place.page, first + h, place.row)
                   : Config::CACHE_SCALES == OF_HEADS ? *scales.at(0, first + h, 0)
                                                      : 1.f;
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      if (h >= heads) continue;
      if constexpr (Config::EXACT) {
        store((P*)(row + h * rows.head), x[h], dim);
      } else {
        Row y;
        to_floats(y, x[h]);
        scaled(y, factors[h]);
        store_floats(row + h * rows.head, y, dim);
      }
    }
    return;
  }

  RowOf<T> x[HEADS];
#pragma unroll
  for (int h = 0; h < HEADS; h++) load(x[h], row + h * rows.head, h < heads ? dim : 0);
  const Place place = inside ? places.of(batch, s) : Place{};
  if constexpr (Config::EXACT) {
    if (!place.stored) return;
#pragma unroll
    for (int h = 0; h < HEADS; h++)
      if (h < heads) store((T*)pages.at(place.page, first + h, place.row), x[h], dim);
  } else {
    Angles angles;
    if (Config::ROTARY != 0 && place.stored && !is_value) angles.load(rotation, place.position);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      Row y;
      to_floats(y, x[h]);
      if constexpr (Norm::THERE) normalise(y, is_query ? q_norm : k_norm, eps, is_value);
      if (Config::ROTARY != 0 && place.stored && !is_value) angles.apply(y);
      float scale = 1.f;
      if (Config::CACHE_SCALES == OF_TOKENS) scale = scale_of(y);
      if (!place.stored || h >= heads) continue;
      if (is_query) {
        store_floats(q_out.at(batch, first + h, s), y, D);
        continue;
      }
      if (Config::CACHE_SCALES == OF_HEADS) scale = *scales.at(0, first + h, 0);
      if (Config::CACHE_SCALES == OF_TOKENS && thread_index() % LANES == 0) *scales.at(place.page, first + h, place.row) = scale;
      scaled(y, 1.f / scale);
      store_floats(pages.at(place.page, first + h, place.row), y, dim);
    }
  }
}
