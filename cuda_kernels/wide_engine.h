// NVIDIA's tensor cores for elements of 4 and 8 bytes: float64 (sm_80 and up), and float32 in TF32 (tf32_engine.h). float64 is for
// GEMM only: there is no `atomic_add` of double accumulators.
//
// In a 16×8 block mma.sync takes from lane 4·g + t the rows g and g + 8 of A (column g of B) and, along k, t and t + 4. Which row of
// the tile is g, and which k is t, may be permuted as long as A and B agree on k and the accumulators are read accordingly. Here a
// lane takes rows 2g and 2g + 1 of 16 and, of each k slab, the 16 bytes from KV·t on: one load brings a lane's whole share of a
// slab, in either layout of the tile. Columns 2g and 2g + 1 of B belong to two neighbouring blocks, so that of 16 accumulator
// columns a lane holds 4t … 4t + 3.
#pragma once

// The swizzle of an operand's 16-byte chunks, by which the lanes that a load serves together hit every bank once. Those lanes are two
// values of g and all of t. With k contiguous: rows 2g, 2 apart, and 4 chunks of each, so the halves of 8 chunks swap every second
// row. Else: 4 rows, KV apart, and 2 chunks of each. This holds for rows of at least 8 chunks. For float32 one swizzle serves both.
template<class T, int COLS, bool K_LAST> struct WideLayout {
  static constexpr int V = 16 / (int)sizeof(T), CHUNKS = COLS / V, P = Swizzle<T, COLS>::P;
  static constexpr int PERIOD = V == 4 ? 16 : K_LAST ? 4 : 4 * V;
  static KS_DEVICE int mask(int row) {
    if constexpr (V == 4) return (((row ^ row >> 1) & 2) * 2 | (row & 8) / 4) & (P - 1);
    return (K_LAST ? (row & 2) * 2 : row / V * 2) & (P - 1);
  }
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
  static constexpr int KV = 16 / (int)sizeof(T), SLAB = 4 * KV, K_STEP = Product::K_STEP;
  static constexpr bool ONE_LAYOUT = KV == 4;

  template<int N, int K, bool K_LAST_>
  struct Tile : PlainTile<T, K_LAST_ ? N : K, K_LAST_ ? K : N, WideLayout<T, K_LAST_ ? K : N, K_LAST_>> {
    static constexpr bool K_LAST = K_LAST_;
    typedef PlainTile<T, K_LAST_ ? N : K, K_LAST_ ? K : N, WideLayout<T, K_LAST_ ? K : N, K_LAST_>> Plain;
    KS_DEVICE explicit Tile(char* m) : Plain(m) {}
    KS_DEVICE T element(int n, int k) const { return K_LAST ? this->at(n, k) : this->at(k, n); }
    // (row0 + r, column0 + c); row0 and column0 are multiples of 16, r and c less than 16. As in MatrixEngine, where
    // row0 and column0 are compile-time constants they cost nothing.
    KS_DEVICE const T* place(int row0, int r, int column0, int c) const {
      constexpr int SWIZZLED = (Plain::Layout::P - 1) * KV;
      const int first = Plain::Layout::offset(r, c) ^ (column0 & SWIZZLED);
      return this->base + first + (row0 * Plain::COLS + (column0 & ~SWIZZLED));
    }
  };

  template<int R_, int K_, class From> struct Operand {
    static constexpr int K = K_;
    From tile;
    int row0, k0;
  };
  template<int R, int K, class From> static KS_DEVICE Operand<R, K, From> operand(From t, int row0, int k0) {
    return {t, row0, k0};
  }
  // Through shared memory, although a lane has four neighbours of a row already: what is read slab by slab takes a loop of one
  // slab, and no registers for the others.
  template<int R, int C> static constexpr int operand_bytes() { return R * C * (int)sizeof(T); }
  template<int R, int C> static KS_DEVICE Operand<R, C, Tile<R, C, true>> to_operand(const Acc<R, C>& a, char* scratch) {
    const Tile<R, C, true> t(scratch);
    warp_barrier();  // the warp has read what lay here
    to_shared(t, a);
    warp_barrier();
    return {t, 0, 0};
  }

  // Four neighbours of a row at once, a chunk of float32.
  template<class Out, int R, int C>
  static KS_DEVICE void to_shared(Out out, const Acc<R, C>& a, int row0 = 0, int column0 = 0) {
    typedef typename Out::T To;
    if constexpr (sizeof(To) != 4) {
      Sums::to_shared(out, a, row0, column0);
    } else {
#pragma unroll
      for (int r = 0; r < R / 16; r++)
#pragma unroll
        for (int c = 0; c < C / 8; c += 2)
#pragma unroll
          for (int h = 0; h < 2; h++)
            out.chunk(row0 + InFours::row(r, h), column0 + InFours::column(c)) = {
                (To)a.x[r][c][2 * h], (To)a.x[r][c][2 * h + 1], (To)a.x[r][c + 1][2 * h], (To)a.x[r][c + 1][2 * h + 1]};
    }
  }

  // A lane's fragment of 16 rows (columns of B) from n0 on and one k slab: x[u][s] is row 2g + u at k = KV·t + s.
  template<class From> static KS_DEVICE void take(T (&x)[2][KV], From tile, int n0, int k0) {
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

  // sums[i] += left · right, the i-th of what `By` makes of both.
  template<class By, int R, int C, int SUMS, class Left, class B>
  static KS_DEVICE void add_products(Acc<R, C> (&sums)[SUMS], const Left& a, B b, int n0, int k0) {
    // What the next slab needs first is loaded while this one is multiplied.
    T ahead[R / 16 + 1][2][KV];
    auto load = [&](int k) {
#pragma unroll
      for (int r = 0; r < R / 16; r++) take(ahead[r], a.tile, a.row0 + 16 * r, a.k0 + k);
      take(ahead[R / 16], b, n0, k0 + k);
    };
    load(0);
    constexpr int UNROLL = By::template UNROLL<R, C>;
#pragma unroll UNROLL
    for (int k = 0; k < Left::K; k += SLAB) {
      typename By::Left left[R / 16];
#pragma unroll
      for (int r = 0; r < R / 16; r++) left[r].set(ahead[r]);
      T first[2][KV];
#pragma unroll
      for (int i = 0; i < 2 * KV; i++) first[i / KV][i % KV] = ahead[R / 16][i / KV][i % KV];
      if (Left::K > SLAB) load((k + SLAB) % Left::K);
#pragma unroll
      for (int c = 0; c < C / 16; c++) {
        T x[2][KV];
        if (c == 0) {
#pragma unroll
          for (int i = 0; i < 2 * KV; i++) x[i / KV][i % KV] = first[i / KV][i % KV];
        } else {
          take(x, b, n0 + 16 * c, k0 + k);
        }
#pragma unroll
        for (int u = 0; u < 2; u++) {
          const typename By::Right right(x[u]);
#pragma unroll
          for (int r = 0; r < R / 16; r++)
#pragma unroll
            for (int i = 0; i < SUMS; i++) {
              T(&low)[4] = sums[i].x[r][2 * c], (&high)[4] = sums[i].x[r][2 * c + 1];
              By::add(low[u], high[u], low[2 + u], high[2 + u], left[r], right, i);
            }
        }
      }
    }
  }

  template<int R, int C, class Left, class B> static KS_DEVICE void mma(Acc<R, C>& acc, const Left& a, B b, int n0, int k0) {
    static_assert(C % 16 == 0 && Left::K % SLAB == 0 && R % 16 == 0, "shape of a matrix product");
    if constexpr (Product::SUMS == 1) add_products<Product>((Acc<R, C>(&)[1])acc, a, b, n0, k0);
    else Product::template mma<WideEngine>(acc, a, b, n0, k0);
  }
};

// ---- float64: k slabs of 8. Before sm_90 the instruction is m8n8k4.
struct DoubleProduct {
  static constexpr int K_STEP = 16, SUMS = 1;
  template<int R, int C> static constexpr int UNROLL = 4;
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
  static KS_DEVICE void add(double& c0, double& c1, double& c2, double& c3, const Left& a, const Right& b, int) {
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
