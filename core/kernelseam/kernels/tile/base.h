// The vendor-neutral part of the tile vocabulary: views, the layout of shared tiles, stores through shared memory.
// Included by a platform header after it has defined KS_DEVICE, KS_CONSTANT, f16, bf16, WARP, lane() and the barriers.
#pragma once

typedef long long i64;
typedef unsigned long long u64;
static_assert(sizeof(i64) == 8 && sizeof(int) == 4, "LP64 sizes");

// KS_GLOBAL qualifies what a pointer out of a list points to: global memory, where a platform wants to know.
// listed(list, i): the i-th address of the list that lies at `list`.
#ifndef KS_GLOBAL
#define KS_GLOBAL
#endif
// KS_ARGUMENT qualifies a structure among a kernel's parameters: read where it lies, whatever index it is read with.
#ifndef KS_ARGUMENT
#define KS_ARGUMENT const
#endif
// KS_OFFSET(type, member): bytes in front of a member, a constant.
#ifndef KS_OFFSET
#define KS_OFFSET(type, member) __builtin_offsetof(type, member)
#endif
// KS_BODY opens a kernel's body, which takes structures: its entry, whose parameters are their members, is generated.
#define KS_BODY(threads, blocks)                                         \
  static constexpr int BODY_THREADS = (threads), BODY_BLOCKS = (blocks); \
  KS_DEVICE void
// What the binary was made from: the host holds it against what it asked for.
#ifdef KS_KEY
KS_CONSTANT char kernelseam_key[] = KS_KEY;
#endif
template<class X> KS_DEVICE X* listed(X* list, i64 i) { return (X*)((X KS_GLOBAL* const*)list)[i]; }

template<bool B, class X, class Y> struct conditional { typedef X type; };
template<class X, class Y> struct conditional<false, X, Y> { typedef Y type; };

// What may be added to a result, or computed beside it: its element type, void where there is none.
template<class X> struct optional { static constexpr bool THERE = true; typedef X type; };
template<> struct optional<void> { static constexpr bool THERE = false; typedef float type; };

// The first of two where B, else the second.
template<bool B, class X, class Y> KS_DEVICE auto& one_of(X& x, Y& y) {
  if constexpr (B) return x;
  else return y;
}

// Compile-time flag that a generic lambda can take as an argument.
template<bool B> struct bool_constant { static constexpr bool value = B; };

KS_DEVICE constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }
KS_DEVICE constexpr int min_of(int a, int b) { return a < b ? a : b; }
KS_DEVICE constexpr int max_of(int a, int b) { return a > b ? a : b; }

// ---- views: where a row starts. Device code asks a view and assumes nothing.

// Row i of a matrix whose rows lie `stride` elements apart.
template<class T> struct StridedView {
  T* base;
  int stride;
  KS_DEVICE T* row(int i) const { return base + (i64)i * stride; }

  // Rows i, i + STEP, i + 2·STEP, … one after another: one pointer and one addition each, whatever their number.
  template<int STEP> struct Walk {
    T* at;
    i64 step;
    KS_DEVICE void next() { at += step; }
  };
  template<int STEP> KS_DEVICE Walk<STEP> walk(int i) const { return {row(i), (i64)STEP * stride}; }
};

// Quotients of 0 ≤ n < 2³¹ by one divisor d: magic = ⌈2^(31+shift) / d⌉ with 2^(shift−1) < d ≤ 2^shift.
// (Granlund, Montgomery: Division by invariant integers using multiplication, PLDI 1994.)
struct FastDivmod {
  int d;
  unsigned magic;
  int shift;
  KS_DEVICE int quotient(int n) const { return (int)((u64)(unsigned)n * magic >> (31 + shift)); }
};

// A walk over rows that have no common distance: each is asked for.
template<class View, class T, int STEP> struct RowByRow {
  View view;
  T* at;
  int i;
  KS_DEVICE void next() { at = view.row(i += STEP); }
};

// Rows in groups: row i is number i % d of group i / d, groups lie `outer` and rows of a group `inner` elements apart.
template<class T> struct GroupedView {
  T* base;
  FastDivmod group;
  i64 outer, inner;
  KS_DEVICE T* row(int i) const {
    const int g = group.quotient(i);
    return base + g * outer + (i - g * group.d) * inner;
  }
  template<int STEP> KS_DEVICE RowByRow<GroupedView, T, STEP> walk(int i) const { return {*this, row(i), i}; }
};

// Rows in pages of `page.d`: a table tells which page holds rows d·n … d·n + d − 1. Rows beyond `last` are not looked up.
template<class T> struct PagedView {
  T* base;
  const int* table;
  FastDivmod page;
  i64 page_stride;
  int stride, last;
  KS_DEVICE T* row(int i) const {
    i = min_of(i, last);
    const int n = page.quotient(i);
    return base + table[n] * page_stride + (i64)(i - n * page.d) * stride;
  }
  template<int STEP> KS_DEVICE RowByRow<PagedView, T, STEP> walk(int i) const { return {*this, row(i), i}; }
};

// How THREADS threads share the 16-byte chunks of a tile: each keeps one column of chunks and takes every STEP-th row.
template<class Tile, int THREADS> struct Share {
  static constexpr int V = 16 / (int)sizeof(typename Tile::T), PER_ROW = Tile::COLS / V, FIT = THREADS / PER_ROW;
  static_assert(FIT >= 1, "a row of chunks has at most one chunk a thread");
  // A multiple of 8 where possible: then the rows of a thread share one permutation of chunks.
  static constexpr int STEP = FIT >= Tile::ROWS ? Tile::ROWS : FIT >= 8 ? FIT / 8 * 8 : FIT;
  static constexpr int ROUNDS = (Tile::ROWS + STEP - 1) / STEP;
  // A warp's number among several that copy each its own tiles does not count.
  static KS_DEVICE int me() { return THREADS == WARP ? lane() : thread_index(); }
  static KS_DEVICE int row() { return me() / PER_ROW; }
  static KS_DEVICE int column() { return me() % PER_ROW * V; }
  // Whether this thread has a chunk in that round.
  static KS_DEVICE bool takes(int round) {
    return (STEP * PER_ROW == THREADS || row() < STEP) && (Tile::ROWS % STEP == 0 || row() + round * STEP < Tile::ROWS);
  }
};

// ---- two neighbours of an array at an even place, which a platform may convert by one instruction

template<class T> struct Two {
  static KS_DEVICE void to_sums(const T* from, float& x, float& y) { x = to_sum(from[0]), y = to_sum(from[1]); }
  static KS_DEVICE void convert_to(T* to, float x, float y) { to[0] = convert<T>(x), to[1] = convert<T>(y); }
};

// ---- 16 bytes at once

template<class T> struct alignas(16) Chunk {
  static constexpr int N = 16 / sizeof(T);
  T v[N];
};

// ---- the layout of a shared tile: rows of COLS elements, their 16-byte chunks permuted so that the same column
// of 8 consecutive rows lies in 8 different groups of 4 banks (32 banks of 4 bytes).

template<class T, int COLS> struct Swizzle {
  static constexpr int V = 16 / sizeof(T);
  static constexpr int CHUNKS = COLS / V;
  static_assert(COLS % V == 0, "rows of a tile are whole 16-byte chunks");
  // The largest power of two, at most 8, that divides CHUNKS: rows 8/P apart start in the same group of banks.
  static constexpr int P = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : CHUNKS % 2 == 0 ? 2 : 1;
  static constexpr int PERIOD = 8;  // rows so far apart have the same permutation
  static KS_DEVICE int mask(int row) { return (row / (8 / P)) & (P - 1); }
  static KS_DEVICE int offset(int row, int col) { return row * COLS + ((col / V) ^ mask(row)) * V + col % V; }
};

// A tile in shared memory, ROWS rows of COLS elements as they lie in global memory. Another layout permutes chunks otherwise,
// such that the accesses of one engine meet no bank twice.
template<class T_, int ROWS_, int COLS_, class Layout_ = Swizzle<T_, COLS_>> struct PlainTile {
  typedef T_ T;
  typedef Layout_ Layout;
  static constexpr int ROWS = ROWS_, COLS = COLS_;
  static constexpr int BYTES = ROWS * COLS * (int)sizeof(T);
  T* base;
  KS_DEVICE explicit PlainTile(char* memory) : base((T*)memory) {}
  KS_DEVICE T& at(int r, int c) const { return base[Layout::offset(r, c)]; }
  KS_DEVICE Chunk<T>& chunk(int r, int c) const { return *(Chunk<T>*)(base + Layout::offset(r, c)); }
};

// tanh for |x| ≤ 0.6: an odd polynomial (least squares).
KS_DEVICE float tanh_small(float x) {
  const float z = x * x;
  return x + x * z * (-0.33333296f + z * (0.1333188f + z * (-0.0537804f + z * (0.020785147f - z * 0.005883233f))));
}
// tanh, its relative error a few roundings of float32: near 0 that polynomial, else by exponentials, where nothing cancels.
KS_DEVICE float tanh_fast(float x) {
  const float size = maximum(x, -x);
  if (size < 0.6f) return tanh_small(x);
  const float y = 1.f - 2.f / (exp2_fast(2.88539008f * size) + 1.f);
  return x == x ? (x < 0 ? -y : y) : x;
}

// Not of a product: fused with it, x − x is what it was rounded by.
template<class S> KS_DEVICE bool finite(S x) { return x - x == 0; }

// Whether a chunk in a tile has NaN or inf. Of 16 bits: an exponent of ones, to whose lowest bit, FIRST, 1 is added carries into the
// sign.
template<class T> KS_DEVICE bool any_non_finite(const Chunk<T>& x) {
  bool any = false;
#pragma unroll
  for (int e = 0; e < Chunk<T>::N; e++) any = any || !finite(to_sum(x.v[e]));
  return any;
}
struct alignas(16) ChunkWords { unsigned v[4]; };
template<unsigned FIRST> KS_DEVICE bool any_exponent_of_ones(const ChunkWords x) {
  constexpr unsigned BOTH = 0x10001;
  unsigned carries = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) carries |= (x.v[i] & (0x8000 - FIRST) * BOTH) + FIRST * BOTH;
  return carries & 0x8000 * BOTH;
}
KS_DEVICE bool any_non_finite(const Chunk<f16>& x) { return any_exponent_of_ones<0x400>((const ChunkWords&)x); }
KS_DEVICE bool any_non_finite(const Chunk<bf16>& x) { return any_exponent_of_ones<0x80>((const ChunkWords&)x); }

// Puts zeros in the place of NaN and inf in a tile, whatever its layout; the block's threads share
// the work or, THREADS being WARP, a warp's lanes. True where this thread found any.
template<int THREADS, class Tile> KS_DEVICE bool take_out_non_finite(Tile t) {
  typedef typename Tile::T T;
  bool found = false;
#pragma unroll 1
  for (int i = THREADS == WARP ? lane() : thread_index(); i < Tile::BYTES / 16; i += THREADS) {
    Chunk<T>& place = ((Chunk<T>*)t.base)[i];
    if (!any_non_finite(place)) continue;
    Chunk<T> x = place;
#pragma unroll
    for (int e = 0; e < Chunk<T>::N; e++)
      if (!finite(to_sum(x.v[e]))) x.v[e] = zero_of<T>();
    place = x, found = true;
  }
  return found;
}

// ---- shared memory to global, by one warp: whole rows of chunks, so that neighbouring lanes write neighbouring bytes.
// What lies at or beyond (row_end, col_end) is not written. VECTOR: bytes that every row's start is a multiple of.
template<int VECTOR, class Tile, class View>
KS_DEVICE void warp_copy_out(Tile t, View v, int row0, int row_end, int col0, int col_end) {
  typedef typename Tile::T T;
  constexpr int V = Chunk<T>::N, PER_ROW = Tile::COLS / V, STEP = WARP / PER_ROW > 0 ? WARP / PER_ROW : 1;
  const int r0 = PER_ROW <= WARP ? lane() / PER_ROW : 0, first = PER_ROW <= WARP ? lane() % PER_ROW : lane();
  if (r0 >= STEP) return;
  auto walk = v.template walk<STEP>(row0 + r0);
  // A tile that lies wholly inside, the common one, is written without a look at its ends.
  const bool inside = VECTOR == 16 && row0 + Tile::ROWS <= row_end && col0 + Tile::COLS <= col_end;
  if (PER_ROW <= WARP && Tile::ROWS % STEP == 0 && inside) {
#pragma unroll
    for (int r = 0; r < Tile::ROWS; r += STEP, walk.next())
      *(Chunk<T>*)(walk.at + col0 + first * V) = t.chunk(r + r0, first * V);
    return;
  }
#pragma unroll 1
  for (int r = r0; r < Tile::ROWS && row0 + r < row_end; r += STEP, walk.next())
#pragma unroll
    for (int chunk = 0; chunk < PER_ROW; chunk += WARP) {
      const int c = (first + chunk) * V, left = col_end - col0 - c;
      if ((PER_ROW > WARP && first + chunk >= PER_ROW) || left <= 0) continue;
      T* to = walk.at + col0 + c;
      if (VECTOR == 16 && left >= V) {
        *(Chunk<T>*)to = t.chunk(r, c);
      } else {
        const Chunk<T> x = opaque(t.chunk(r, c));  // read whole: a compiler for gfx11 that read elements apart mixed them up
#pragma unroll
        for (int e = 0; e < V; e++)
          if (e < left) to[e] = x.v[e];
      }
    }
}
