// The matrix engine for f16, bf16 and, where the arch multiplies it, e4m3, over the words of KS_MATRIX_HEADER.
// A lane holds one row of every 16 rows of an accumulator (row lane % 16), in blocks of 16 columns. Factors lie in shared
// memory with k contiguous, whichever way they lay in global memory.
#pragma once

// Whether float32 is rounded to T by integer additions, which would carry a NaN's bits into its sign: a test of each
// value, as the compiler makes it, takes more than the rounding. KS_BF16_CONVERTS: there is an instruction.
template<class T> static constexpr bool ROUNDED_BY_HAND = false;
#ifndef KS_BF16_CONVERTS
template<> constexpr bool ROUNDED_BY_HAND<bf16> = true;
#endif
// Whether the rounding is an fma's, which writes one half of a register (v_fma_mix): after conversions another instruction
// would have to join two.
template<class T> static constexpr bool ROUNDED_BY_FMA = false;
#ifdef KS_WMMA
template<> constexpr bool ROUNDED_BY_FMA<f16> = true;
#endif
KS_DEVICE unsigned half_up(float x) { return __builtin_bit_cast(unsigned, x) + 0x8000; }  // to nearest, ties away from 0
KS_DEVICE float opaque_one() {
  float x = 1.f;
  asm("" : "+s"(x));
  return x;
}
// Two sums rounded to T, the first in the lower half. What is rounded by hand is not NaN, or the NaN of `quieted`.
template<class T> KS_DEVICE unsigned pack(float lo, float hi) {
  typedef T Two __attribute__((ext_vector_type(2)));
  if constexpr (ROUNDED_BY_HAND<T>) return __builtin_amdgcn_perm(half_up(hi), half_up(lo), 0x07060302);
  if constexpr (ROUNDED_BY_FMA<T>) lo = __builtin_fmaf(lo, opaque_one(), -0.f), hi = __builtin_fmaf(hi, opaque_one(), -0.f);
  return __builtin_bit_cast(unsigned, Two{(T)lo, (T)hi});
}
KS_DEVICE float quieted(float x) { return x == x ? x : __builtin_bit_cast(float, 0x7fc00000); }
KS_DEVICE bool any_lane(bool x) {
#if KS_WARP == 64
  return __builtin_amdgcn_ballot_w64(x) != 0;
#else
  return __builtin_amdgcn_ballot_w32(x) != 0;
#endif
}

#include KS_MATRIX_HEADER

// A factor in shared memory: N rows of K elements, their 16-byte chunks permuted against bank conflicts.
// What must reach different groups of 4 banks at once: the same chunk of 8 rows that lie next to each other, that are
// {0…3, 8…11} or {4…7, 12…15} of 16, or (as a transposed tile is stored) that are 8 apart. With 64 banks those of
// 16 rows that lie next to each other, or are i / 4 · 8 + i % 4.
template<class T_, int N, int K, bool K_LAST_> struct MatrixTile {
  typedef T_ T;
  static constexpr bool K_LAST = K_LAST_;
  static constexpr int OUTER = N;
  static constexpr int ROWS = K_LAST ? N : K, COLS = K_LAST ? K : N;
  static constexpr int BYTES = N * K * (int)sizeof(T);
  // Chunks of a row that are permuted among each other, and rows whose chunks lie side by side in one line of the 32 banks.
  static constexpr int V = 16 / (int)sizeof(T), CHUNKS = K / V, MOST = KS_LDS_BANKS / 4;
  static constexpr int P = CHUNKS % MOST == 0 ? MOST : CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2, SHARING = 8 / P;
  static_assert(CHUNKS % 2 == 0, "rows of a factor are whole pairs of chunks");
  T* base;
  KS_DEVICE explicit MatrixTile(char* memory) : base((T*)memory) {}

  static KS_DEVICE int permutation(int n) {
    if (K_LAST) n %= 32;  // no access takes rows further apart: so places in blocks of 32 rows differ by constants
#if KS_LDS_BANKS == 64
    // Linear in the bits of n, found by search: reads without conflicts, writes with as few as their width allows.
    constexpr int BITS[4][6] = {{1, 0, 1, 0, 0, 1}, {3, 3, 0, 3, 2, 1}, {7, 1, 5, 3, 6, 4}, {14, 7, 0, 12, 10, 13}};
    constexpr int ROW = P == 16 ? 3 : P == 8 ? 2 : P == 4 ? 1 : 0;
    int chunk = 0;
#pragma unroll
    for (int i = 0; i < 6; i++) chunk ^= (n >> i & 1) * BITS[ROW][i];
    return chunk;
#else
    // Which bits of the chunk's place in a line n's bits 3, 4 and 5 change: where rows share a line, that of the row, too.
    const int far = n / 8, three = P == 8 ? 4 : P == 4 ? 2 : 1, four = P == 8 ? 2 : P == 4 ? 1 : 2, five = P == 8 ? 1 : 4;
    const int other = (far & 1) * three ^ (far / 2 & 1) * four ^ (far / 4 & 1) * five;
    return (n / SHARING ^ other) & (P - 1) | (CHUNKS == P ? other & -P : 0);
#endif
  }
  // The element of outer index n at k; what follows it up to the next multiple of V is contiguous.
  KS_DEVICE T* place(int n, int k) const { return base + (n * CHUNKS + k / V ^ permutation(n)) * V + k % V; }
  // That of n + far_n at k + far_k, which have no bits in common with n and k: as the permutation is linear, and rows begin at
  // multiples of P chunks, what is far but constant costs a lane one exclusive or, and an offset of the instruction.
  KS_DEVICE T* place(int n, int k, int far_n, int far_k) const {
    const int chunk = far_k / V, permuted = chunk & P - 1 ^ permutation(far_n);
    const unsigned near = (unsigned)(size_t)(KS_LOCAL char*)(char*)place(n, k);
    const unsigned at = (near ^ permuted * 16) + far_n * K * (int)sizeof(T) + (chunk & -P) * 16;
    return (T*)(KS_LOCAL T*)(size_t)at;
  }
  KS_DEVICE T element(int n, int k) const { return *place(n, k); }
};

// How an instruction's sums grow by the product of two fragments.
template<class T> struct PlainProduct {
  template<class F> static KS_DEVICE Sums add(F outer, F row, Sums c) { return multiply<T>(outer, row, c); }
};

template<class T_, class Product = PlainProduct<T_>> struct MatrixEngine {
  typedef T_ T;
  typedef float Sum;
  static constexpr bool MATRIX = true;
  static constexpr int UNIT = UNIT_K * 2 / (int)sizeof(T), K_STEP = UNIT;  // UNIT_K is of 16 bits
  static constexpr bool ONE_LAYOUT = false;

  template<int N, int K, bool K_LAST> using Tile = MatrixTile<T, N, K, K_LAST>;
  template<int R, int C> struct Acc { Sums x[R / 16][C / 16]; };
  template<int R> struct Row { float x[R / 16]; };
  template<int C> struct Column { float x[C / 16][BLOCK_SUMS]; };
  template<int R, int K> struct Operand {
    static constexpr int UNITS = K / UNIT, TAIL = K % UNIT != 0;
    Fragment x[R / 16][UNITS + (UNITS == 0)];
    HalfFragment tail[R / 16];
  };

  template<int R, int K, class From> static KS_DEVICE Operand<R, K> operand(From tile, int row0, int k0) {
    static_assert((R & R - 1) == 0, "row0, a multiple of R, has no bits in common with what is added to it");
    typedef Operand<R, K> Result;
    Result a;
#pragma unroll
    for (int r = 0; r < R / 16; r++) {
      auto from = [&](int k, int far) { return tile.place(row0 + lane() % 16, k, 16 * r, far); };
#pragma unroll
      for (int u = 0; u < Result::UNITS; u++) a.x[r][u] = load_unit(from, k0 + u * UNIT);
      if constexpr (Result::TAIL) a.tail[r] = load_tail(from, k0 + Result::UNITS * UNIT);
    }
    return a;
  }

  template<int R, int C> static KS_DEVICE void zero(Acc<R, C>& a) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int b = 0; b < C / 16; b++) a.x[r][b] = 0.f;
  }

#ifdef KS_WMMA
  // A lane's sums are all of one row: 8 registers serve every block of columns. (CDNA subtracts in pairs beside its products.)
  template<int R> struct Start { Sums x[R / 16]; };
  template<int R> static KS_DEVICE Start<R> start(const Row<R>& v) {
    Start<R> a;
#pragma unroll
    for (int r = 0; r < R / 16; r++) {
      a.x[r] = v.x[r];
      asm volatile("" : "+v"(a.x[r]));  // else they would be made of one register for each product
    }
    return a;
  }
  template<int R, int C> static KS_DEVICE void begin(Acc<R, C>& a, const Start<R>& v) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int b = 0; b < C / 16; b++) a.x[r][b] = v.x[r];
  }
  template<int R, int C> static KS_DEVICE void row_max_partial(Row<R>& out, const Acc<R, C>& a) {
#pragma unroll
    for (int r = 0; r < R / 16; r++) out.x[r] = largest(a, r);
  }
  template<int R> static KS_DEVICE void row_max_finish(Row<R>& a) {
#pragma unroll
    for (int r = 0; r < R / 16; r++) a.x[r] = joined(a.x[r]);
  }
  template<int R> static KS_DEVICE bool any_above(const Row<R>& a, const Row<R>& b) {
    bool above = false;
#pragma unroll
    for (int r = 0; r < R / 16; r++) above |= a.x[r] > b.x[r];
    return any_lane(above);
  }
#endif

  template<int R, int C, int K, class B>
  static KS_DEVICE void mma(Acc<R, C>& acc, const Operand<R, K>& a, B tile, int n0, int k0) {
    static_assert(C % 16 == 0 && K % 16 == 0 && R % 16 == 0, "shape of a matrix product");
    typedef Operand<R, K> Left;
    // Whether n0, a multiple of C, has no bits in common with what is added to it.
    constexpr bool APART = (C & C - 1) == 0 || C == B::OUTER;
#pragma unroll
    for (int u = 0; u < Left::UNITS + Left::TAIL; u++)
#pragma unroll
      for (int b = 0; b < C / 16; b++) {
        auto from = [&](int k, int far) {
          const int block = n0 + outer_block<C>(b), index = outer_index<C>(b);
          return APART ? tile.place(n0 + index, k, block - n0, far) : tile.place(block + index, k, 0, far);
        };
        if (u < Left::UNITS) {
          const Fragment outer = load_unit(from, k0 + u * UNIT);
#pragma unroll
          for (int r = 0; r < R / 16; r++) acc.x[r][b] = Product::add(outer, a.x[r][u], acc.x[r][b]);
        } else {
          const HalfFragment outer = load_tail(from, k0 + u * UNIT);
#pragma unroll
          for (int r = 0; r < R / 16; r++) acc.x[r][b] = Product::add(outer, a.tail[r], acc.x[r][b]);
        }
        // Left to itself the compiler loads further ahead than there are registers. Products are counted on from one k
        // to the next: where a call has but one, several may still be loaded at once.
        const int product = (k0 / UNIT + u) * (C / 16) + b;
        if (FRAGMENTS_AHEAD && product % max_of(FRAGMENTS_AHEAD, 1) == FRAGMENTS_AHEAD - 1)
          __builtin_amdgcn_sched_barrier(0);
      }
  }

  template<int R, int C, class F> static KS_DEVICE void map(Acc<R, C>& a, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int b = 0; b < C / 16; b++) {
        // Else what f makes of one row or column, a condition or an address, would be kept for all the others.
        const int row = opaque(16 * r + lane() % 16), column = opaque(sums_column<C>(b));
#pragma unroll
        for (int e = 0; e < BLOCK_SUMS; e++) a.x[r][b][e] = f(row, column + e, a.x[r][b][e]);
      }
  }

  template<int R, int C, class F> static KS_DEVICE void map2(Acc<R, C>& a, const Acc<R, C>& other, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int b = 0; b < C / 16; b++) {
        const int row = opaque(16 * r + lane() % 16), column = opaque(sums_column<C>(b));
#pragma unroll
        for (int e = 0; e < BLOCK_SUMS; e++) a.x[r][b][e] = f(row, column + e, a.x[r][b][e], other.x[r][b][e]);
      }
  }

  template<int R, int C, class F> static KS_DEVICE void map_pairs(Acc<R, C>& a, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int b = 0; b < C / 16; b++) {
        const int row = opaque(16 * r + lane() % 16), column = opaque(sums_column<C>(b));
#pragma unroll
        for (int e = 0; e < BLOCK_SUMS; e += 2) {
          float x = a.x[r][b][e], y = a.x[r][b][e + 1];  // what is part of a vector has no reference
          f(row, column + e, x, y);
          a.x[r][b][e] = x, a.x[r][b][e + 1] = y;
        }
      }
  }

  template<int R> static KS_DEVICE void fill(Row<R>& a, float v) {
#pragma unroll
    for (int r = 0; r < R / 16; r++) a.x[r] = v;
  }
  template<int R, class F> static KS_DEVICE void zip(Row<R>& out, const Row<R>& a, const Row<R>& b, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++) out.x[r] = f(a.x[r], b.x[r]);
  }
  template<int R, class F> static KS_DEVICE void row_map(Row<R>& a, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++) a.x[r] = f(16 * r + lane() % 16, a.x[r]);
  }
  template<int R, int C, class F> static KS_DEVICE void row_apply(Acc<R, C>& a, const Row<R>& v, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int b = 0; b < C / 16; b++)
#pragma unroll
        for (int e = 0; e < BLOCK_SUMS; e++) a.x[r][b][e] = f(a.x[r][b][e], v.x[r]);
  }
  // Nothing, where no row of the wave changes: over many tiles the largest score seldom moves.
  template<int R, int C> static KS_DEVICE void row_scale(Acc<R, C>& a, const Row<R>& v) {
    bool changed = false;
#pragma unroll
    for (int r = 0; r < R / 16; r++) changed |= v.x[r] != 1.f;
    if (any_lane(changed)) row_apply(a, v, [](float x, float y) { return x * y; });
  }
  template<int R, int C> static KS_DEVICE float largest(const Acc<R, C>& a, int r) {
    float v = a.x[r][0][0];
#pragma unroll
    for (int b = 0; b < C / 16; b++)
#pragma unroll
      for (int e = b == 0; e < BLOCK_SUMS; e++) v = maximum(v, a.x[r][b][e]);
    return v;
  }
  static KS_DEVICE float joined(float v) {
#pragma unroll
    for (int m = 16; m < WARP; m *= 2) v = maximum(v, shuffle_xor(v, m));
    return v;
  }
  template<int R, int C> static KS_DEVICE void row_max(Row<R>& out, const Acc<R, C>& a) {
#pragma unroll
    for (int r = 0; r < R / 16; r++) out.x[r] = joined(largest(a, r));
  }
  // By two sums of neighbours: instructions that add a pair take them.
  template<int R, int C> static KS_DEVICE void row_add_partial(Row<R>& out, const Acc<R, C>& a) {
#pragma unroll
    for (int r = 0; r < R / 16; r++) {
      float even = out.x[r], odd = 0.f;
#pragma unroll
      for (int b = 0; b < C / 16; b++)
#pragma unroll
        for (int e = 0; e < BLOCK_SUMS; e += 2) even += a.x[r][b][e], odd += a.x[r][b][e + 1];
      out.x[r] = even + odd;
    }
  }
  template<int R> static KS_DEVICE void row_finish_sum(Row<R>& a) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int m = 16; m < WARP; m *= 2) a.x[r] += shuffle_xor(a.x[r], m);
  }
  template<int R, class F> static KS_DEVICE void each_row(const Row<R>& a, F f) {
    if (lane() < 16)
#pragma unroll
      for (int r = 0; r < R / 16; r++) f(16 * r + lane(), a.x[r]);
  }

  template<int R, int C, class F> static KS_DEVICE void row_fold(Row<R>& out, const Acc<R, C>& a, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int b = 0; b < C / 16; b++) {
        const int row = opaque(16 * r + lane() % 16), column = opaque(sums_column<C>(b));
#pragma unroll
        for (int e = 0; e < BLOCK_SUMS; e++) out.x[r] = f(out.x[r], row, column + e, a.x[r][b][e]);
      }
  }
  template<int R, class F> static KS_DEVICE void row_join(Row<R>& a, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int m = 16; m < WARP; m *= 2) a.x[r] = f(a.x[r], shuffle_xor(a.x[r], m));
  }
  template<int R, int C, class F> static KS_DEVICE void column_fold(Column<C>& out, const Acc<R, C>& a, F f) {
#pragma unroll
    for (int b = 0; b < C / 16; b++) {
#pragma unroll
      for (int e = 0; e < BLOCK_SUMS; e++) out.x[b][e] = 0;
#pragma unroll
      for (int r = 0; r < R / 16; r++) {
        const int row = opaque(16 * r + lane() % 16), column = opaque(sums_column<C>(b));
#pragma unroll
        for (int e = 0; e < BLOCK_SUMS; e++) out.x[b][e] = f(out.x[b][e], row, column + e, a.x[r][b][e]);
      }
    }
  }
  template<int C, class F> static KS_DEVICE void column_join(Column<C>& a, F f) {
#pragma unroll
    for (int b = 0; b < C / 16; b++)
#pragma unroll
      for (int e = 0; e < BLOCK_SUMS; e++)
#pragma unroll
        for (int m = 1; m < 16; m *= 2) a.x[b][e] = f(a.x[b][e], shuffle_xor(a.x[b][e], m));
  }
  template<int C, class F> static KS_DEVICE void each_column(const Column<C>& a, F f) {
    if (lane() % 16 == 0)
#pragma unroll
      for (int b = 0; b < C / 16; b++)
#pragma unroll
        for (int e = 0; e < BLOCK_SUMS; e++) f(sums_column<C>(b) + e, a.x[b][e]);
  }

  // Accumulators lie as an operand does.
  template<int R, int C> static constexpr int operand_bytes() { return 0; }
  // Whether a lane of the wave may have a NaN: a sum of products finds all of them, and of what is not finite some more.
  template<int R, int C> static KS_DEVICE bool suspicious(const Acc<R, C>& a) {
    float sum = 0;
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int b = 0; b < C / 16; b++)
#pragma unroll
        for (int e = 0; e < BLOCK_SUMS; e += 2) sum = __builtin_fmaf(a.x[r][b][e], a.x[r][b][e + 1], sum);
    return any_lane(sum != sum);
  }
  template<int R, int C, class Quiet> static KS_DEVICE Operand<R, C> packed(const Acc<R, C>& a, Quiet quiet) {
    typedef Operand<R, C> Result;
    Result p;
#pragma unroll
    for (int r = 0; r < R / 16; r++) {
      Sums x[C / 16];
#pragma unroll
      for (int b = 0; b < C / 16; b++)
#pragma unroll
        for (int e = 0; e < BLOCK_SUMS; e++) x[b][e] = quiet(a.x[r][b][e]);
#pragma unroll
      for (int u = 0; u < Result::UNITS; u++) p.x[r][u] = pack_unit<T>(&x[u * (UNIT_K / 16)]);
      if constexpr (Result::TAIL) p.tail[r] = pack_tail<T>(x[C / 16 - 1]);
    }
    return p;
  }
  template<int R, int C> static KS_DEVICE Operand<R, C> to_operand(const Acc<R, C>& a, char*) {
    if constexpr (ROUNDED_BY_HAND<T>)
      if (suspicious(a)) return packed(a, [](float x) { return quieted(x); });
    return packed(a, [](float x) { return x; });
  }

  template<class Out, int R, int C>
  static KS_DEVICE void to_shared(Out out, const Acc<R, C>& a, int row0 = 0, int column0 = 0) {
    typedef typename Out::T To;
    constexpr int RUN = BLOCK_SUMS < 16 / (int)sizeof(To) ? BLOCK_SUMS : 16 / (int)sizeof(To);
    typedef typename conditional<sizeof(To) == 1, unsigned char, To>::type Raw;
    typedef Raw Stored __attribute__((ext_vector_type(RUN)));
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int b = 0; b < C / 16; b++)
#pragma unroll
        for (int e = 0; e < BLOCK_SUMS; e += RUN) {
          Stored y;
#pragma unroll
          for (int f = 0; f < RUN; f++) {
            const To x = convert<To>(a.x[r][b][e + f]);
            y[f] = (const Raw&)x;
          }
          *(Stored*)&out.at(row0 + 16 * r + lane() % 16, column0 + sums_column<C>(b) + e) = y;
        }
  }
  // The same for a factor: a lane's sums are neighbours of k, or of the outer index, and then far from each other.
  template<int N, int K, bool K_LAST, int R, int C>
  static KS_DEVICE void to_shared(MatrixTile<T, N, K, K_LAST> out, const Acc<R, C>& a, int row0, int column0) {
    typedef T Stored __attribute__((ext_vector_type(BLOCK_SUMS)));
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int b = 0; b < C / 16; b++) {
        const int row = row0 + 16 * r + lane() % 16, column = column0 + sums_column<C>(b);
        Stored y;
#pragma unroll
        for (int e = 0; e < BLOCK_SUMS; e++) {
          y[e] = convert<T>(a.x[r][b][e]);
          if (!K_LAST) *out.place(column + e, row) = y[e];
        }
        if (K_LAST) *(Stored*)out.place(row, column) = y;
      }
  }

  template<int R, int C> static KS_DEVICE void atomic_add(float* to, const Acc<R, C>& a) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int b = 0; b < C / 16; b++) {
        float x[BLOCK_SUMS];
#pragma unroll
        for (int e = 0; e < BLOCK_SUMS; e++) x[e] = a.x[r][b][e];
        lanes_add(to + r * 16 * C + b * 256, x);
      }
  }
  template<int R, int C> static KS_DEVICE void load(Acc<R, C>& a, const float* from) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int b = 0; b < C / 16; b++) {
        float x[BLOCK_SUMS];
        lanes_load(x, from + r * 16 * C + b * 256);
#pragma unroll
        for (int e = 0; e < BLOCK_SUMS; e++) a.x[r][b][e] = x[e];
      }
  }
};

#if KS_E4M3
// Right factors that are stored as e4m3: they become factors of T as they land (copy.h).
template<class T, int N, int K, bool K_LAST> struct WidenedTile : MatrixTile<T, N, K, K_LAST> {
  KS_DEVICE explicit WidenedTile(char* memory) : MatrixTile<T, N, K, K_LAST>(memory) {}
};
template<class T> struct E4m3Engine : MatrixEngine<T> {
  template<int N, int K, bool K_LAST> using Tile = WidenedTile<T, N, K, K_LAST>;
};
#endif
#ifdef KS_XF32
#define KS_TF32  // there is Tf32Engine
#include "xf32.h"
#endif
