// float32 multiplied in TF32 (8 bits of exponent, 10 behind the point), which AMD calls XF32: gfx942 has instructions of 8 values of k.
// How they round what they are given is not documented: factors are rounded before, to what stays as it is either way.
#pragma once

template<> struct Instruction<float> {
  typedef float Two __attribute__((ext_vector_type(2)));
  static KS_DEVICE Sums run(HalfFragment outer, HalfFragment row, Sums c) {
    return __builtin_amdgcn_mfma_f32_16x16x8_xf32(__builtin_bit_cast(Two, outer), __builtin_bit_cast(Two, row), c, 0, 0, 0);
  }
};

// Cutting off what is larger by a third to two thirds of TF32's last bit rounds to nearest, but for a sixth of that bit; infinities and
// NaN stay what they are.
KS_DEVICE unsigned tf32_of(unsigned x) {
  return __builtin_bit_cast(unsigned, __builtin_bit_cast(float, x) * (1.f + 2.f / 3 / 2048)) & 0xffffe000u;
}
KS_DEVICE unsigned rest_of(unsigned x, unsigned large) {
  return __builtin_bit_cast(unsigned, __builtin_bit_cast(float, x) - __builtin_bit_cast(float, large));
}
template<class F> KS_DEVICE F rounded(F x) {
#pragma unroll
  for (int i = 0; i < (int)sizeof(F) / 4; i++) x[i] = tf32_of(x[i]);
  return x;
}

// PRODUCTS 3: all but that of what rounding leaves of both factors, which is 2⁻²² of x·y at most.
template<int PRODUCTS> struct Tf32Product {
  template<class F> static KS_DEVICE Sums add(F outer, F row, Sums c) {
    const F x = rounded(outer), y = rounded(row);
    if constexpr (PRODUCTS == 1) return multiply<float>(x, y, c);
    F x_rest, y_rest;
#pragma unroll
    for (int i = 0; i < (int)sizeof(F) / 4; i++) x_rest[i] = rest_of(outer[i], x[i]), y_rest[i] = rest_of(row[i], y[i]);
    const Sums zero = 0.f, large = multiply<float>(x, y, zero);
    const Sums small = multiply<float>(x_rest, y, multiply<float>(x, y_rest, zero));
#pragma unroll
    for (int e = 0; e < BLOCK_SUMS; e++) {  // of an infinity nothing is left but NaN, and so is infinity · 0: then the large parts are right
      const float sum = large[e] + small[e];
      c[e] += sum == sum ? sum : large[e];
    }
    return c;
  }
};
template<int PRODUCTS> using Tf32Engine = MatrixEngine<float, Tf32Product<PRODUCTS>>;
