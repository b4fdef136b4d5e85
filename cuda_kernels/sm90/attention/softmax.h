// The softmax of a warpgroup's 64 rows of scores, guarded by its sums.
//
// An online softmax takes the maximum of every block of keys, because 2^(x − m) could overflow without it. Any m serves that is
// near enough: the sums and the products with V are to the same reference, which cancels in the end. So m is taken from the
// first block and from masked ones, and kept: for a block x,  p = 2^(x − m),  l += Σp,  o += p·v, without maximum, shuffle or
// rescaling. What could go wrong shows in a thread's own sum of the block, which bounds its p: where one is not below LIMIT
// (NaN included), its warp goes back, takes a new reference and scales o, l and p down to it (rebase).
//
// A thread has two rows, lane/4 and lane/4 + 8 of its warp's 16: element i of an accumulator is in row i/2 % 2. Four
// neighbouring lanes share a row. m is in base 2, of scores that were multiplied with c.
#pragma once
#include "attention/scores.h"
#include "sm90/wgmma.h"

// p ≤ 2^15 is finite in float16, and a sum over keys of p·v in float32 wherever |v| < 2^113/S_k.
constexpr float LIMIT = 32768.f;
// Up to here a block is scaled down by its own sums: the factor, their inverse, is not lost among subnormals.
constexpr float LARGEST_SUM = 1e30f;

KS_DEVICE float quad_max(float x) {
  x = fmaxf(x, shuffle_xor(x, 1));
  return fmaxf(x, shuffle_xor(x, 2));
}
KS_DEVICE float quad_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

// tanh by exponentials, without a branch: its error is a few roundings of 1.
KS_DEVICE float tanh_large(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(exp2_fast(2.88539008f * x) + 1.f));
  return fmaf(-2.f, inverse, 1.f);
}
// Scores in base 2 of products, in place, where that is more than a factor: a softcap. Of small arguments tanh is a polynomial;
// where a warp's part of a block has only such, as nearly always, it makes no exponential.
template<int N> KS_DEVICE void cap_scores(float (&s)[N], float cap, float cap_inverse) {
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < N; i++) s[i] *= cap_inverse, most = fmaxf(most, fabsf(s[i]));
  if (__all_sync(~0u, most < 0.6f)) {
#pragma unroll
    for (int i = 0; i < N; i++) s[i] = cap * tanh_small(s[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) s[i] = cap * (fabsf(s[i]) < 0.6f ? tanh_small(s[i]) : tanh_large(s[i]));
  }
}

// What no row may see: keys before low and from high on, counted from the thread's first column.
template<int N> KS_DEVICE void hide(float (&s)[N], const int (&low)[2], const int (&high)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int key = i / 4 * 8 + i % 2, r = i / 2 % 2;
    if (key >= high[r] || (KS_WINDOW && key < low[r])) s[i] = -infinity();
  }
}

template<int N> KS_DEVICE void row_tops(const float (&s)[N], float (&top)[2]) {
  float t[4] = {-infinity(), -infinity(), -infinity(), -infinity()};
#pragma unroll
  for (int i = 0; i < N; i++) t[i % 4] = fmaxf(t[i % 4], s[i]);
  top[0] = quad_max(fmaxf(t[0], t[1]));
  top[1] = quad_max(fmaxf(t[2], t[3]));
}

// The reference of a row after a block whose largest product is top; fade: what earlier sums are multiplied with. It stays
// where it would grow by less than 2^8: a p above 1 harms nobody.
template<bool FIRST> KS_DEVICE void raise(float& m, float& fade, float top, float c) {
  const float x = top * c;
  if (FIRST) {
    m = x, fade = 1.f;
    return;
  }
  const float now = fmaxf(m, x), by = m - (now == -infinity() ? 0.f : now);
  const bool stays = by >= -8.f;
  fade = stays ? 1.f : exp2_fast(by);
  m = stays ? m : now;
}

// p of elements FROM … TO − 1 in place, and their sums. MASKED: a row may have seen nothing yet.
template<int FROM, int TO, bool MASKED, int N>
KS_DEVICE void exponentials(float (&s)[N], const float (&m)[2], float (&sum)[2], float c) {
  float base[2], t[4];
#pragma unroll
  for (int r = 0; r < 2; r++) base[r] = MASKED && m[r] == -infinity() ? 0.f : m[r];
#pragma unroll
  for (int i = FROM; i < TO; i++) {
    s[i] = exp2_fast(fmaf(s[i], c, -base[i / 2 % 2]));
    t[i % 4] = i < FROM + 4 ? s[i] : t[i % 4] + s[i];
  }
  sum[0] = t[0] + t[1];
  sum[1] = t[2] + t[3];
}

template<int N> KS_DEVICE void scale_rows(float (&x)[N], const float (&by)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) x[i] *= by[i / 2 % 2];
}
// The same, where a row of the warp needs it.
template<int N> KS_DEVICE void rescale(float (&o)[N], const float (&fade)[2]) {
  if (__any_sync(~0u, fade[0] != 1.f || fade[1] != 1.f)) scale_rows(o, fade);
}

// ---- the rare way

// A block whose sums passed LIMIT and are finite: all of it over the largest of a row's four sums as a mean. That is no more
// than the row's largest p, so that nothing is lost that an online softmax keeps, and every p becomes at most N/2.
template<int N, int M>
KS_DEVICE void rebase_by_sums(float (&p)[N], float (&o)[M], float (&m)[2], float (&l)[2], float (&sum)[2]) {
  float fade[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float most = quad_max(sum[r]) * (2.f / N), to = most > 1.f ? m[r] + log2_fast(most) : m[r];
    fade[r] = exp2_fast(m[r] - to);
    m[r] = to;
    sum[r] *= fade[r], l[r] *= fade[r];
  }
  scale_rows(p, fade);
  scale_rows(o, fade);
}

// A block with a sum that says nothing, from its scores: an online step.
template<int N, int M>
KS_DEVICE void rebase_by_tops(float (&s)[N], float (&o)[M], float (&m)[2], float (&l)[2], float (&sum)[2], float c) {
  float top[2], fade[2];
  row_tops(s, top);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float now = fmaxf(m[r], top[r] * c);
    fade[r] = exp2_fast(m[r] - (now == -infinity() ? 0.f : now));
    m[r] = now;
    l[r] *= fade[r];
  }
  exponentials<0, N, true>(s, m, sum, c);
  scale_rows(o, fade);
}

// The scores of a warp's 16 rows and BN keys once more, from global memory: by mma.sync, whose accumulators lie as wgmma's.
// a, a8: the thread's first elements of its two rows; b: of the key lane/4, b_step elements before the one 8 keys on.
template<class T, int DEPTH, int N>
KS_DEVICE void products_again(float (&s)[N], const T* a, const T* a8, const T* b, i64 b_step) {
#pragma unroll
  for (int i = 0; i < N; i++) s[i] = 0.f;
#pragma unroll 1
  for (int d = 0; d < DEPTH; d += 16) {
    const u32 x[4] = {*(const volatile u32*)(a + d), *(const volatile u32*)(a8 + d), *(const volatile u32*)(a + d + 8),
                      *(const volatile u32*)(a8 + d + 8)};
    const T* at = b + d;
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
      u32 y[2];
      // By hand, so that no addresses of all keys are made ahead and kept in registers.
      asm volatile("ld.global.b32 %0, [%2];\nld.global.b32 %1, [%2+16];" : "=r"(y[0]), "=r"(y[1]) : "l"(at) : "memory");
      asm volatile("add.s64 %0, %0, %1;" : "+l"(at) : "l"(b_step * (i64)sizeof(T)));
      Mma<T>::run(*(float (*)[4])&s[4 * n], x, y[0], y[1]);
    }
  }
}
