// Rows of k and v between tokens and the pages of a cache; to append, normalised (RMS norm), rotated and rounded to e4m3, and q
// beside them. What is computed stands in PagedCache (descriptors/cache/cache.py).
//
// LANES neighbouring lanes have one row, a head of q, k or v of a token: N elements each, 16 bytes of the wider type, so that a
// warp reads and writes whole lines; EACH times where a row is longer than a warp. Rows are numbered token after token, heads
// within. All of a row is loaded before its place is known, and before anything of it is stored: q may be written over. A half-split
// pair lies in two lanes: each loads the other's elements too, which the cache has. Sums and largest magnitudes of a row go over its
// lanes by shuffles, in which all lanes of a warp take part.
//
// Shared memory: none. Registers: 2·EACH·N floats for the elements and their partners, N for cosines and sines.
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

constexpr int D = Config::D, DV = Config::DV, LANES = Config::LANES, N = 16 / (int)(sizeof(T) > sizeof(P) ? sizeof(T) : sizeof(P));
constexpr int LONGEST = D > DV ? D : DV, EACH = (LONGEST + N * LANES - 1) / (N * LANES), ROWS = Config::THREADS / LANES;
static_assert(WARP % LANES == 0, "a row's lanes are in one warp");
constexpr float LEAST_SCALE = 7.52316385e-37f;  // 2^−120: its inverse is no subnormal

template<class X> struct alignas(N * sizeof(X) < 16 ? N * sizeof(X) : 16) Elements { X v[N]; };

// Elements from `column` on of a row of `dim`; others stay as they are.
template<class X> KS_DEVICE void load(Elements<X>& to, const X* from, int column, int dim) {
  if (Config::WIDE) {
    if (column < dim) to = *(const Elements<X>*)(from + column);
  } else {
#pragma unroll
    for (int e = 0; e < N; e++)
      if (column + e < dim) to.v[e] = from[column + e];
  }
}
template<class X> KS_DEVICE void store(X* to, const Elements<X>& from, int column, int dim) {
  if (Config::WIDE) {
    if (column < dim) *(Elements<X>*)(to + column) = from;
  } else {
#pragma unroll
    for (int e = 0; e < N; e++)
      if (column + e < dim) to[column + e] = from.v[e];
  }
}
template<class X> KS_DEVICE void load_floats(float (&to)[N], const X* from, int column, int dim) {
  Elements<X> x;
#pragma unroll
  for (int e = 0; e < N; e++) x.v[e] = zero_of<X>();
  load(x, from, column, dim);
#pragma unroll
  for (int e = 0; e < N; e++) to[e] = to_sum(x.v[e]);
}
template<class X> KS_DEVICE void store_floats(X* to, const float (&from)[N], int column, int dim) {
  Elements<X> x;
#pragma unroll
  for (int e = 0; e < N; e++) x.v[e] = convert<X>(from[e]);
  store(to, x, column, dim);
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

  // The elements of a row from `column` on, with those that half-split pairs them with.
  KS_DEVICE void apply(float (&x)[N], const float (&partners)[N], int column, int position) const {
    constexpr int HALF = Config::ROTARY_DIM / 2;
    if (column >= Config::ROTARY_DIM) return;
    const i64 at = max_of(min_of(position, end - 1), 0) * row;
    if constexpr (Config::ROTARY == HALF_SPLIT) {
      if constexpr (Config::WIDE) {
        float c[N], s[N];
        const bool second = column >= HALF;
        load_floats(c, cosines + at, second ? column - HALF : column, HALF);
        load_floats(s, sines + at, second ? column - HALF : column, HALF);
#pragma unroll
        for (int e = 0; e < N; e++) x[e] = x[e] * c[e] + (second ? partners[e] : -partners[e]) * s[e];
      } else {
#pragma unroll
        for (int e = 0; e < N; e++) {
          const int i = column + e;
          if (i >= Config::ROTARY_DIM) break;
          const bool second = i >= HALF;
          const i64 place = at + (second ? i - HALF : i);
          x[e] = x[e] * cosines[place] + (second ? partners[e] : -partners[e]) * sines[place];
        }
      }
    } else {
#pragma unroll
      for (int e = 0; e < N; e += 2) {
        if (column + e >= Config::ROTARY_DIM) break;
        const i64 place = at + (column + e) / 2;
        const float c = cosines[place], s = sines[place], first = x[e];
        x[e] = first * c - x[e + 1] * s;
        x[e + 1] = x[e + 1] * c + first * s;
      }
    }
  }
};

// The element that half-split pairs element i with.
KS_DEVICE int partner_of(int i) { return i < Config::ROTARY_DIM / 2 ? i + Config::ROTARY_DIM / 2 : i - Config::ROTARY_DIM / 2; }
template<class X> KS_DEVICE void load_partners(float (&to)[N], const X* from, int column) {
#pragma unroll
  for (int e = 0; e < N; e++) to[e] = 0.f;
  if (column >= Config::ROTARY_DIM) return;
  if constexpr (Config::WIDE) {
    load_floats(to, from, partner_of(column), D);
  } else {
#pragma unroll
    for (int e = 0; e < N; e++)
      if (column + e < Config::ROTARY_DIM) to[e] = to_sum(from[partner_of(column + e)]);
  }
}
KS_DEVICE int column_of(int j) { return (thread_index() % LANES + j * LANES) * N; }

// What all elements of a row of q or k are multiplied by, and their weights.
KS_DEVICE void normalise(float (&x)[EACH][N], float (&partners)[EACH][N], const Weight* weights, float eps, bool is_value) {
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < EACH; j++)
#pragma unroll
    for (int e = 0; e < N; e++) sum += x[j][e] * x[j][e];
#pragma unroll
  for (int m = 1; m < LANES; m *= 2) sum += shuffle_xor(sum, m);
  if (is_value) return;
  const float factor = element_rsqrt(sum / (float)D + eps);
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    float w[N];
    load_floats(w, weights, column_of(j), D);
#pragma unroll
    for (int e = 0; e < N; e++) x[j][e] *= factor * w[e];
    if (Config::ROTARY != HALF_SPLIT) continue;
    load_partners(w, weights, column_of(j));
#pragma unroll
    for (int e = 0; e < N; e++) partners[j][e] *= factor * w[e];
  }
}

// The scale of a row of pages of 8 bits: its largest magnitude is e4m3's largest number.
KS_DEVICE float scale_of(const float (&x)[EACH][N]) {
  float most = 0.f;
#pragma unroll
  for (int j = 0; j < EACH; j++)
#pragma unroll
    for (int e = 0; e < N; e++) most = maximum(most, maximum(x[j][e], -x[j][e]));
#pragma unroll
  for (int m = 1; m < LANES; m *= 2) most = maximum(most, shuffle_xor(most, m));
  return maximum(most / Config::LARGEST, LEAST_SCALE);
}

KS_BODY(Config::THREADS, 1)
paged_cache_body(Rows<T> k, Rows<T> v, Rows<P> k_pages, Rows<P> v_pages, Places places, int num_heads, int kv_heads,
                 FastDivmod heads, FastDivmod tokens, int total, Rows<T> q = {}, Rows<T> q_out = {}, Rotation rotation = {},
                 const Weight* q_norm = {}, const Weight* k_norm = {}, float eps = {}, Rows<float> k_scales = {},
                 Rows<float> v_scales = {}) {
  const int number = (int)block_index() * ROWS + thread_index() / LANES;
  const bool inside = number < total;
  const int token = inside ? heads.quotient(number) : 0, own = inside ? number - token * heads.d : 0;
  const int batch = tokens.quotient(token), s = token - batch * tokens.d;
  const bool is_query = own < num_heads, is_value = own >= num_heads + kv_heads;
  const int head = is_query ? own : is_value ? own - num_heads - kv_heads : own - num_heads, dim = is_value ? DV : D;
  const i64 outer = Config::DIRECTION == COPY ? places.sources[batch] : batch;
  T* const row = k.or_if(is_value, v).or_if(is_query, q).at(outer, head, s);

  if constexpr (Config::EXACT) {
    if (!inside) return;
    const Place place = places.of(batch, s);
    if (!place.stored) return;
    P* const in_page = k_pages.or_if(is_value, v_pages).at(place.page, head, place.row);
    const T* const from = Config::DIRECTION == GATHER ? (T*)in_page : row;
    T* const to = Config::DIRECTION == GATHER ? row : (T*)in_page;
    Elements<T> x[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) load(x[j], from, column_of(j), dim);
#pragma unroll
    for (int j = 0; j < EACH; j++) store(to, x[j], column_of(j), dim);
  } else if constexpr (Config::DIRECTION == GATHER) {
    const Place place = inside ? places.of(batch, s) : Place{};
    if (!place.stored) return;
    const P* const from = k_pages.or_if(is_value, v_pages).at(place.page, head, place.row);
    float scale = 1.f;
    const Rows<float> scales = k_scales.or_if(is_value, v_scales);
    if (Config::CACHE_SCALES == OF_HEADS) scale = *scales.at(0, head, 0);
    if (Config::CACHE_SCALES == OF_TOKENS) scale = *scales.at(place.page, head, place.row);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      float x[N];
      load_floats(x, from, column_of(j), dim);
      if (Config::CACHE_SCALES) {
#pragma unroll
        for (int e = 0; e < N; e++) x[e] *= scale;
      }
      store_floats(row, x, column_of(j), dim);
    }
  } else {
    float x[EACH][N], partners[EACH][N];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      load_floats(x[j], row, column_of(j), inside ? dim : 0);
      if (Config::ROTARY == HALF_SPLIT) load_partners(partners[j], row, inside && !is_value ? column_of(j) : Config::ROTARY_DIM);
    }
    const Place place = inside ? places.of(batch, s) : Place{};
    if constexpr (Norm::THERE) normalise(x, partners, is_query ? q_norm : k_norm, eps, is_value);
    if constexpr (Config::ROTARY != 0) {
#pragma unroll
      for (int j = 0; j < EACH; j++)
        if (place.stored && !is_value) rotation.apply(x[j], partners[j], column_of(j), place.position);
    }
    float scale = 1.f;
    if (Config::CACHE_SCALES == OF_TOKENS) scale = scale_of(x);
    warp_barrier();  // the row was read by all of its lanes
    if (!place.stored) return;
    if (is_query) {
#pragma unroll
      for (int j = 0; j < EACH; j++) store_floats(q_out.at(batch, head, s), x[j], column_of(j), D);
      return;
    }
    const Rows<float> scales = k_scales.or_if(is_value, v_scales);
    if (Config::CACHE_SCALES == OF_HEADS) scale = *scales.at(0, head, 0);
    if (Config::CACHE_SCALES == OF_TOKENS && thread_index() % LANES == 0) *scales.at(place.page, head, place.row) = scale;
    P* const to = k_pages.or_if(is_value, v_pages).at(place.page, head, place.row);
    const float inverse = 1.f / scale;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      if (Config::CACHE_SCALES) {
#pragma unroll
        for (int e = 0; e < N; e++) x[j][e] *= inverse;
      }
      store_floats(to, x[j], column_of(j), dim);
    }
  }
}
