// Rows of k and v between tokens and the pages of a cache; to append, normalised (RMS norm), rotated and rounded to e4m3, and q
// beside them. What is computed stands in PagedCache (descriptors/cache/cache.py).
//
// LANES neighbouring lanes have ROW_HEADS heads of q, of k or of v of one token; where something is computed on the way one, and then another,
// `passes` in all, so that in one pass neighbours have neighbouring heads. The token's place, weights, cosines and sines are found once for them,
// what does not wait for the place before it; one row, or two where there are registers, come while one is computed. A row is chunks of N elements,
// 16 bytes of the wider type where its rows allow that, else one. A lane has PAIRS pairs
// of chunks of each row: those that lie half the rotated elements apart, so that both elements of a half-split pair are its own, and of
// what is not rotated such that neighbouring lanes have neighbouring chunks: a warp reads and writes whole lines. Rows are loaded before
// their token's place is known. Sums and largest magnitudes of a row go over its lanes by shuffles, in which all lanes of a warp take part.
// q may be written over: no lane reads what another writes.
//
// Shared memory: none. Registers: 2·PAIRS chunks for each row that comes; 6·PAIRS·N floats for a row, its weights, cosines and sines.
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
static_assert(HEADS == 1 || Config::EXACT || Config::DIRECTION != APPEND, "rows that are computed come one after another");
constexpr bool WHOLE = HEADS == 1 && (D == DV || DV == 0) && 2 * LANES * PAIRS * N == D;  // every lane's chunks are part of every row
constexpr float LEAST_SCALE = 7.52316385e-37f;  // 2^−120: its inverse is no subnormal
constexpr float LARGEST_FACTOR = 3.40282347e38f;

template<class X, int COUNT = N> struct alignas(COUNT * sizeof(X) < 16 ? COUNT * sizeof(X) : 16) Elements { X v[COUNT]; };
// By words: a compiler may else take elements apart.
template<class X, int COUNT> KS_DEVICE void copy(Elements<X, COUNT>& to, const Elements<X, COUNT>& from) {
  if constexpr (sizeof to % 4 == 0) {
#pragma unroll
    for (int i = 0; i < (int)sizeof to / 4; i++) ((unsigned*)to.v)[i] = ((const unsigned*)from.v)[i];
  } else {
    to = from;
  }
}
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
      if (WHOLE || column < dim) to[j][side] = *(const Elements<X>*)(from + column);
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
      if (WHOLE || column < dim) *(Elements<X>*)(to + column) = from[j][side];
    }
}
template<class X> KS_DEVICE void to_floats(Row& to, const RowOf<X>& from) {
#pragma unroll
  for (int j = 0; j < PAIRS; j++)
#pragma unroll
    for (int side = 0; side < 2; side++) {
      if (N == 1) to[j][side][0] = to_sum(from[j][side].v[0]);
#pragma unroll
      for (int e = 0; e + 1 < N; e += 2) Two<X>::to_sums(from[j][side].v + e, to[j][side][e], to[j][side][e + 1]);
    }
}
template<class X> KS_DEVICE void store_floats(X* to, const Row& from, int dim) {
  RowOf<X> x;
#pragma unroll
  for (int j = 0; j < PAIRS; j++)
#pragma unroll
    for (int side = 0; side < 2; side++) {
      if (N == 1) x[j][side].v[0] = convert<X>(from[j][side][0]);
#pragma unroll
      for (int e = 0; e + 1 < N; e += 2) Two<X>::convert_to(x[j][side].v + e, from[j][side][e], from[j][side][e + 1]);
    }
  store(to, x, dim);
}
KS_DEVICE void multiply(Row& x, float factor) {
#pragma unroll
  for (int j = 0; j < PAIRS; j++)
#pragma unroll
    for (int side = 0; side < 2; side++)
#pragma unroll
      for (int e = 0; e < N; e++) x[j][side][e] *= factor;
}
KS_DEVICE void multiply(Row& x, const Row& factors) {
#pragma unroll
  for (int j = 0; j < PAIRS; j++)
#pragma unroll
    for (int side = 0; side < 2; side++)
#pragma unroll
      for (int e = 0; e < N; e++) x[j][side][e] *= factors[j][side][e];
}
template<class X> KS_DEVICE void load_rows(RowOf<X> (&to)[HEADS], const X* from, i64 head, int heads, int dim) {
#pragma unroll
  for (int h = 0; h < HEADS; h++) load(to[h], from + h * head, h < heads ? dim : 0);
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

struct Place { bool stored; int page, row; };

// Where tokens lie.
struct Places {
  const void* slots;
  const int *table, *lengths, *positions, *offsets, *sources;
  i64 slots_batch, slots_row, table_row, positions_batch, positions_row;
  int S, sequences, table_width, pages;
  FastDivmod page;

  // A packed row's sequence, -1 where it is of none, and its position less its number.
  struct Sequence { int entry, shift; };
  // All rows of a warp, which are those of tokens first to last, by its lanes together: each sequence that they are of is found once, with
  // what its rows' positions need, so that few loads wait for others.
  KS_DEVICE Sequence sequence_of(int s, int first, int last) const {
    constexpr int EACH = 2, ROOM = EACH * WARP;
    const int lane = thread_index() % WARP;
    Sequence found{-1, 0};
#pragma unroll 1
    for (int want = first;;) {
      int low = 0, left = sequences;  // it is one of these
#pragma unroll 1
      while (left > ROOM) {
        const int step = divide_up(left, ROOM);
        int below = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
          const int at = (lane + i * WARP + 1) * step;
          below += at < left && offsets[low + min_of(at, left)] <= want;
        }
#pragma unroll
        for (int m = 1; m < WARP; m *= 2) below += shuffle_xor(below, m);
        low += below * step, left = min_of(step, left - below * step);
      }
      int number = 0, shift = 0, end = 0;  // number: of the sequence, from 1; one lane has them
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int at = low + lane + i * WARP;
        if (at >= low + left) continue;
        const int begin = offsets[at], next = offsets[at + 1];
        const int before = Config::POSITION == LENGTHS && Config::DIRECTION == APPEND ? lengths[at] - next : -begin;
        if (begin <= want && want < next) number = at + 1, shift = before, end = next;
        if (at == 0 && want < begin) end = begin;
      }
#pragma unroll
      for (int m = 1; m < WARP; m *= 2) number += shuffle_xor(number, m), shift += shuffle_xor(shift, m), end += shuffle_xor(end, m);
      if (number && s >= want && s < end) found = {number - 1, shift};
      if (end <= want || last < end) return found;
      want = end;
    }
  }

  // A token's sequence, -1 where it is of none, and its position in it.
  struct Token { int entry, position; };
  KS_DEVICE Token token(int batch, int s, int first, int last) const {
    Token found{batch, s};
    if (Config::PACKED) {
      const Sequence sequence = sequence_of(s, first, last);
      found = {sequence.entry, sequence.entry < 0 ? 0 : s + sequence.shift};
    } else if (Config::POSITION == LENGTHS && Config::DIRECTION == APPEND) {
      found.position = lengths[batch] + s - S;
    }
    if (Config::POSITION == GIVEN && found.entry >= 0) found.position = positions[batch * positions_batch + s * positions_row];
    return found;
  }
  KS_DEVICE Place of(Token token, int batch, int s) const {
    const int entry = token.entry, position = token.position;
    if (Config::PACKED && entry < 0) return {};
    if (Config::SLOTS) {
      const i64 place = batch * slots_batch + s * slots_row;
      const i64 slot = Config::SLOTS == 8 ? ((const i64*)slots)[place] : ((const int*)slots)[place];
      if (slot < 0 || slot >= (i64)pages * page.d) return {};
      const int number = page.quotient((int)slot);
      return {true, number, (int)slot - number * page.d};
    }
    const bool ends = Config::POSITION == LENGTHS && Config::DIRECTION == GATHER && position >= lengths[entry];
    if (position < 0 || ends) return {};
    const int column = page.quotient(position);
    if (column >= table_width) return {};
    const int number = table[entry * table_row + column];
    return {number >= 0 && number < pages, number, position - column * page.d};
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

// What an RMS norm multiplies all elements of a row by.
KS_DEVICE float norm_factor(const Row& x, float eps) {
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < PAIRS; j++)
#pragma unroll
    for (int side = 0; side < 2; side++)
#pragma unroll
      for (int e = 0; e < N; e++) sum += x[j][side][e] * x[j][side][e];
#pragma unroll
  for (int m = 1; m < LANES; m *= 2) sum += shuffle_xor(sum, m);
  return element_rsqrt(sum * (1.f / D) + eps);
}

KS_DEVICE float largest_magnitude(const Row& x) {
  float most = 0.f;
#pragma unroll
  for (int j = 0; j < PAIRS; j++)
#pragma unroll
    for (int side = 0; side < 2; side++)
#pragma unroll
      for (int e = 0; e < N; e++) most = maximum(most, element_abs(x[j][side][e]));
#pragma unroll
  for (int m = 1; m < LANES; m *= 2) most = maximum(most, shuffle_xor(most, m));
  return most;
}

KS_BODY(Config::THREADS, Config::MIN_BLOCKS)
paged_cache_body(Rows<T> k, Rows<T> v, Rows<P> k_pages, Rows<P> v_pages, Places places, int num_heads, int kv_heads, int passes, int q_groups,
                 int kv_groups, FastDivmod groups, FastDivmod tokens, int total, Rows<T> q = {}, Rows<T> q_out = {},
                 Rotation rotation = {}, const Weight* q_norm = {}, const Weight* k_norm = {}, float eps = {},
                 Rows<float> k_scales = {}, Rows<float> v_scales = {}) {
  // Lanes behind the last group do as those of the last one, and store nothing.
  const int own_number = (int)block_index() * GROUPS + thread_index() / LANES, number = min_of(own_number, total - 1);
  const int token = groups.quotient(number), own = number - token * groups.d;
  const int batch = tokens.quotient(token), s = token - batch * tokens.d;
  const bool is_query = own < q_groups, is_value = own >= q_groups + kv_groups;
  const int first = (is_query ? own : is_value ? own - q_groups - kv_groups : own - q_groups) * HEADS, dim = is_value ? DV : D;
  const int apart = is_query ? q_groups : kv_groups;  // heads between two passes: in one, neighbouring lanes have neighbouring heads
  int heads = (is_query ? num_heads : kv_heads) - first;  // that are left, of those of other lanes too
  const Rows<T> rows = k.or_if(is_value, v).or_if(is_query, q);
  const Rows<P> pages = k_pages.or_if(is_value, v_pages);
  const Rows<float> scales = k_scales.or_if(is_value, v_scales);

  earlier_kernels_wait();
  next_kernel_launch();
  T* row = rows.at(Config::DIRECTION == COPY ? places.sources[batch] : batch, first, s);
  RowOf<T> x[HEADS];
  if constexpr (Config::DIRECTION != GATHER) load_rows(x, row, rows.head, heads, dim);
  // The next row comes at once where AHEAD is 2. Of heads that are not there, the last one.
  constexpr int AHEAD = Config::DIRECTION != APPEND || Config::EXACT ? 0 : Norm::THERE ? 1 : 2;
  RowOf<T> next;
  if (AHEAD == 2) {
    if (heads > apart) row += apart * rows.head;
    if (passes > 1) load(next, row, dim);
  }
  const int first_number = own_number - thread_index() % WARP / LANES, last_number = first_number + WARP / LANES - 1;  // of the warp
  // What a row needs beside its place is asked for before the place is known.
  RowOf<Weight> weights_read;
  if constexpr (Norm::THERE) load(weights_read, is_query ? q_norm : k_norm, D);
  const Places::Token own_token =
      places.token(batch, s, groups.quotient(min_of(first_number, total - 1)), groups.quotient(min_of(last_number, total - 1)));
  const bool rotated = Config::ROTARY != 0 && !is_value;
  Angles angles;
  if (rotated) angles.load(rotation, own_token.position);
  Place place = places.of(own_token, batch, s);
  if (own_number >= total) place.stored = false;
  P* const in_page = pages.at(place.page, first, place.row);
  float* scale = Config::CACHE_SCALES == OF_TOKENS ? scales.at(place.page, first, place.row) : scales.at(0, first, 0);

  if constexpr (Config::DIRECTION == GATHER) {
    if (!place.stored) return;
    RowOf<P> from[HEADS];
    float factors[HEADS];
    load_rows(from, in_page, pages.head, heads, dim);
#pragma unroll
    for (int h = 0; h < HEADS; h++) factors[h] = Config::CACHE_SCALES ? scale[min_of(h, heads - 1) * scales.head] : 1.f;
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      if (h >= heads) continue;
      if constexpr (Config::EXACT) {
        store((P*)(row + h * rows.head), from[h], dim);
      } else {
        Row y;
        to_floats(y, from[h]);
        if (Config::CACHE_SCALES) multiply(y, factors[h]);
        store_floats(row + h * rows.head, y, dim);
      }
    }
  } else if constexpr (Config::EXACT) {
    if (!place.stored) return;
#pragma unroll
    for (int h = 0; h < HEADS; h++)
      if (h < heads) store((T*)in_page + h * pages.head, x[h], dim);
  } else {
    char* to = is_query ? (char*)q_out.at(batch, first, s) : (char*)in_page;
    const i64 row_step = apart * rows.head, scale_step = apart * scales.head;
    const i64 step = apart * (is_query ? q_out.head * (int)sizeof(T) : pages.head * (int)sizeof(P));
    Row weights;
    if constexpr (Norm::THERE) to_floats(weights, weights_read);
    int stored = !is_query;  // whether a lane of the warp has rows for pages
#pragma unroll
    for (int m = LANES; m < WARP; m *= 2) stored |= shuffle_xor(stored, m);
    // A row is computed while the one that is AHEAD comes to `to_read`.
    auto compute = [&](RowOf<T>& read, RowOf<T>& to_read, bool last) {
      Row y;
      if (AHEAD == 2) to_floats(y, read);
      if (heads > AHEAD * apart) row += row_step;
      if (!last) load(to_read, row, dim);
      if (AHEAD == 1) to_floats(y, read);
      float factor = 1.f;
      if constexpr (Norm::THERE) {
        factor = norm_factor(y, eps);
        if (is_value) factor = 1.f;
        else multiply(y, weights);
      }
      if (rotated) angles.apply(y);
      if (Config::CACHE_SCALES == OF_TOKENS && stored) {
        const float own = maximum(largest_magnitude(y) * factor * (1.f / Config::LARGEST), LEAST_SCALE);
        if (!is_query) {
          factor *= reciprocal_fast(own);
          if (place.stored && heads > 0 && thread_index() % LANES == 0) *scale = own;
        }
      }
      if (Config::CACHE_SCALES == OF_HEADS && !is_query && heads > 0) factor /= maximum(*scale, LEAST_SCALE);
      // Of rows of 0: a norm's factor over the least scale may be infinite, and 0 times that is NaN.
      if (Norm::THERE && Config::CACHE_SCALES && factor > LARGEST_FACTOR) factor = LARGEST_FACTOR;
      if (Norm::THERE || Config::CACHE_SCALES) multiply(y, factor);
      if (place.stored && heads > 0) {
        if (is_query) store_floats((T*)to, y, D);
        else store_floats((P*)to, y, dim);
      }
      heads -= apart, to += step, scale += scale_step;
    };
#pragma unroll 1
    for (int pass = 1;; pass += AHEAD) {
      compute(x[0], AHEAD == 2 ? x[0] : next, pass + AHEAD > passes);
      if (pass == passes) break;
      if constexpr (AHEAD == 2) {
        compute(next, next, pass + 1 + AHEAD > passes);
        if (pass + 1 == passes) break;
      } else {
#pragma unroll
        for (int j = 0; j < PAIRS; j++) copy(x[0][j][0], next[j][0]), copy(x[0][j][1], next[j][1]);
      }
    }
  }
}
