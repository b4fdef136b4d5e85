// The host in plain C++17: a platform like a vendor's, to be run where there is no GPU.
// Warps of 16 lanes; of accumulators in half precision a lane holds whole rows, as AMD's matrix units have it.
//
// Constant (from the arch's row): KS_THROUGH_REGISTERS, whether a copy goes through registers as on AMD (1), or writes
// shared memory by itself as on NVIDIA (0); KS_E4M3, whether e4m3 is float8_e4m3fn (1) or float8_e4m3fnuz (2). KS_CONTRACTED, where it is
// defined, fuses products with the sums that take them.
#pragma once
#include "host/warps.h"
namespace host { typedef float Plain; }
#ifdef KS_CONTRACTED
#include "host/contracted.h"
#endif

#define KS_DEVICE inline
#define KS_CONSTANT extern "C" const __attribute__((used))
#define KS_KERNEL(threads, blocks)                    \
  static constexpr int KERNEL_THREADS = (threads); \
  extern "C" void

static constexpr int WARP = host::LANES;
static constexpr bool COPY_THROUGH_REGISTERS = KS_THROUGH_REGISTERS;

struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };
#if KS_E4M3
struct e4m3 { unsigned char bits; };
#endif

KS_DEVICE int lane() { return host::self()->number; }
KS_DEVICE int warp_index() { return host::warp_index(); }
KS_DEVICE int thread_index() { return host::self()->thread; }
KS_DEVICE void earlier_kernels_wait() {}
KS_DEVICE void next_kernel_launch() {}
KS_DEVICE unsigned block_index() { return host::self()->warp->block; }
KS_DEVICE bool block_any(bool x) { return host::any_of_block(x); }
template<class X> KS_DEVICE X opaque(X x) { return x; }
KS_DEVICE int known_uniform(int x) { return x; }
KS_DEVICE constexpr bool few_uniform_registers() { return false; }
template<class X> KS_DEVICE X in_lanes(X x) { return x; }
KS_DEVICE void block_barrier() { host::any_of_block(false); }
KS_DEVICE void warp_barrier() { host::meet(host::self(), host::AT_WARP_BARRIER); }

template<int BYTES> KS_DEVICE char* shared_memory() { return host::shared(BYTES); }

template<class To, class From> KS_DEVICE To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}

KS_DEVICE int shuffle_xor(int x, int m) { return (int)(unsigned)host::exchange((unsigned)x, m); }
KS_DEVICE float shuffle_xor(float x, int m) { return bits_as<float>((unsigned)host::exchange(bits_as<unsigned>(x), m)); }
KS_DEVICE double shuffle_xor(double x, int m) { return bits_as<double>(host::exchange(bits_as<unsigned long long>(x), m)); }
KS_DEVICE float maximum(float a, float b) { return __builtin_fmaxf((host::Plain)a, (host::Plain)b); }
KS_DEVICE double maximum(double a, double b) { return __builtin_fmax(a, b); }
KS_DEVICE float exp2_fast(float x) { return __builtin_exp2f((host::Plain)x); }
KS_DEVICE float reciprocal_fast(float x) { return 1.f / x; }
KS_DEVICE float divide_fast(float x, float y) { return x / y; }
KS_DEVICE float sqrt_fast(float x) { return __builtin_sqrtf((host::Plain)x); }
KS_DEVICE float rsqrt_fast(float x) { return 1.f / __builtin_sqrtf((host::Plain)x); }
KS_DEVICE float log2_fast(float x) { return __builtin_log2f((host::Plain)x); }
KS_DEVICE float infinity() { return __builtin_inff(); }

// ---- conversions, rounding to nearest even; no compiler's half type is relied on

KS_DEVICE float to_sum(f16 x) {
  // The exponent is put right by a product with 2¹¹², which is exact and makes subnormals normal.
  const unsigned magnitude = x.bits & 0x7fffu;
  unsigned y = bits_as<unsigned>(bits_as<float>(magnitude << 13) * 0x1p112f);
  y |= magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  return bits_as<float>(y | (x.bits & 0x8000u) << 16);
}
KS_DEVICE float to_sum(bf16 x) { return bits_as<float>((unsigned)x.bits << 16); }
#if KS_E4M3
KS_DEVICE float to_sum(e4m3 x) {
  if (KS_E4M3 == 1 ? (x.bits & 0x7f) == 0x7f : x.bits == 0x80) return __builtin_nanf("");
  const float size = bits_as<float>((unsigned)(x.bits & 0x7f) << 20) * (KS_E4M3 == 1 ? 0x1p120f : 0x1p119f);
  return x.bits & 0x80 ? -size : size;
}
#endif
KS_DEVICE float to_sum(float x) { return x; }
KS_DEVICE double to_sum(double x) { return x; }

template<class T> struct Convert { static KS_DEVICE T from(T x) { return x; } };
template<> struct Convert<f16> {
  static KS_DEVICE f16 from(float x) {
    const unsigned y = bits_as<unsigned>(x), sign = y >> 16 & 0x8000u, magnitude = y & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {(unsigned short)(sign | 0x7e00u)};
    if (magnitude >= 0x477ff000u) return {(unsigned short)(sign | 0x7c00u)};  // from 65520 on
    if (magnitude < 0x38800000u) {  // subnormal: a sum with 1/2 leaves the bits that f16 has, rounded by the adder
      const float sum = bits_as<float>(magnitude) + 0.5f;
      return {(unsigned short)(sign | (bits_as<unsigned>(sum) - 0x3f000000u))};
    }
    return {(unsigned short)(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13)};
  }
};
template<> struct Convert<bf16> {
  static KS_DEVICE bf16 from(float x) {
    const unsigned y = bits_as<unsigned>(x);
    if ((y & 0x7fffffffu) > 0x7f800000u) return {(unsigned short)(y >> 16 | 0x40u)};
    return {(unsigned short)((y + 0x7fffu + (y >> 16 & 1)) >> 16)};
  }
};
#if KS_E4M3
template<> struct Convert<e4m3> {  // saturating
  static KS_DEVICE e4m3 from(float x) {
    constexpr bool FN = KS_E4M3 == 1;
    constexpr float LARGEST = FN ? 448.f : 240.f, HIDDEN = FN ? 16384.f : 8192.f;  // whose last place is the smallest subnormal
    constexpr unsigned BIAS = FN ? 120 : 119;
    if (x != x) return {(unsigned char)(FN ? 0x7f : 0x80)};
    const unsigned sign = bits_as<unsigned>(x) >> 24 & 0x80u;
    float size = bits_as<float>(bits_as<unsigned>(x) & 0x7fffffffu);  // of −0, too
    size = size < LARGEST ? size : LARGEST;
    const unsigned y = bits_as<unsigned>(size);
    const unsigned magnitude = y < (BIAS + 1) << 23 ? bits_as<unsigned>(size + HIDDEN) - bits_as<unsigned>(HIDDEN)
                                                    : ((y + 0x7ffffu + (y >> 20 & 1)) >> 20) - (BIAS << 3);
    return {(unsigned char)(magnitude || FN ? sign | magnitude : 0)};
  }
};
#endif
template<class T, class S> KS_DEVICE T convert(S x) {
  static_assert(sizeof(S) <= sizeof(float) || sizeof(T) == sizeof(S), "nothing is rounded twice");
  return Convert<T>::from(x);
}
template<class T> KS_DEVICE T zero_of() { return T{}; }
// An element as a tile of T keeps it.
template<class T, class S> KS_DEVICE T kept_as(S x) {
  if constexpr (sizeof(S) < sizeof(T)) return convert<T>(to_sum(x));
  else return x;
}

#include "tile/base.h"

// ---- sums in global memory that many blocks add to

template<int N> KS_DEVICE void lanes_add(float* to, const float (&x)[N]) {
  for (int i = 0; i < N; i++) {
    unsigned* const place = (unsigned*)(to + i * WARP + lane());
    unsigned old = __atomic_load_n(place, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(place, &old, bits_as<unsigned>(bits_as<float>(old) + x[i]), false,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
  }
}
template<int N> KS_DEVICE void lanes_load(float (&x)[N], const float* from) {
  for (int i = 0; i < N; i++) x[i] = from[i * WARP + lane()];
}

// ---- blocks that tell each other of what they wrote

KS_DEVICE void arrival_fence() {}
KS_DEVICE int arrive(int* counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL); }

// ---- copies from global to shared memory

KS_DEVICE void copies_commit() { host::close_group(); }
template<int PENDING> KS_DEVICE void copies_wait() { host::finish_copies(PENDING); }

template<class Tile, int THREADS, int VECTOR, bool EXACT, bool BRIEF = false> struct Copy {
  typedef typename Tile::T T;
  typedef Share<Tile, THREADS> Mine;
  static constexpr int V = Mine::V;
  Chunk<T> held[KS_THROUGH_REGISTERS ? Mine::ROUNDS : 1];

  template<class View> KS_DEVICE void fetch(Tile t, View v, int row0, int row_end, int col0, int col_end) {
    const int c = Mine::column();
    if (EXACT && col_end - col0 != Tile::COLS) host::fail("a copy that is said to be exact is not");
    auto walk = v.template walk<Mine::STEP>(row0 + Mine::row());
    for (int i = 0; i < Mine::ROUNDS; i++, walk.next()) {
      if (!Mine::takes(i)) break;
      const int row = Mine::row() + i * Mine::STEP;
      const int left = row0 + row < row_end ? max_of(0, min_of(V, col_end - col0 - c)) : 0;
      const decltype(walk.at) from = left ? walk.at + col0 + c : nullptr;
      if (VECTOR == 16 && (u64)from % (V * sizeof *from)) host::fail("a row that is said to be aligned to 16 bytes is not");
      if (KS_THROUGH_REGISTERS) {
        for (int e = 0; e < V; e++) held[i].v[e] = e < left ? kept_as<T>(from[e]) : zero_of<T>();
      } else {
        static_assert(KS_THROUGH_REGISTERS || sizeof *from == sizeof(T), "such a copy converts nothing");
        host::start_copy(&t.chunk(row, c), from, left * (int)sizeof(T));
      }
    }
  }
  template<class View> KS_DEVICE void load(Tile t, View v, int row0, int row_end, int col0, int col_end) {
    for (int i = 0; i < Mine::ROUNDS; i++) {
      if (!Mine::takes(i)) break;
      const int row = Mine::row() + i * Mine::STEP, c = Mine::column();
      for (int e = 0; e < V; e++)
        t.chunk(row, c).v[e] = row0 + row < row_end && col0 + c + e < col_end ? kept_as<T>(v.row(row0 + row)[col0 + c + e]) : zero_of<T>();
    }
  }
  KS_DEVICE void land(Tile t) {
    if (KS_THROUGH_REGISTERS)
      for (int i = 0; i < Mine::ROUNDS; i++)
        if (Mine::takes(i)) t.chunk(Mine::row() + i * Mine::STEP, Mine::column()) = held[i];
  }
};

// ---- the matrix engine: products exact, summed in float32 in the order of k

KS_DEVICE float to_tf32(float x) {
  return finite(x) ? bits_as<float>((bits_as<unsigned>(x) + 0x1000u) & 0xffffe000u) : x;
}

// PRODUCTS: of float, in how many of TF32 it is multiplied: rounded (1), or split into two (3).
template<class T_, int PRODUCTS = 0> struct MatrixEngine {
  typedef T_ T;
  static constexpr int V = Chunk<T>::N;
  typedef float Sum;
  static constexpr bool MATRIX = true;
  static constexpr int K_STEP = 16;
  static constexpr bool ONE_LAYOUT = !KS_THROUGH_REGISTERS;  // so that both ways are run

  template<int N, int K, bool K_LAST_> struct Tile : PlainTile<T, K_LAST_ ? N : K, K_LAST_ ? K : N> {
    static constexpr bool K_LAST = K_LAST_;
    KS_DEVICE explicit Tile(char* m) : PlainTile<T, K_LAST_ ? N : K, K_LAST_ ? K : N>(m) {}
    KS_DEVICE T element(int n, int k) const { return K_LAST ? this->at(n, k) : this->at(k, n); }
  };

  // Lane i holds rows i, i + 16, …
  template<int R, int C> struct Acc { float x[R / WARP][C]; };
  template<int R> struct Row { float x[R / WARP]; };
  template<int C> struct Column { float x[C]; };
  template<int R, int K> struct Operand { float x[R / WARP][K]; };

  template<int R, int K, class From> static KS_DEVICE Operand<R, K> operand(From tile, int row0, int k0) {
    Operand<R, K> a;
    for (int r = 0; r < R / WARP; r++)
      for (int k = 0; k < K; k++) {
        const int row = row0 + r * WARP + lane();
        if constexpr (From::K_LAST) a.x[r][k] = to_sum(tile.at(row, k0 + k));
        else a.x[r][k] = to_sum(tile.at(k0 + k, row));
      }
    return a;
  }

  template<int R, int C> static KS_DEVICE void zero(Acc<R, C>& a) {
    for (auto& row : a.x)
      for (float& x : row) x = 0;
  }

  template<int R, int C, int K, class B>
  static KS_DEVICE void mma(Acc<R, C>& acc, const Operand<R, K>& a, B b, int n0, int k0) {
    static_assert(C % 16 == 0 && K % 16 == 0 && R % WARP == 0, "shape of a matrix product");
    float x[V];
    if constexpr (B::K_LAST) {
      for (int k = 0; k < K; k += V)
        for (int c = 0; c < C; c++) {
          widen(x, b.chunk(n0 + c, k0 + k));
          for (int r = 0; r < R / WARP; r++)
            for (int e = 0; e < V; e++) add(acc.x[r][c], a.x[r][k + e], x[e]);
        }
    } else {
      for (int k = 0; k < K; k++)
        for (int c = 0; c < C; c += V) {
          widen(x, b.chunk(k0 + k, n0 + c));
          for (int r = 0; r < R / WARP; r++)
            for (int e = 0; e < V; e++) add(acc.x[r][c + e], a.x[r][k], x[e]);
        }
    }
  }
  static KS_DEVICE void widen(float (&to)[V], const Chunk<T>& from) {
    for (int e = 0; e < V; e++) to[e] = to_sum(from.v[e]);
  }
  static KS_DEVICE void add(float& sum, float x, float y) {
    if constexpr (PRODUCTS == 0) {
      sum += x * y;
    } else {
      const float a = to_tf32(x), b = to_tf32(y), small = to_tf32(x - a) * b + a * to_tf32(y - b);
      sum += a * b + (PRODUCTS == 3 && finite(small) ? small : 0.f);
    }
  }

  template<int R, int C, class F> static KS_DEVICE void map(Acc<R, C>& a, F f) {
    for (int r = 0; r < R / WARP; r++)
      for (int c = 0; c < C; c++) a.x[r][c] = f(r * WARP + lane(), c, a.x[r][c]);
  }
  template<int R, int C, class F> static KS_DEVICE void map2(Acc<R, C>& a, const Acc<R, C>& b, F f) {
    for (int r = 0; r < R / WARP; r++)
      for (int c = 0; c < C; c++) a.x[r][c] = f(r * WARP + lane(), c, a.x[r][c], b.x[r][c]);
  }
  template<int R, int C, class F> static KS_DEVICE void map_pairs(Acc<R, C>& a, F f) {
    for (int r = 0; r < R / WARP; r++)
      for (int c = 0; c < C; c += 2) f(r * WARP + lane(), c, a.x[r][c], a.x[r][c + 1]);
  }
  template<int R> static KS_DEVICE void fill(Row<R>& a, float v) {
    for (float& x : a.x) x = v;
  }
  template<int R, class F> static KS_DEVICE void zip(Row<R>& out, const Row<R>& a, const Row<R>& b, F f) {
    for (int r = 0; r < R / WARP; r++) out.x[r] = f(a.x[r], b.x[r]);
  }
  template<int R, class F> static KS_DEVICE void row_map(Row<R>& a, F f) {
    for (int r = 0; r < R / WARP; r++) a.x[r] = f(r * WARP + lane(), a.x[r]);
  }
  template<int R, int C, class F> static KS_DEVICE void row_apply(Acc<R, C>& a, const Row<R>& v, F f) {
    for (int r = 0; r < R / WARP; r++)
      for (float& x : a.x[r]) x = f(x, v.x[r]);
  }
  template<int R, int C> static KS_DEVICE void row_scale(Acc<R, C>& a, const Row<R>& v) {
    row_apply(a, v, [](float x, float y) { return x * y; });
  }
#if KS_THROUGH_REGISTERS  // so that both ways are run
  template<int R> struct Start { Row<R> row; };
  template<int R> static KS_DEVICE Start<R> start(const Row<R>& v) { return {v}; }
  template<int R, int C> static KS_DEVICE void begin(Acc<R, C>& a, const Start<R>& v) {
    row_apply(a, v.row, [](float, float y) { return y; });
  }
  template<int R, int C> static KS_DEVICE void row_max_partial(Row<R>& out, const Acc<R, C>& a) { row_max(out, a); }
  template<int R> static KS_DEVICE void row_max_finish(Row<R>&) {}
  template<int R> static KS_DEVICE bool any_above(const Row<R>& a, const Row<R>& b) {
    bool above = false;
    for (int r = 0; r < R / WARP; r++) above |= a.x[r] > b.x[r];
    for (int m = 1; m < WARP; m *= 2) above |= shuffle_xor((int)above, m) != 0;
    return above;
  }
#endif
  template<int R, int C> static KS_DEVICE void row_max(Row<R>& out, const Acc<R, C>& a) {
    for (int r = 0; r < R / WARP; r++) {
      out.x[r] = a.x[r][0];
      for (int c = 1; c < C; c++) out.x[r] = maximum(out.x[r], a.x[r][c]);
    }
  }
  template<int R, int C> static KS_DEVICE void row_add_partial(Row<R>& out, const Acc<R, C>& a) {
    for (int r = 0; r < R / WARP; r++)
      for (float x : a.x[r]) out.x[r] += x;
  }
  template<int R> static KS_DEVICE void row_finish_sum(Row<R>&) {}
  template<int R, class F> static KS_DEVICE void each_row(const Row<R>& a, F f) {
    for (int r = 0; r < R / WARP; r++) f(r * WARP + lane(), a.x[r]);
  }

  template<int R, int C, class F> static KS_DEVICE void row_fold(Row<R>& out, const Acc<R, C>& a, F f) {
    for (int r = 0; r < R / WARP; r++)
      for (int c = 0; c < C; c++) out.x[r] = f(out.x[r], r * WARP + lane(), c, a.x[r][c]);
  }
  template<int R, class F> static KS_DEVICE void row_join(Row<R>&, F) {}
  template<int R, int C, class F> static KS_DEVICE void column_fold(Column<C>& out, const Acc<R, C>& a, F f) {
    for (int c = 0; c < C; c++) {
      out.x[c] = 0;
      for (int r = 0; r < R / WARP; r++) out.x[c] = f(out.x[c], r * WARP + lane(), c, a.x[r][c]);
    }
  }
  template<int C, class F> static KS_DEVICE void column_join(Column<C>& a, F f) {
    for (int m = 1; m < WARP; m *= 2)
      for (float& x : a.x) x = f(x, shuffle_xor(x, m));
  }
  template<int C, class F> static KS_DEVICE void each_column(const Column<C>& a, F f) {
    if (lane() == 0)
      for (int c = 0; c < C; c++) f(c, a.x[c]);
  }

  template<int R, int C> static constexpr int operand_bytes() { return 0; }
  template<int R, int C> static KS_DEVICE Operand<R, C> to_operand(const Acc<R, C>& a, char*) {
    Operand<R, C> p;
    for (int r = 0; r < R / WARP; r++)
      for (int c = 0; c < C; c++) p.x[r][c] = to_sum(convert<T>(a.x[r][c]));
    return p;
  }
  template<class Out, int R, int C>
  static KS_DEVICE void to_shared(Out out, const Acc<R, C>& a, int row0 = 0, int column0 = 0) {
    for (int r = 0; r < R / WARP; r++)
      for (int c = 0; c < C; c++)
        out.at(row0 + r * WARP + lane(), column0 + c) = convert<typename Out::T>(a.x[r][c]);
  }

  template<int R, int C> static KS_DEVICE void atomic_add(float* to, const Acc<R, C>& a) {
    for (int r = 0; r < R / WARP; r++) lanes_add(to + r * WARP * C, a.x[r]);
  }
  template<int R, int C> static KS_DEVICE void load(Acc<R, C>& a, const float* from) {
    for (int r = 0; r < R / WARP; r++) lanes_load(a.x[r], from + r * WARP * C);
  }
};
#define KS_TF32
template<int PRODUCTS> using Tf32Engine = MatrixEngine<float, PRODUCTS>;

// ---- right factors that are stored as e4m3

#if KS_E4M3 && KS_THROUGH_REGISTERS  // converted as they land
template<class T> using E4m3Engine = MatrixEngine<T>;
#elif KS_E4M3
// Converted as they are multiplied. As on a GPU, a left factor for rows of k has its own order of k (pairs are swapped), and
// accumulators of a product with columns of k have their own order of columns.
template<class T> struct E4m3Engine : MatrixEngine<T> {
  typedef MatrixEngine<T> E;
  template<int R, int C> using Acc = typename E::template Acc<R, C>;
  template<int R, int K> using Operand = typename E::template Operand<R, K>;
  static constexpr int K_STEP = 32;

  template<int N, int K, bool K_LAST_> struct Tile : PlainTile<e4m3, K_LAST_ ? N : K, K_LAST_ ? K : N> {
    static constexpr bool K_LAST = K_LAST_;
    KS_DEVICE explicit Tile(char* m) : PlainTile<e4m3, K_LAST_ ? N : K, K_LAST_ ? K : N>(m) {}
    KS_DEVICE e4m3 element(int n, int k) const { return K_LAST ? this->at(n, k) : this->at(k, n); }
  };

  template<int R, int K, class From> static KS_DEVICE Operand<R, K> operand(From tile, int row0, int k0) {
    const Operand<R, K> a = E::template operand<R, K>(tile, row0, k0);
    Operand<R, K> b;
    for (int r = 0; r < R / WARP; r++)
      for (int k = 0; k < K; k++) b.x[r][k] = a.x[r][k ^ 1];
    return b;
  }
  template<int R, int C, int K, class B>
  static KS_DEVICE void mma(Acc<R, C>& acc, const Operand<R, K>& a, B b, int n0, int k0) {
    for (int k = 0; k < K; k++)
      for (int c = 0; c < C; c++) {
        const float x = to_sum(B::K_LAST ? b.element(n0 + c, k0 + (k ^ 1)) : b.element(n0 + (c ^ 1), k0 + k));
        for (int r = 0; r < R / WARP; r++) acc.x[r][c] += a.x[r][k] * x;
      }
  }
  template<int R, int C, class F> static KS_DEVICE void map(Acc<R, C>& a, F f) {
    E::map(a, [&](int r, int c, float x) { return f(r, c ^ 1, x); });
  }
  template<class Out, int R, int C>
  static KS_DEVICE void to_shared(Out out, const Acc<R, C>& a, int row0 = 0, int column0 = 0) {
    for (int r = 0; r < R / WARP; r++)
      for (int c = 0; c < C; c++) out.at(row0 + r * WARP + lane(), column0 + (c ^ 1)) = convert<typename Out::T>(a.x[r][c]);
  }
};
#endif
