// NVIDIA's tensor cores for elements of 4 and 8 bytes: float64 (sm_80 and up), and float32 in TF32. For GEMM only: there is no
// `to_operand`, and no `atomic_add` of double accumulators.
//
// In a 16×8 block mma.sync takes from lane 4·g + t the rows g and g + 8 of A (column g of B) and, along k, t and t + 4. Which row of
// the tile is g, and which k is t, may be permuted as long as A and B agree on k and the accumulators are read accordingly. Here a
// lane takes rows 2g and 2g + 1 of 16 and, of each k slab, the 16 bytes from KV·t on: one load brings a lane's whole share of a
// slab, in either layout of the tile. Columns 2g and 2g + 1 of B belong to two neighbouring blocks, so that of 16 accumulator
// columns a lane holds 4t … 4t + 3.
#pragma once

// The swizzle of an operand's 16-byte chunks, by which the lanes that a load serves together hit every bank once. Those lanes are two
// values of g and all of t. With k contiguous: rows 2g, 2 apart, and 4 chunks of each, so the halves of 8 chunks swap every second
// row. Else: 4 rows, KV apart, and 2 chunks of each. This holds for rows of at least 8 chunks.
template<class T, int COLS, bool K_LAST> struct WideLayout {
  static constexpr int V = 16 / (int)sizeof(T), CHUNKS = COLS / V, P = Swizzle<T, COLS>::P, PERIOD = K_LAST ? 4 : 4 * V;
  static KS_DEVICE int mask(int row) { return (K_LAST ? (row & 2) * 2 : row / V * 2) & (P - 1); }
  static KS_DEVICE int offset(int row, int col) { return row * COLS + ((col / V) ^ mask(row)) * V + col % V; }
};

// Rows 2g and 2g + 1; of every two blocks of 8 columns, columns 4t … 4t + 3.
struct InFours {
  static constexpr int STEP = 1;
  static KS_DEVICE int row(int r, int h) { return 16 * r + 2 * lane_group() + h; }
  static KS_DEVICE int column(int c) { return 8 * (c & ~1) + 4 * lane_in_group() + 2 * (c & 1); }
};

template<class T_, class Product> struct WideEngine : Accumulators<T_, InFours> {
  typedef T_ T;
  typedef Accumulators<T, InFours> Sums;
  template<int R, int C> using Acc = typename Sums::template Acc<R, C>;
  static constexpr bool MATRIX = true;
  static constexpr int KV = 16 / (int)sizeof(T), SLAB = 4 * KV, K_STEP = 16;
  static constexpr bool ONE_LAYOUT = false;

  template<int N, int K, bool K_LAST_>
  struct Tile : PlainTile<T, K_LAST_ ? N : K, K_LAST_ ? K : N, WideLayout<T, K_LAST_ ? K : N, K_LAST_>> {
    static constexpr bool K_LAST = K_LAST_;
    typedef PlainTile<T, K_LAST_ ? N : K, K_LAST_ ? K : N, WideLayout<T, K_LAST_ ? K : N, K_LAST_>> Plain;
    KS_DEVICE explicit Tile(char* m) : Plain(m) {}
    KS_DEVICE T element(int n, int k) const { return K_LAST ? this->at(n, k) : this->at(k, n); }
    // (row0 + r, column0 + c); row0 and column0 are multiples of 16, r and c less than 16. As in MatrixEngine, where
    // row0 and column0 are compile-time constants they cost nothing.
    KS_DEVICE const T* place(int row0, int r, int column0, int c) const {
      constexpr int TURNED = (Plain::Layout::P - 1) * KV;
      const int first = Plain::Layout::offset(r, c) ^ (column0 & TURNED);
      return this->base + first + (row0 * Plain::COLS + (column0 & ~TURNED));
    }
  };

  template<int R, int K, class From> struct Operand { From tile; int row0, k0; };
  template<int R, int K, class From> static KS_DEVICE Operand<R, K, From> operand(From t, int row0, int k0) {
    return {t, row0, k0};
  }

  // A lane's fragment of 16 rows (columns of B) from n0 on and one k slab: x[u][s] is row 2g + u at k = KV·t + s.
  template<class From> static KS_DEVICE void load(T (&x)[2][KV], From tile, int n0, int k0) {
    const int g = lane_group(), t = lane_in_group(), inner = k0 & 15;
    if constexpr (From::K_LAST) {
#pragma unroll
      for (int u = 0; u < 2; u++) {
        const Chunk<T> y = *(const Chunk<T>*)tile.place(n0, 2 * g + u, k0 - inner, inner + KV * t);
#pragma unroll
        for (int s = 0; s < KV; s++) x[u][s] = y.v[s];
      }
    } else {
      struct alignas(2 * sizeof(T)) Two { T x, y; };
#pragma unroll
      for (int s = 0; s < KV; s++) {
        const Two y = *(const Two*)tile.place(k0 - inner, inner + KV * t + s, n0, 2 * g);
        x[0][s] = y.x, x[1][s] = y.y;
      }
    }
  }

  template<int R, int C, int K, class From, class B>
  static KS_DEVICE void mma(Acc<R, C>& acc, const Operand<R, K, From>& a, B b, int n0, int k0) {
    static_assert(C % 16 == 0 && K % SLAB == 0 && R % 16 == 0, "shape of a matrix product");
#pragma unroll
    for (int k = 0; k < K; k += SLAB) {
      typename Product::Left left[R / 16];
#pragma unroll
      for (int r = 0; r < R / 16; r++) {
        T x[2][KV];
        load(x, a.tile, a.row0 + 16 * r, a.k0 + k);
        left[r].set(x);
      }
#pragma unroll
      for (int c = 0; c < C / 16; c++) {
        T x[2][KV];
        load(x, b, n0 + 16 * c, k0 + k);
#pragma unroll
        for (int u = 0; u < 2; u++) {
          const typename Product::Right right(x[u]);
#pragma unroll
          for (int r = 0; r < R / 16; r++) {
            T(&low)[4] = acc.x[r][2 * c], (&high)[4] = acc.x[r][2 * c + 1];
            Product::add(low[u], high[u], low[2 + u], high[2 + u], left[r], right);
          }
        }
      }
    }
  }
};

// ---- float64: k slabs of 8. Before sm_90 the instruction is m8n8k4.
struct DoubleProduct {
  struct Left {
    double x[2][2];
    KS_DEVICE void set(const double (&from)[2][2]) {
#pragma unroll
      for (int i = 0; i < 4; i++) x[i / 2][i % 2] = from[i / 2][i % 2];
    }
  };
  struct Right {
    double x[2];
    KS_DEVICE explicit Right(const double (&from)[2]) : x{from[0], from[1]} {}
  };
  // c0, c1: two columns of the fragment's first row (h = 0); c2, c3: of its second (h = 1).
  static KS_DEVICE void add(double& c0, double& c1, double& c2, double& c3, const Left& a, const Right& b) {
#if __CUDA_ARCH__ >= 900
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+d"(c0), "+d"(c1), "+d"(c2), "+d"(c3)
        : "d"(a.x[0][0]), "d"(a.x[1][0]), "d"(a.x[0][1]), "d"(a.x[1][1]), "d"(b.x[0]), "d"(b.x[1]));
#else
#pragma unroll
    for (int s = 0; s < 2; s++) {
      asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
          : "+d"(c0), "+d"(c1) : "d"(a.x[0][s]), "d"(b.x[s]));
      asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
          : "+d"(c2), "+d"(c3) : "d"(a.x[1][s]), "d"(b.x[s]));
    }
#endif
  }
};

#if KS_MATRIX_DOUBLE
template<> struct MatrixEngine<double> : WideEngine<double, DoubleProduct> {};
#endif

// ---- float32 in TF32 (8 exponent bits, 10 mantissa bits): k slabs of 16.

// The nearest TF32, ties away from 0.
KS_DEVICE unsigned to_tf32(float x) {
  unsigned y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}
KS_DEVICE void multiply_tf32(float& c0, float& c1, float& c2, float& c3, const unsigned (&a)[2][4], const unsigned (&b)[4]) {
#pragma unroll
  for (int s = 0; s < 4; s += 2)
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
        : "r"(a[0][s]), "r"(a[1][s]), "r"(a[0][s + 1]), "r"(a[1][s + 1]), "r"(b[s]), "r"(b[s + 1]));
}

// PRODUCTS = 1: operands are rounded to TF32. 3 (3xTF32): x is split into two TF32 values, the nearest and the remainder's nearest,
// exact to 2⁻²² of x; three of the four products then give x·y to that precision. Tensor cores truncate sums where float32
// rounds them, which drifts over many additions: each slab is summed from 0 and added to the accumulator by ordinary additions.
template<int PRODUCTS> struct Tf32Product {
  static_assert(PRODUCTS == 1 || PRODUCTS == 3, "rounded or split");
  static constexpr int PARTS = PRODUCTS == 3 ? 2 : 1;
  static KS_DEVICE void split(unsigned (&parts)[PARTS], float x) {
    parts[0] = to_tf32(x);
    if (PARTS == 2) parts[PARTS - 1] = to_tf32(x - __uint_as_float(parts[0]));
  }
  struct Left {
    unsigned x[PARTS][2][4];
    KS_DEVICE void set(const float (&from)[2][4]) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        unsigned y[PARTS];
        split(y, from[i / 4][i % 4]);
#pragma unroll
        for (int p = 0; p < PARTS; p++) x[p][i / 4][i % 4] = y[p];
      }
    }
  };
  struct Right {
    unsigned x[PARTS][4];
    KS_DEVICE explicit Right(const float (&from)[4]) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        unsigned y[PARTS];
        split(y, from[i]);
#pragma unroll
        for (int p = 0; p < PARTS; p++) x[p][i] = y[p];
      }
    }
  };
  static KS_DEVICE void add(float& c0, float& c1, float& c2, float& c3, const Left& a, const Right& b) {
    if constexpr (PRODUCTS == 1) {
      multiply_tf32(c0, c1, c2, c3, a.x[0], b.x[0]);
    } else {
      float large[4] = {}, small[4] = {};
      multiply_tf32(small[0], small[1], small[2], small[3], a.x[1], b.x[0]);
      multiply_tf32(small[0], small[1], small[2], small[3], a.x[0], b.x[1]);
      multiply_tf32(large[0], large[1], large[2], large[3], a.x[0], b.x[0]);
      float* const sums[4] = {&c0, &c1, &c2, &c3};
#pragma unroll
      for (int i = 0; i < 4; i++)  // an infinity's remainder is NaN, and so is infinity · 0: the large parts alone are right then
        *sums[i] += large[i] + (finite(small[i]) ? small[i] : 0.f);
    }
  }
};
template<int PRODUCTS> using Tf32Engine = WideEngine<float, Tf32Product<PRODUCTS>>;
