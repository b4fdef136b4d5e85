// The softmax of a warpgroup's 64 rows of scores, guarded by its sums.
//
// An online softmax takes the maximum of every block of keys, because 2^(x − m) could overflow without it. Any reference m near
// the maximum serves: it cancels in o / l. So m is updated at the first block and at masked ones only: for a block x,
// p = 2^(x − m),  l += Σp,  o += p·v, without maximum, shuffle or rescaling. Overflow shows in a thread's own sum of the block,
// which bounds its p: where one is not below LIMIT (NaN included), its warp takes a new reference and rescales o, l and p to it
// (rebase).
//
// A thread has two rows, lane/4 and lane/4 + 8 of its warp's 16: element i of an accumulator is in row i/2 % 2. Four
// neighbouring lanes share a row. m is in base 2, of scores that were multiplied with c.
#pragma once
#include "attention/scores.h"
#include "sm90/wgmma.h"

// p ≤ 2^15 is finite in float16, and a sum over keys of p·v in float32 wherever |v| < 2^113/S_k.
constexpr float LIMIT = 32768.f;
// e4m3's largest number, to which larger ones are rounded.
constexpr float LARGEST_E4M3 = 448.f;
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

// The two numbers of 16 bits in x, as pack2 puts them.
KS_DEVICE float unpacked_low(u32 x, bf16) { return __uint_as_float(x << 16); }
KS_DEVICE float unpacked_high(u32 x, bf16) { return __uint_as_float(x & 0xffff0000u); }
KS_DEVICE float unpacked_low(u32 x, f16) { return to_sum(f16{(unsigned short)x}); }
KS_DEVICE float unpacked_high(u32 x, f16) { return to_sum(f16{(unsigned short)(x >> 16)}); }
// tanh by exponentials, without a branch: its error is a few roundings of 1.
KS_DEVICE float tanh_large(float x) { return fmaf(-2.f, reciprocal_fast(exp2_fast(2.88539008f * x) + 1.f), 1.f); }
// change(part, done) of PART elements after the other, in place: what a kernel has several times, and would unrolled be a thousand
// instructions and a tenth of a second to compile. So a part is done in each turn of a loop, and as registers have no index, all elements
// move down by a part in each turn, those that are done to the end: after the last they are in their places.
template<int PART, int N, class Change> KS_DEVICE void in_turns(float (&s)[N], Change change) {
  static_assert(N % PART == 0, "whole parts");
#pragma unroll 1
  for (int done = 0; done < N; done += PART) {
    float part[PART];
#pragma unroll
    for (int i = 0; i < PART; i++) part[i] = s[i];
    change(part, done);
#pragma unroll
    for (int i = 0; i < N - PART; i++) s[i] = s[i + PART];
#pragma unroll
    for (int i = 0; i < PART; i++) s[N - PART + i] = part[i];
  }
}

// Softcap: scores in base 2 from products, in place.
template<int N> KS_DEVICE void cap_scores(float (&s)[N], float cap, float cap_inverse) {
  in_turns<16>(s, [=](float (&part)[16], int) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const float x = part[i] * cap_inverse;
      part[i] = cap * (fabsf(x) < 0.6f ? tanh_small(x) : tanh_large(x));
    }
  });
}

// cap·tanh of products x = q·k: x·(c0 + u·(c1 + …)), u = x², the scale within the coefficients. The short polynomial serves where
// |x| < least, the other where |x| < limit.
struct SmallCap { float least, d0, d1, d2, limit, c0, c1, c2, c3, c4; };
enum SoftcapMode { SHORT, LONG, APPLIED };

// Which polynomial serves all of a warp's products; APPLIED: they were too large, as they seldom are, and are scores in base 2 now.
// Sums of the squares of eight are above each of them, and take half the time of maxima.
template<int N> KS_DEVICE SoftcapMode cap_large(float (&s)[N], float cap, float cap_inverse, const SmallCap& small) {
  constexpr int SUMS = N / 8;
  float sums[SUMS];
#pragma unroll
  for (int i = 0; i < N; i++) sums[i % SUMS] = i < SUMS ? s[i] * s[i] : fmaf(s[i], s[i], sums[i % SUMS]);
  auto below = [&](float limit) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < SUMS; i++) all = all && sums[i] < limit * limit;  // false for NaN
    return __all_sync(~0u, all);
  };
  if (below(small.least)) return SHORT;
  if (below(small.limit)) return LONG;
  cap_scores(s, cap, cap_inverse);
  return APPLIED;
}
// What the exponent of a score x in base 2, −∞ included, is above the reference m, of a thread's element i: by a factor, also beside a
// slope over the keys, or by a polynomial.
struct Scaled {
  float c;
  KS_DEVICE float operator()(float x, float m, int) const { return fmaf(x, c, -m); }
};
struct Sloped {
  float c, slope[2];
  KS_DEVICE float operator()(float x, float m, int i) const { return fmaf(x, c, fmaf(slope[i / 2 % 2], (float)(i / 4 * 8 + i % 2), -m)); }
};
template<bool LONGER> struct Capped {
  const SmallCap& c;
  KS_DEVICE float operator()(float x, float m, int = 0) const {
    const float u = x * x;
    if (!LONGER) return fmaf(x, fmaf(fmaf(c.d2, u, c.d1), u, c.d0), -m);
    return fmaf(x, fmaf(fmaf(fmaf(fmaf(c.c4, u, c.c3), u, c.c2), u, c.c1), u, c.c0), -m);
  }
};

// Sets masked scores to −inf: keys before low and from high on, counted from the thread's first column.
template<int N> KS_DEVICE void mask_columns(float (&s)[N], const int (&low)[2], const int (&high)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int key = i / 4 * 8 + i % 2, r = i / 2 % 2;
    if (key >= high[r] || (Config::WINDOW && key < low[r])) s[i] = -infinity();
  }
}

template<int N> KS_DEVICE void row_max(const float (&s)[N], float (&row_maximum)[2]) {
  float t[4] = {-infinity(), -infinity(), -infinity(), -infinity()};
#pragma unroll
  for (int i = 0; i < N; i++) t[i % 4] = fmaxf(t[i % 4], s[i]);
  row_maximum[0] = quad_max(fmaxf(t[0], t[1]));
  row_maximum[1] = quad_max(fmaxf(t[2], t[3]));
}

// Updates the reference m of a row from a block's maximum q·k, top, to HEADROOM below it: p up to 2^HEADROOM. correction: the factor
// for earlier sums. m is kept where it would grow by less than RISE, so that p may exceed that.
template<bool FIRST, int HEADROOM = 0, int RISE = 8>
KS_DEVICE void update_reference(float& m, float& correction, float top, float c) {
  const float x = HEADROOM ? fmaf(top, c, (float)-HEADROOM) : top * c;
  if (FIRST) {
    m = x, correction = 1.f;
    return;
  }
  const float now = fmaxf(m, x), by = m - (now == -infinity() ? 0.f : now);
  const bool stays = by >= (float)-RISE;
  correction = stays ? 1.f : exp2_fast(by);
  m = stays ? m : now;
}

// p of elements FROM … TO − 1 in place, and their sums. MASKED: a row may have had no visible key yet. above(x, m, i): an exponent.
// Returns whether sums of a quarter of them each are below LARGEST_E4M3, which then bounds p.
template<int FROM, int TO, bool MASKED, int N, class Above>
KS_DEVICE bool exp2_and_sum(float (&s)[N], const float (&m)[2], float (&sum)[2], Above above) {
  float base[2], t[4];
#pragma unroll
  for (int r = 0; r < 2; r++) base[r] = MASKED && m[r] == -infinity() ? 0.f : m[r];
#pragma unroll
  for (int i = FROM; i < TO; i++) {
    s[i] = exp2_fast(above(s[i], base[i / 2 % 2], i));
    t[i % 4] = i < FROM + 4 ? s[i] : t[i % 4] + s[i];
  }
  sum[0] = t[0] + t[1];
  sum[1] = t[2] + t[3];
  return t[0] < LARGEST_E4M3 && t[1] < LARGEST_E4M3 && t[2] < LARGEST_E4M3 && t[3] < LARGEST_E4M3;
}

template<int N> KS_DEVICE void scale_rows(float (&x)[N], const float (&by)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) x[i] *= by[i / 2 % 2];
}
// The same, skipped where no row of the warp needs it.
template<int N> KS_DEVICE void rescale(float (&o)[N], const float (&correction)[2]) {
  if (__any_sync(~0u, correction[0] != 1.f || correction[1] != 1.f)) scale_rows(o, correction);
}

// ---- P as a factor of P·V: the A fragments of its steps along the keys

template<int N, int M, class T> KS_DEVICE void round_weights(u32 (&p)[M], const float (&s)[N], T) {
  static_assert(2 * M == N, "16 bits");
#pragma unroll
  for (int i = 0; i < M; i++) p[i] = pack2(s[2 * i], s[2 * i + 1], T());
}
#if KS_E4M3
// The keys of 4 bytes are 2t, 2t + 1, 8 + 2t, 9 + 2t of 16: as a lane has them, and as value_transpose.h orders V's.
template<int N, int M> KS_DEVICE void round_weights(u32 (&p)[M], const float (&s)[N], e4m3) {
  static_assert(4 * M == N, "8 bits");
#pragma unroll
  for (int i = 0; i < M; i++) {
    const float* const x = s + i / 2 * 8 + i % 2 * 2;
    p[i] = pack4(x[0], x[1], x[4], x[5]);
  }
}
#endif

// ---- rebasing (rare)

// A block whose sums exceeded LIMIT and are finite: divides by the mean p of the lane with the largest sum of a row, and by 2^LEAD.
// The mean is no more than the row's largest p, so the reference is at most LEAD above its largest score, and every p becomes at
// most N/2. Where scores rise from block to block, a lead makes this rarer.
template<int LEAD, int N, int M>
KS_DEVICE void rebase_by_sums(float (&p)[N], float (&o)[M], float (&m)[2], float (&l)[2], float (&sum)[2]) {
  float correction[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float most = quad_max(sum[r]) * (2.f / N), to = most > 1.f ? m[r] + (log2_fast(most) + LEAD) : m[r];
    correction[r] = exp2_fast(m[r] - to);
    m[r] = to;
    sum[r] *= correction[r], l[r] *= correction[r];
  }
  scale_rows(p, correction);
  scale_rows(o, correction);
}

// A block whose sums are too large or not finite: an online-softmax step from its scores.
template<int HEADROOM, int N, int M>
KS_DEVICE void rebase_by_max(float (&s)[N], float (&o)[M], float (&m)[2], float (&l)[2], float (&sum)[2], float (&correction)[2],
                             float c) {
  float row_maximum[2];
  row_max(s, row_maximum);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float now = fmaxf(m[r], HEADROOM ? fmaf(row_maximum[r], c, (float)-HEADROOM) : row_maximum[r] * c);
    correction[r] = exp2_fast(m[r] - (now == -infinity() ? 0.f : now));
    m[r] = now;
    l[r] *= correction[r];
  }
  exp2_and_sum<0, N, true>(s, m, sum, Scaled{c});
  scale_rows(o, correction);
}

// A block of which a p exceeds what its type holds, all p being finite: references move so that a row's largest is 2^HEADROOM.
template<int HEADROOM, int N, int M>
KS_DEVICE void rebase_by_largest(float (&p)[N], float (&o)[M], float (&m)[2], float (&l)[2], float (&sum)[2], float (&correction)[2]) {
  float most[2];
  row_max(p, most);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float by = most[r] > (float)(1 << HEADROOM) ? log2_fast(most[r]) - HEADROOM : 0.f;
    correction[r] = exp2_fast(-by);
    m[r] += by, sum[r] *= correction[r], l[r] *= correction[r];
  }
  scale_rows(p, correction);
  scale_rows(o, correction);
}

#if KS_E4M3
template<> struct Mma<e4m3> {
  static KS_DEVICE void run(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};
#endif

// 16 bytes of global memory where N is 4, 8 where it is 2; zeros where `there` is false. By hand, so that the compiler does not compute
// all addresses ahead and keep them in registers.
template<int N, bool ALWAYS, class T> KS_DEVICE void load_words(u32 (&y)[N], const T* at, bool there) {
  static_assert(N == 2 || N == 4);
  if constexpr (ALWAYS && N == 2)
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(y[0]), "=r"(y[1]) : "l"(at));
  else if constexpr (ALWAYS)
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3]) : "l"(at));
  else if constexpr (N == 2)
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n@p ld.global.v2.b32 {%0, %1}, [%2];\n}"
                 : "=&r"(y[0]), "=&r"(y[1]) : "l"(at), "r"((int)there));
  else
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
                 "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
                 : "=&r"(y[0]), "=&r"(y[1]), "=&r"(y[2]), "=&r"(y[3]) : "l"(at), "r"((int)there));
}

// Recomputes the scores of a warp's 16 rows and BN keys from global memory, by mma.sync, whose accumulator layout is wgmma's.
// PRODUCTS: of 32 bytes of depth, a step. A lane's 8 · PRODUCTS neighbouring bytes are its columns of them: any order of
// the depth gives the same sums. DEPTH, a multiple of 8: what the last step has beyond it counts as zeros, and is not read: another
// head's elements follow. a, a8: the first elements of the lane's two rows; b: of the key lane/4, a walk that goes on by 8 keys at each
// step (keys.h); all of the lane's columns, `column` on.
template<class T, int DEPTH, int PRODUCTS, int N, class Walk>
KS_DEVICE void recompute_scores(float (&s)[N], const T* a, const T* a8, const Walk& b, int column) {
  constexpr int LANE = 8 / sizeof(T), PRODUCT = 4 * LANE, STEP = PRODUCT * PRODUCTS;  // elements
  constexpr bool WHOLE = DEPTH % STEP == 0;
  static_assert(DEPTH % (LANE * PRODUCTS) == 0, "a lane's elements are all there, or none is");
#pragma unroll
  for (int i = 0; i < N; i++) s[i] = 0.f;
#pragma unroll 1
  for (int d = 0; d < DEPTH; d += STEP) {
    const bool there = WHOLE || d + column < DEPTH;
    uint2 row[PRODUCTS], row8[PRODUCTS];
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++) {
      row[i] = row8[i] = uint2{0, 0};
      if (there) row[i] = *(const uint2*)(a + d + LANE * i), row8[i] = *(const uint2*)(a8 + d + LANE * i);
    }
    Walk keys = b.from(d);
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
      u32 y[2 * PRODUCTS];
      load_words<2 * PRODUCTS, WHOLE>(y, keys.at(n), there);
      keys.next();
#pragma unroll
      for (int i = 0; i < PRODUCTS; i++) {
        const u32 x[4] = {row[i].x, row8[i].x, row[i].y, row8[i].y};
        Mma<T>::run(*(float (*)[4])&s[4 * n], x, y[2 * i], y[2 * i + 1]);
      }
    }
  }
}
