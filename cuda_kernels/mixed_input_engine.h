// Right factors that are stored as e4m3 and multiplied as T: shared memory holds them as they lie in global memory, and
// they are converted in registers.
//
// ldmatrix moves pairs of e4m3, and a lane has four neighbours of a row where it has two elements of T. So
// - a factor whose rows are k (K_LAST) is multiplied with k in another order within 16, in which the left factor is loaded too:
//   lane 4·g + t has k = 4t … 4t + 3;
//   A left factor that is stored as e4m3, too, is converted as it is loaded.
// - of a transposed factor a lane has columns 2g and 2g + 1: the even columns of 16 are one block of accumulators and the odd
//   ones the next. `map` and `to_shared` go by the true columns of such accumulators: lane 4·g + t has 4t … 4t + 3.
#pragma once

KS_DEVICE void ldmatrix_two(unsigned (&d)[2], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(d[0]), "=r"(d[1]) : "r"(address) : "memory");
}
KS_DEVICE void ldmatrix_two_transposed(unsigned (&d)[2], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(d[0]), "=r"(d[1]) : "r"(address) : "memory");
}

// Of every two blocks of 8 columns the even columns of 16 and the odd ones.
struct EvenAndOdd : AsMultiplied {
  static constexpr int STEP = 2;
  static KS_DEVICE int column(int c) { return c / 2 * 16 + 4 * lane_in_group() + c % 2; }
};

template<class T_> struct E4m3Engine {
  typedef T_ T;
  typedef MatrixEngine<T> E;
  template<int R, int C> using Acc = typename E::template Acc<R, C>;
  template<int R, int K> using Operand = typename E::template Operand<R, K>;
  static constexpr int K_STEP = 32;

  template<int N, int K, bool K_LAST_> struct Tile : PlainTile<e4m3, K_LAST_ ? N : K, K_LAST_ ? K : N> {
    typedef PlainTile<e4m3, K_LAST_ ? N : K, K_LAST_ ? K : N> Plain;
    static constexpr bool K_LAST = K_LAST_;
    KS_DEVICE explicit Tile(char* m) : Plain(m) {}
    KS_DEVICE e4m3 element(int n, int k) const { return K_LAST ? this->at(n, k) : this->at(k, n); }
    // Shared address of the chunk at (row0 + r, column); row0 and column are multiples of 16.
    KS_DEVICE unsigned address(int row0, int r, int column) const {
      constexpr int SWIZZLED = (Plain::Layout::P - 1) * 16;
      const unsigned first = shared_address(&this->chunk(r, 0));
      return (first ^ (column & SWIZZLED)) + row0 * this->COLS + (column & ~SWIZZLED);
    }
  };

  // A left factor for right factors whose rows are k.
  template<int R, int K, class From> static KS_DEVICE Operand<R, K> operand(From tile, int row0, int k0) {
    struct alignas(8) Two { unsigned lo, hi; };
    Operand<R, K> a;
#pragma unroll
    for (int k = 0; k < K / 16; k++)
#pragma unroll
      for (int r = 0; r < R / 16; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const auto* const from = &tile.at(row0 + 16 * r + 8 * h + lane_group(), k0 + 16 * k + 4 * lane_in_group());
          Two x;
          if constexpr (sizeof *from == 1) widen<T>(*(const unsigned*)from, x.lo, x.hi);
          else x = *(const Two*)from;
          a.x[r][k][h] = x.lo, a.x[r][k][2 + h] = x.hi;
        }
    return a;
  }

  template<int R, int C, int K, class B>
  static KS_DEVICE void mma(Acc<R, C>& acc, const Operand<R, K>& a, B b, int n0, int k0) {
    static_assert(C % 16 == 0 && K % 16 == 0 && R % 16 == 0, "shape of a matrix product");
    constexpr int PIECES = B::K_LAST ? K / 16 : C / 16, OTHERS = B::K_LAST ? C / 16 : K / 16;
    const int low = lane() % 16, high = lane() / 16;
#pragma unroll
    for (int other = 0; other < OTHERS; other++)
#pragma unroll
      for (int piece = 0; piece < PIECES; piece += 2) {
        const int row0 = B::K_LAST ? n0 + 16 * other : k0 + 16 * other, column0 = (B::K_LAST ? k0 : n0) + 16 * piece;
        unsigned x[4];  // two rows of 8 of each of two pieces of 16 columns
        if (piece + 1 < PIECES) {
          const unsigned from = b.address(row0, low, column0 + 16 * high);
          if constexpr (B::K_LAST) ldmatrix(x, from);
          else ldmatrix_transposed(x, from);
        } else {
          unsigned two[2];
          const unsigned from = b.address(row0, low, column0);
          if constexpr (B::K_LAST) ldmatrix_two(two, from);
          else ldmatrix_two_transposed(two, from);
          x[0] = two[0], x[1] = two[1];
        }
#pragma unroll
        for (int p = 0; p < 2 && piece + p < PIECES; p++) {
          unsigned lo[2], hi[2];
#pragma unroll
          for (int h = 0; h < 2; h++)
            widen<T>(B::K_LAST ? x[2 * p + h] : __byte_perm(x[2 * p + h], 0, 0x3120), lo[h], hi[h]);
          const int k = B::K_LAST ? piece + p : other, c = B::K_LAST ? other : piece + p;
#pragma unroll
          for (int r = 0; r < R / 16; r++) {
            Mma<T>::run(acc.x[r][2 * c], a.x[r][k], lo[0], B::K_LAST ? hi[0] : lo[1]);
            Mma<T>::run(acc.x[r][2 * c + 1], a.x[r][k], B::K_LAST ? lo[1] : hi[0], hi[1]);
          }
        }
      }
  }

  // Accumulators of a product with a factor that is not K_LAST.
  template<int R, int C, class F> static KS_DEVICE void map(Acc<R, C>& a, F f) {
    Accumulators<float, EvenAndOdd>::map(a, f);
  }
  template<class Out, int R, int C>
  static KS_DEVICE void to_shared(Out out, const Acc<R, C>& a, int row0 = 0, int column0 = 0) {
    typedef typename Out::T To;
    struct alignas(4 * sizeof(To)) Four { To x[4]; };
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int c = 0; c < C / 8; c += 2)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float(&even)[4] = a.x[r][c], (&odd)[4] = a.x[r][c + 1];
          *(Four*)&out.at(row0 + EvenAndOdd::row(r, h), column0 + EvenAndOdd::column(c)) = {
              convert<To>(even[2 * h]), convert<To>(odd[2 * h]), convert<To>(even[2 * h + 1]), convert<To>(odd[2 * h + 1])};
        }
  }
};
