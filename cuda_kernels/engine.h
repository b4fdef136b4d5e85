// The matrix engine for f16 and bf16: tensor cores by mma.sync, with operands loaded from shared memory by ldmatrix. Its
// accumulators, which other engines share.
#pragma once

// Accumulators of 16×8 blocks, as mma.sync produces them: lane 4·g + t holds four elements of each block, two neighbours in
// its first row (h = 0) and two in its second (h = 1). Place gives their rows and columns; neighbours are STEP columns apart (1, but
// for one `map`).

KS_DEVICE int lane_group() { return lane() / 4; }
KS_DEVICE int lane_in_group() { return lane() % 4; }

template<class Sum, int R, int C> struct AccumulatorFragment { Sum x[R / 16][C / 8][4]; };

template<class S, class Place> struct Accumulators {
  typedef S Sum;

  template<int R, int C> using Acc = AccumulatorFragment<Sum, R, C>;
  template<int R> struct Row { Sum x[R / 16][2]; };
  template<int C> struct Column { Sum x[C / 8][2]; };

  template<int R, int C> static KS_DEVICE void zero(Acc<R, C>& a) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int c = 0; c < C / 8; c++) a.x[r][c][0] = a.x[r][c][1] = a.x[r][c][2] = a.x[r][c][3] = 0;
  }

  template<int R, int C, class F> static KS_DEVICE void map(Acc<R, C>& a, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int c = 0; c < C / 8; c++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          a.x[r][c][e] = f(Place::row(r, e / 2), Place::column(c) + e % 2 * Place::STEP, a.x[r][c][e]);
  }

  template<int R, int C, class F> static KS_DEVICE void map2(Acc<R, C>& a, const Acc<R, C>& b, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int c = 0; c < C / 8; c++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          a.x[r][c][e] = f(Place::row(r, e / 2), Place::column(c) + e % 2 * Place::STEP, a.x[r][c][e], b.x[r][c][e]);
  }

  template<int R, int C, class F> static KS_DEVICE void map_pairs(Acc<R, C>& a, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int c = 0; c < C / 8; c++)
#pragma unroll
        for (int h = 0; h < 2; h++) f(Place::row(r, h), Place::column(c), a.x[r][c][2 * h], a.x[r][c][2 * h + 1]);
  }

  template<int R> static KS_DEVICE void fill(Row<R>& a, Sum v) {
#pragma unroll
    for (int r = 0; r < R / 16; r++) a.x[r][0] = a.x[r][1] = v;
  }
  template<int R, class F> static KS_DEVICE void zip(Row<R>& out, const Row<R>& a, const Row<R>& b, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) out.x[r][h] = f(a.x[r][h], b.x[r][h]);
  }
  template<int R, class F> static KS_DEVICE void row_map(Row<R>& a, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) a.x[r][h] = f(Place::row(r, h), a.x[r][h]);
  }
  template<int R, int C, class F> static KS_DEVICE void row_apply(Acc<R, C>& a, const Row<R>& v, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int c = 0; c < C / 8; c++)
#pragma unroll
        for (int e = 0; e < 4; e++) a.x[r][c][e] = f(a.x[r][c][e], v.x[r][e / 2]);
  }
  template<int R, int C> static KS_DEVICE void row_scale(Acc<R, C>& a, const Row<R>& v) {
    if constexpr (C >= 128) {  // fewer products cost less among the others than a branch that nothing passes
      bool changed = false;
#pragma unroll
      for (int r = 0; r < R / 16; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) changed |= v.x[r][h] != 1.f;
      if (!any_lane(changed)) return;
    }
    row_apply(a, v, [](float x, float y) { return x * y; });
  }
  template<int R, int C> static KS_DEVICE void row_max(Row<R>& out, const Acc<R, C>& a) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        Sum v = maximum(a.x[r][0][2 * h], a.x[r][0][2 * h + 1]);
#pragma unroll
        for (int c = 1; c < C / 8; c++) v = maximum(v, maximum(a.x[r][c][2 * h], a.x[r][c][2 * h + 1]));
        v = maximum(v, shuffle_xor(v, 1));
        out.x[r][h] = maximum(v, shuffle_xor(v, 2));
      }
  }
  template<int R, int C> static KS_DEVICE void row_add_partial(Row<R>& out, const Acc<R, C>& a) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int c = 0; c < C / 8; c++) out.x[r][h] += a.x[r][c][2 * h] + a.x[r][c][2 * h + 1];
  }
  template<int R> static KS_DEVICE void row_finish_sum(Row<R>& a) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        a.x[r][h] += shuffle_xor(a.x[r][h], 1);
        a.x[r][h] += shuffle_xor(a.x[r][h], 2);
      }
  }
  template<int R, class F> static KS_DEVICE void each_row(const Row<R>& a, F f) {
    if (lane_in_group() == 0)
#pragma unroll
      for (int r = 0; r < R / 16; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) f(Place::row(r, h), a.x[r][h]);
  }

  template<int R, int C, class F> static KS_DEVICE void row_fold(Row<R>& out, const Acc<R, C>& a, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int c = 0; c < C / 8; c++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          out.x[r][e / 2] = f(out.x[r][e / 2], Place::row(r, e / 2), Place::column(c) + e % 2 * Place::STEP, a.x[r][c][e]);
  }
  template<int R, class F> static KS_DEVICE void row_join(Row<R>& a, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int m = 1; m < 4; m *= 2) a.x[r][h] = f(a.x[r][h], shuffle_xor(a.x[r][h], m));
  }
  template<int R, int C, class F> static KS_DEVICE void column_fold(Column<C>& out, const Acc<R, C>& a, F f) {
#pragma unroll
    for (int c = 0; c < C / 8; c++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        out.x[c][h] = 0;
#pragma unroll
        for (int r = 0; r < R / 16; r++)
#pragma unroll
          for (int e = h; e < 4; e += 2)
            out.x[c][h] = f(out.x[c][h], Place::row(r, e / 2), Place::column(c) + h * Place::STEP, a.x[r][c][e]);
      }
  }
  template<int C, class F> static KS_DEVICE void column_join(Column<C>& a, F f) {
#pragma unroll
    for (int c = 0; c < C / 8; c++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int m = 4; m < WARP; m *= 2) a.x[c][h] = f(a.x[c][h], shuffle_xor(a.x[c][h], m));
  }
  template<int C, class F> static KS_DEVICE void each_column(const Column<C>& a, F f) {
    if (lane_group() == 0)
#pragma unroll
      for (int c = 0; c < C / 8; c++)
#pragma unroll
        for (int h = 0; h < 2; h++) f(Place::column(c) + h * Place::STEP, a.x[c][h]);
  }

  template<class Out, int R, int C>
  static KS_DEVICE void to_shared(Out out, const Acc<R, C>& a, int row0 = 0, int column0 = 0) {
    typedef typename Out::T To;
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int c = 0; c < C / 8; c++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          To* p = &out.at(row0 + Place::row(r, h), column0 + Place::column(c));
          const Sum lo = a.x[r][c][2 * h], hi = a.x[r][c][2 * h + 1];
          if constexpr (sizeof(To) == 2) *(unsigned*)p = Pack<To>::two(lo, hi);
          else { struct alignas(2 * sizeof(To)) Two { To x, y; }; *(Two*)p = {convert<To>(lo), convert<To>(hi)}; }
        }
  }

  template<int R, int C> static KS_DEVICE void atomic_add(float* to, const Acc<R, C>& a) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int c = 0; c < C / 8; c++) lanes_add(to + r * 16 * C + c * 128, a.x[r][c]);
  }
  template<int R, int C> static KS_DEVICE void load(Acc<R, C>& a, const float* from) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int c = 0; c < C / 8; c++) lanes_load(a.x[r][c], from + r * 16 * C + c * 128);
  }
};

// Rows g and g + 8 of a block, columns 2t and 2t + 1: mma.sync's own fragment layout.
struct AsMultiplied {
  static constexpr int STEP = 1;
  static KS_DEVICE int row(int r, int h) { return 16 * r + lane_group() + 8 * h; }
  static KS_DEVICE int column(int c) { return 8 * c + 2 * lane_in_group(); }
};

KS_DEVICE void ldmatrix(unsigned (&d)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(address) : "memory");
}
KS_DEVICE void ldmatrix_transposed(unsigned (&d)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(address) : "memory");
}

template<class T> struct Mma;
template<> struct Mma<f16> {
  static KS_DEVICE void run(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else  // the halves of k one after the other: a[0], a[1] and b0 have the first 8
    half(c, a[0], a[1], b0), half(c, a[2], a[3], b1);
  }
  static KS_DEVICE void half(float (&c)[4], unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b));
#endif
  }
};
template<> struct Mma<bf16> {
  static KS_DEVICE void run(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

template<class T_> struct MatrixEngine : Accumulators<float, AsMultiplied> {
  typedef T_ T;
  static constexpr bool MATRIX = true;
  static constexpr int K_STEP = 16;
  static constexpr bool ONE_LAYOUT = true;

  template<int N, int K, bool K_LAST_> struct Tile : PlainTile<T, K_LAST_ ? N : K, K_LAST_ ? K : N> {
    static constexpr bool K_LAST = K_LAST_;
    KS_DEVICE explicit Tile(char* m) : PlainTile<T, K_LAST_ ? N : K, K_LAST_ ? K : N>(m) {}
    KS_DEVICE T element(int n, int k) const { return K_LAST ? this->at(n, k) : this->at(k, n); }
    // Shared address of the chunk at (row0 + r, column0 + c); row0 and column0 are multiples of 16, r and c less than 16.
    // Rows 16 apart share one swizzle, and the swizzle is an XOR with some bits of the address (tiles begin at multiples of 128
    // bytes). So the swizzled address of (r, c) serves them all, and where row0 and column0 are compile-time constants the rest
    // costs little or nothing.
    KS_DEVICE unsigned address(int row0, int r, int column0, int c) const {
      constexpr int SWIZZLED = (PlainTile<T, K_LAST_ ? N : K, K_LAST_ ? K : N>::Layout::P - 1) * 8;
      const unsigned first = shared_address(&this->chunk(r, c));
      return (first ^ (column0 & SWIZZLED) * (int)sizeof(T)) + (row0 * this->COLS + (column0 & ~SWIZZLED)) * (int)sizeof(T);
    }
  };

  template<int R, int K> struct Operand { unsigned x[R / 16][K / 16][4]; };

  template<int R, int K, class From> static KS_DEVICE Operand<R, K> operand(From tile, int row0, int k0) {
    Operand<R, K> a;
    const int low = lane() % 16, high = lane() / 16, inner = lane() % 8, middle = lane() / 8 % 2;
#pragma unroll
    for (int k = 0; k < K / 16; k++)
#pragma unroll
      for (int r = 0; r < R / 16; r++) {
        if constexpr (From::K_LAST) ldmatrix(a.x[r][k], tile.address(row0 + 16 * r, low, k0 + 16 * k, 8 * high));
        else ldmatrix_transposed(a.x[r][k], tile.address(k0 + 16 * k, inner + 8 * high, row0 + 16 * r, 8 * middle));
      }
    return a;
  }

  template<int R, int C, int K, class B>
  static KS_DEVICE void mma(Acc<R, C>& acc, const Operand<R, K>& a, B b, int n0, int k0) {
    static_assert(C % 16 == 0 && K % 16 == 0 && R % 16 == 0, "shape of a matrix product");
    const int low = lane() % 16, high = lane() / 16, inner = lane() % 8, middle = lane() / 8 % 2;
#pragma unroll
    for (int k = 0; k < K / 16; k++)
#pragma unroll
      for (int c = 0; c < C / 16; c++) {
        unsigned x[4];
        if constexpr (B::K_LAST) ldmatrix(x, b.address(n0 + 16 * c, inner + 8 * high, k0 + 16 * k, 8 * middle));
        else ldmatrix_transposed(x, b.address(k0 + 16 * k, low, n0 + 16 * c, 8 * high));
#pragma unroll
        for (int r = 0; r < R / 16; r++) {
          Mma<T>::run(acc.x[r][2 * c], a.x[r][k], x[0], x[1]);
          Mma<T>::run(acc.x[r][2 * c + 1], a.x[r][k], x[2], x[3]);
        }
      }
  }

  // An accumulator fragment's columns 8c, 8c+8 are an A fragment's k already: no exchange between lanes.
  template<int R, int C> static constexpr int operand_bytes() { return 0; }
  template<int R, int C> static KS_DEVICE Operand<R, C> to_operand(const Acc<R, C>& a, char*) {
    Operand<R, C> p;
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int k = 0; k < C / 16; k++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float(&x)[4] = a.x[r][2 * k + e / 2];
          p.x[r][k][e] = Pack<T>::two(x[2 * (e % 2)], x[2 * (e % 2) + 1]);
        }
    return p;
  }
};
