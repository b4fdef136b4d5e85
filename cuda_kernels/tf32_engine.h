// float32 multiplied in TF32 (8 bits of exponent, 10 behind the point): mma.sync m16n8k8, k slabs of 16. The units read these bits of
// a float and leave the other 13 aside.
//
// Instructions count: 8 of k of a 16×8 block are one for the tensor cores, and cvt.rna.tf32 alone is four others. What a split takes
// here is three, and the units' own cutting off is the rest.
#pragma once

KS_DEVICE void multiply_tf32(float& c0, float& c1, float& c2, float& c3, const unsigned (&a)[2][4], const unsigned (&b)[4]) {
#pragma unroll
  for (int s = 0; s < 4; s += 2)
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
        : "r"(a[0][s]), "r"(a[1][s]), "r"(a[0][s + 1]), "r"(a[1][s + 1]), "r"(b[s]), "r"(b[s + 1]));
}

// What a fragment's elements become, PARTS words of each.
template<class Parts> struct Tf32Fragments {
  struct Left {
    unsigned x[Parts::PARTS][2][4];
    KS_DEVICE void set(const float (&from)[2][4]) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        unsigned y[Parts::PARTS];
        Parts::of(y, from[i / 4][i % 4]);
#pragma unroll
        for (int p = 0; p < Parts::PARTS; p++) x[p][i / 4][i % 4] = y[p];
      }
    }
  };
  struct Right {
    unsigned x[Parts::PARTS][4];
    KS_DEVICE explicit Right(const float (&from)[4]) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        unsigned y[Parts::PARTS];
        Parts::of(y, from[i]);
#pragma unroll
        for (int p = 0; p < Parts::PARTS; p++) x[p][i] = y[p];
      }
    }
  };
};

// Cutting off what is larger by a third to two thirds of TF32's last bit rounds to nearest, but for a sixth of that bit. What TF32 has
// stays as it is, and so do infinities and NaN, which adding half of the bit to the word would not leave.
KS_DEVICE float raised(float x) { return x * (1.f + 2.f / 3 / 2048); }

struct Rounded {
  static constexpr int PARTS = 1;
  static KS_DEVICE void of(unsigned (&parts)[1], float x) { parts[0] = __float_as_uint(raised(x)); }
};
// The rounded, and what is left: 13 bits, of which the units cut off two.
struct Split {
  static constexpr int PARTS = 2;
  static KS_DEVICE void of(unsigned (&parts)[2], float x) {
    parts[0] = __float_as_uint(raised(x)) & 0xffffe000u;
    parts[1] = __float_as_uint(x - __uint_as_float(parts[0]));
  }
};

struct RoundedProduct : Tf32Fragments<Rounded> {
  static constexpr int K_STEP = 64, SUMS = 1;
  template<int R, int C> static constexpr int UNROLL = 4;
  static KS_DEVICE void add(float& c0, float& c1, float& c2, float& c3, const Left& a, const Right& b, int) {
    multiply_tf32(c0, c1, c2, c3, a.x[0], b.x[0]);
  }
};

// Three products (3xTF32), all but that of the small parts, which is 2⁻²² of x·y at most. Tensor cores cut sums off where float32 rounds
// them, which drifts over many additions: what is multiplied at once is summed from 0, small products apart from large ones, and
// added to the accumulators by ordinary additions.
struct SplitProduct : Tf32Fragments<Split> {
  static constexpr int K_STEP = 64, SUMS = 2;
  template<int R, int C> static constexpr int UNROLL = C >= 64 ? 2 : 1;  // of slabs
  static KS_DEVICE void add(float& c0, float& c1, float& c2, float& c3, const Left& a, const Right& b, int sum) {
    if (sum == 0) {
      multiply_tf32(c0, c1, c2, c3, a.x[0], b.x[0]);
    } else {
      multiply_tf32(c0, c1, c2, c3, a.x[1], b.x[0]);
      multiply_tf32(c0, c1, c2, c3, a.x[0], b.x[1]);
    }
  }

  // Columns whose two sums take 64 registers; 32 where the accumulators alone take 128.
  template<int R, int C> static constexpr int piece() {
    int columns = min_of(C, max_of((R * C > 2048 ? 512 : 1024) / R, 16));
    while (C % columns) columns -= 16;
    return columns;
  }
  template<class E, int R, int C, class Left, class B>
  static KS_DEVICE void mma(AccumulatorFragment<float, R, C>& acc, const Left& a, B b, int n0, int k0) {
    constexpr int PIECE = piece<R, C>();
#pragma unroll
    for (int c0 = 0; c0 < C; c0 += PIECE) {
      AccumulatorFragment<float, R, PIECE> sums[2];
      E::zero(sums[0]), E::zero(sums[1]);
      E::template add_products<SplitProduct>(sums, a, b, n0 + c0, k0);
      // Of an infinity nothing is left but NaN, and so is infinity · 0: then the large parts alone are right.
      E::map2(sums[0], sums[1], [](int, int, float x, float y) { return x + y == x + y ? x + y : x; });
#pragma unroll
      for (int i = 0; i < R / 16 * (PIECE / 8) * 4; i++) {
        const int r = i / 4 / (PIECE / 8), c = i / 4 % (PIECE / 8), e = i % 4;
        acc.x[r][c0 / 8 + c][e] += sums[0].x[r][c][e];
      }
    }
  }
};

template<int PRODUCTS> struct Tf32ProductOf { typedef RoundedProduct type; };
template<> struct Tf32ProductOf<3> { typedef SplitProduct type; };
template<int PRODUCTS> using Tf32Engine = WideEngine<float, typename Tf32ProductOf<PRODUCTS>::type>;
