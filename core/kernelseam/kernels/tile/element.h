// Functions of one element: the words of generated expressions (expressions/lowering.py) and of epilogues. Accurate forms of the
// platform's own mathematics, not the approximations of the softmax.
#pragma once
#include "tile/base.h"

KS_DEVICE float quiet_nan() { return infinity() - infinity(); }

KS_DEVICE float element_exp(float x) { return expf(x); }
KS_DEVICE float element_exp2(float x) { return exp2f(x); }
KS_DEVICE float element_log(float x) { return logf(x); }
KS_DEVICE float element_log2(float x) { return log2f(x); }
KS_DEVICE float element_log1p(float x) { return log1pf(x); }
KS_DEVICE float element_sqrt(float x) { return sqrtf(x); }
KS_DEVICE float element_rsqrt(float x) { return rsqrtf(x); }
// As tanh_fast, without a branch, which elements of a warp would part at.
KS_DEVICE float element_tanh(float x) {
  const float size = maximum(x, -x), y = fmaf(-2.f, reciprocal_fast(exp2_fast(2.88539008f * size) + 1.f), 1.f);
  return size < 0.6f ? tanh_small(x) : x < 0 ? -y : y;
}
KS_DEVICE float element_sin(float x) { return sinf(x); }
KS_DEVICE float element_cos(float x) { return cosf(x); }
// x·P(x²)/Q(x²), a minimax fit, and ±1 from where on its errors may pass 1: within 9·2^-24 of the value where the reciprocal is
// within 2^-23, 7·2^-24 where it is rounded. Without a branch.
KS_DEVICE float element_erf(float x) {
  const float t = x * x;
  const float p = fmaf(fmaf(fmaf(fmaf(fmaf(2.050108378e-6f, t, 2.848822332e-4f), t, 3.765559057e-3f), t, 5.274854600e-2f), t,
                            1.904050112e-1f), t, 1.128379107f);
  const float q = fmaf(fmaf(fmaf(fmaf(fmaf(3.809190821e-5f, t, 1.162523055e-3f), t, 1.496909931e-2f), t, 1.141085178e-1f), t,
                            5.020747781e-1f), t, 1.f);
  const float y = x * p * reciprocal_fast(q);
  return x > 3.59f ? 1.f : x < -3.59f ? -1.f : y;
}
// Φ(−|x|) as 2^P(|x|), P a minimax fit of its logarithm: within 5·2^-24, and where x is negative no difference of nearly equal numbers, within
// a 2000th of it to |x| = 6, from where on P's last term makes it 0. One instruction of the special units.
KS_DEVICE float element_ndtr(float x) {
  const float t = fabsf(x);
  const float p = fmaf(fmaf(fmaf(fmaf(fmaf(fmaf(fmaf(fmaf(-9.935184835e-7f, t, 1.730784243e-5f), t, -8.361518849e-5f), t, -3.737970837e-4f), t,
                                           7.352479734e-3f), t, -5.267884210e-2f), t, -4.591540992e-1f), t, -1.151111126f), t, -1.f);
  const float behind = exp2_fast(p);
  return x > 0.f ? 1.f - behind : behind;
}
KS_DEVICE float element_pow(float x, float y) { return powf(x, y); }
KS_DEVICE float element_floor(float x) { return floorf(x); }
// exp's rounded exponent is off by |x|·2^-24 at most, which moves a sigmoid by less than a rounding of 1.
KS_DEVICE float element_sigmoid(float x) { return reciprocal_fast(1.f + exp2_fast(-1.44269504f * x)); }
KS_DEVICE float element_softcap(float x, float cap) { return cap * element_tanh(x * (1.f / cap)); }

template<class T> KS_DEVICE T element_abs(T x) { return x < 0 ? -x : x; }
KS_DEVICE float element_abs(float x) { return fabsf(x); }
template<class T> KS_DEVICE T element_sign(T x) { return x > 0 ? T(1) : x < 0 ? T(-1) : x; }
// NaN stays, as NumPy's and torch's.
template<class T> KS_DEVICE T element_min(T x, T y) { return x < y || x != x ? x : y; }
template<class T> KS_DEVICE T element_max(T x, T y) { return x > y || x != x ? x : y; }

// Of integers as Python's: towards −∞, and with the divisor's sign; by 0 they are 0.
template<class T> KS_DEVICE T floor_divide(T x, T y) {
  const T q = y ? x / y : 0;
  return q - (y && x % y != 0 && (x < 0) != (y < 0));
}
template<class T> KS_DEVICE T floor_modulo(T x, T y) {
  const T r = y ? x % y : 0;
  return r != 0 && (r < 0) != (y < 0) ? r + y : r;
}
// Of floats by the exact remainder, as x / y may round up to the next whole number; by ±infinity as NumPy's and torch's.
KS_DEVICE float floor_modulo(float x, float y) {
  const float r = fmodf(x, y);
  return r != 0 && (r < 0) != (y < 0) ? r + y : r;
}
KS_DEVICE float floor_divide(float x, float y) {
  const float r = fmodf(x, y), q = y == 0 ? x / y : (x - r) / y - (r != 0 && (r < 0) != (y < 0)), whole = floorf(q);
  return q - whole > 0.5f ? whole + 1 : whole;
}

// Towards 0; NaN is 0, and what is too large the largest.
KS_DEVICE int to_int(float x) {
  return x != x ? 0 : x >= 2147483648.f ? 2147483647 : x < -2147483648.f ? -2147483647 - 1 : (int)x;
}
KS_DEVICE i64 to_int64(float x) {
  constexpr i64 most = 9223372036854775807ll;
  return x != x ? 0 : x >= 9223372036854775808.f ? most : x < -9223372036854775808.f ? -most - 1 : (i64)x;
}
// An element of a captured array as an expression's number.
template<class R, class T> struct Loaded { static KS_DEVICE R from(T x) { return (R)x; } };
template<> struct Loaded<float, f16> { static KS_DEVICE float from(f16 x) { return to_sum(x); } };
template<> struct Loaded<float, bf16> { static KS_DEVICE float from(bf16 x) { return to_sum(x); } };

// An index within an array: what is out of it, a product that overflowed among it, is moved to its last element; negative ones count from
// the end.
KS_DEVICE i64 inside_of(int i, int n) {
  const unsigned last = n - 1;
  return (unsigned)i < last ? (unsigned)i : last;
}
KS_DEVICE i64 inside_of(i64 i, int n) {
  const unsigned long long last = n - 1;
  return (unsigned long long)i < last ? i : n - 1;
}
template<class I> KS_DEVICE i64 wrapped(I i, int n) {
  const i64 j = i < 0 ? (i64)i + n : i;
  return j < 0 ? 0 : inside_of(j, n);
}

// Ends that hold for every element.
template<class R> struct Ends { static KS_DEVICE R of(bool least) { return least ? -infinity() : infinity(); } };
template<> struct Ends<bool> { static KS_DEVICE bool of(bool least) { return !least; } };
template<> struct Ends<i64> { static KS_DEVICE i64 of(bool least) { return least ? -(1ll << 62) : 1ll << 62; } };

// Of x and y the least (or the most); NaN stays.
template<bool LEAST, class R> KS_DEVICE R extreme(R x, R y) { return (LEAST ? y < x : y > x) || y != y ? y : x; }
// x of the lane whose number differs by m.
KS_DEVICE int swapped(int x, int m) { return shuffle_xor(x, m); }
KS_DEVICE i64 swapped(i64 x, int m) { return (i64)(unsigned)shuffle_xor((int)x, m) | (i64)shuffle_xor((int)(x >> 32), m) << 32; }
KS_DEVICE float swapped(float x, int m) { return shuffle_xor(x, m); }
KS_DEVICE bool swapped(bool x, int m) { return shuffle_xor((int)x, m) != 0; }

// The least and the most of the elements from a first index to a last one; NaN stays. Nothing is known of a long range, and one that begins
// before 0 and ends behind it counts as the whole array. Of LANES lanes with the same range each reads every LANES-th element, AT_ONCE before
// it compares them.
template<class R> struct Extrema { R least, most; };
// What elements are compared as.
template<class T, class R> struct Compared { typedef R type; };
template<class R> struct Compared<int, R> { typedef int type; };
constexpr int LONGEST_RANGE = 1024;
template<class R, int LANES, class T> KS_DEVICE Extrema<R> extrema(const T* base, i64 stride, int extent, i64 first, i64 last) {
  typedef typename Compared<T, R>::type V;
  constexpr int AT_ONCE = LANES > 4 ? 4 : LANES > 1 ? 16 : 1;
  const bool crosses = first < 0 && last >= 0;
  const int from = crosses ? 0 : (int)wrapped(first, extent), upto = crosses ? extent - 1 : (int)wrapped(last, extent);
  const bool unknown = last - first > LONGEST_RANGE || upto - from > LONGEST_RANGE;
  if (LANES == 1 && unknown) return {Ends<R>::of(true), Ends<R>::of(false)};
  const int to = unknown ? from : upto;
  const int own = min_of(from + (LANES > 1 ? lane() % LANES : 0), to);
  const T* at = base + own * stride;
  V least = Loaded<V, T>::from(*at), most = least;
#pragma unroll 1
  for (int i = own + LANES; i <= to; i += AT_ONCE * LANES) {
    V x[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      at += LANES * stride;
      x[j] = least;
      if (i + j * LANES <= to) x[j] = Loaded<V, T>::from(*at);
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) least = extreme<true>(least, x[j]), most = extreme<false>(most, x[j]);
  }
#pragma unroll
  for (int m = 1; m < LANES; m *= 2) least = extreme<true>(least, swapped(least, m)), most = extreme<false>(most, swapped(most, m));
  if (unknown) return {Ends<R>::of(true), Ends<R>::of(false)};  // not before: lanes with short ranges wait for all
  return {least, most};
}

// Of block lists (expressions/blocks.py), x with strides and extents of each axis: whether a plane has a bit in the block rows
// r0 … r1 and columns c0 … c1, or (EVERY) has all of them.
template<bool EVERY, class X> KS_DEVICE bool block_bits(const X& x, int plane, int b, int h, int r0, int r1, int c0, int c1) {
  const int* const base = x.base + inside_of(b, x.extent_0) * x.stride_0 + inside_of(h, x.extent_1) * x.stride_1 + plane * x.stride_4;
#pragma unroll 1
  for (int r = r0; r <= inside_of(r1, x.extent_2); r++)
#pragma unroll 1
    for (int w = c0 / 32; w <= inside_of(c1 / 32, x.extent_3); w++) {
      const int first = max_of(c0 - 32 * w, 0), last = min_of(c1 - 32 * w, 31);
      const unsigned bits = ~0u >> (31 - last + first) << first, found = (unsigned)base[r * x.stride_2 + w * x.stride_3] & bits;
      if (EVERY ? found != bits : found != 0) return !EVERY;
    }
  return EVERY;
}
