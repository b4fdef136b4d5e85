// NVIDIA's tensor cores for e4m3 (sm_89 and up): mma.sync m16n8k32. For GEMM only: there is no `to_operand`.
//
// Accumulators lie in fours, as wide_engine.h has them: a lane takes rows 2g and 2g + 1 of 16 and, of 16 columns, gives 2g to
// one block and 2g + 1 to the next; which registers an instruction sums into is free, so a lane holds columns 4t … 4t + 3. So
// both layouts have one way. With k contiguous ldmatrix is given the even rows of 16, then the odd ones. Else it transposes pairs
// of neighbours, which are rows 2g and 2g + 1 of the factor; rows of k are chosen such that two of its words have the bytes
// of k = 4t … 4t + 3, which a permutation sorts.
//
// An instruction for e4m3 sums few bits (about 13 on Ada). So it starts at 0, and float32 additions sum on.
#pragma once

// 16-byte chunks permuted such that the 8 rows that ldmatrix reads at once lie in 8 groups of 4 banks: with k contiguous rows 2r,
// else rows 4·(r / 2) + r % 2. Of rows of 64 bytes the former take two turns.
template<int COLS, bool K_LAST> struct E4m3Layout {
  static constexpr int V = 16, P = Swizzle<e4m3, COLS>::P, PERIOD = 16;
  static KS_DEVICE int mask(int row) { return (K_LAST ? row >> 1 : P == 8 ? (row >> 2 & 3) * 2 + (row & 1) : row >> 2) & (P - 1); }
  static KS_DEVICE int offset(int row, int col) { return row * COLS + ((col / V) ^ mask(row)) * V + col % V; }
};

template<> struct MatrixEngine<e4m3> : Accumulators<float, InFours> {
  typedef e4m3 T;
  static constexpr bool MATRIX = true;
  static constexpr int K_STEP = 32;
  static constexpr bool ONE_LAYOUT = false;

  template<int N, int K, bool K_LAST_>
  struct Tile : PlainTile<T, K_LAST_ ? N : K, K_LAST_ ? K : N, E4m3Layout<K_LAST_ ? K : N, K_LAST_>> {
    static constexpr bool K_LAST = K_LAST_;
    typedef PlainTile<T, K_LAST_ ? N : K, K_LAST_ ? K : N, E4m3Layout<K_LAST_ ? K : N, K_LAST_>> Plain;
    KS_DEVICE explicit Tile(char* m) : Plain(m) {}
    KS_DEVICE T element(int n, int k) const { return K_LAST ? this->at(n, k) : this->at(k, n); }
    // Shared address of the chunk at (row0 + r, column): row0 and column are multiples of 16, r is less than 16.
    KS_DEVICE unsigned address(int row0, int r, int column) const {
      constexpr int SWIZZLED = (Plain::Layout::P - 1) * 16;
      const unsigned first = shared_address(&this->chunk(r, 0));
      return (first ^ (column & SWIZZLED)) + row0 * this->COLS + (column & ~SWIZZLED);
    }
  };

  // Of 16 rows (columns of B) and 32 of k: row 2g at k = 4t and on, row 2g + 1 there, both at 16 + 4t and on.
  struct Fragment { unsigned x[4]; };
  template<class From> static KS_DEVICE Fragment load(From tile, int row0, int k0) {
    const int r = lane() % 8, odd = lane() / 8 % 2, high = lane() / 16;
    Fragment f;
    if constexpr (From::K_LAST) {
      ldmatrix(f.x, tile.address(row0, 2 * r + odd, k0 + 16 * high));
    } else {
      unsigned x[4];
      ldmatrix_transposed(x, tile.address(k0 + 16 * high, 4 * (r / 2) + r % 2 + 2 * odd, row0));
#pragma unroll
      for (int h = 0; h < 2; h++) {
        f.x[2 * h] = __byte_perm(x[2 * h], x[2 * h + 1], 0x6420);
        f.x[2 * h + 1] = __byte_perm(x[2 * h], x[2 * h + 1], 0x7531);
      }
    }
    return f;
  }
  static KS_DEVICE void add(float& c0, float& c1, float& c2, float& c3, const Fragment& a, unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200  // which make float16 of e4m3 and multiply that: float32 sums
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
#else
    float d[4];
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1), "f"(0.f));
    c0 += d[0], c1 += d[1], c2 += d[2], c3 += d[3];
#endif
  }

  template<int R, int K> struct Operand { Fragment x[R / 16][K / 32]; };
  template<int R, int K, class From> static KS_DEVICE Operand<R, K> operand(From tile, int row0, int k0) {
    Operand<R, K> a;
#pragma unroll
    for (int k = 0; k < K / 32; k++)
#pragma unroll
      for (int r = 0; r < R / 16; r++) a.x[r][k] = load(tile, row0 + 16 * r, k0 + 32 * k);
    return a;
  }
  template<int R, int C, int K, class B>
  static KS_DEVICE void mma(Acc<R, C>& acc, const Operand<R, K>& a, B b, int n0, int k0) {
    static_assert(C % 16 == 0 && K % 32 == 0 && R % 16 == 0, "shape of a matrix product");
#pragma unroll
    for (int k = 0; k < K / 32; k++)
#pragma unroll
      for (int c = 0; c < C / 16; c++) {
        const Fragment f = load(b, n0 + 16 * c, k0 + 32 * k);
#pragma unroll
        for (int r = 0; r < R / 16; r++) {
          float(&left)[4] = acc.x[r][2 * c], (&right)[4] = acc.x[r][2 * c + 1];
          add(left[0], right[0], left[2], right[2], a.x[r][k], f.x[0], f.x[2]);
          add(left[1], right[1], left[3], right[3], a.x[r][k], f.x[1], f.x[3]);
        }
      }
  }
};
