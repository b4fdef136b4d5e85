// Masking and score modification: the Score policy of every attention kernel, and the one of the built-in options.
//
// A Score policy is a structure of one sequence's (and head's) numbers with
//   KIND                what a score may be to its product, which the softmax must know (ScoreKind)
//   any(i0, i1)         the range of keys outside which none of the queries i0 … i1 sees any
//   all(i0, i1)         a range of keys within which each of them sees all that a mask_mod leaves; `end` ≤ `begin` where there is none
//   visible(h, i, j)    whether query i of head h sees key j; false from the last key on
//   apply(x, h, i, j)   the score in base 2 of a product q·k
//   slope(x, h, i, j)   where HAS_SLOPE, its derivative over scale·log2 e; else that is 1
// BANDED: what a query sees is all of any(i, i), and all(i, i) says so.
//
// With the distance d = j − i − (S_k − S_q), key j is visible to query i iff j < S_k, the mask allows it, and
//   j < prefix  or  −left ≤ d ≤ right     (causal: right = 0).
// Scores in base 2:  x = log2 e · (cap·tanh(scale·q·k / cap) − slope·|d| + bias), each part where its option is on. The user's
// score_mod and mask_mod, struct Expression (expressions/lowering.py has its functions), change that score, and hide keys more.
#pragma once
#include "generated/config.h"
#include "tile/tile.h"
#include "generated/expression.h"

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f, LARGEST = 3.4028234663852886e38f;
// What an attention's rows are measured against moves once a score exceeds it by more than this, in base 2.
constexpr float REFERENCE_RISE = 4;
template<class A, class B> struct Same { static constexpr bool value = false; };
template<class A> struct Same<A, A> { static constexpr bool value = true; };
constexpr bool HAS_BIAS = !Same<Config::BIAS, void>::value;
// Whether a query may not see a key of its own sequence.
constexpr bool HAS_MASK = Config::CAUSAL || Config::WINDOW || Config::MASK || Expression::HAS_MASK;

// MULTIPLE: a multiple of the product, by the same factor for a whole tile: the factor is left to the exponential, and maxima are
// products'. CAPPED: softcap's, which keeps the products' order and is bounded. ANY: what apply() makes of it.
enum class ScoreKind { MULTIPLE, CAPPED, ANY };

// [batch, head, query, key] in memory; any strides.
template<class T> struct Plane {
  const T* base;
  i64 head;
  int row, column;
  KS_DEVICE const T& at(int h, int i, int j) const { return base[h * head + (i64)i * row + (i64)j * column]; }
};

// The place of i where it is one of n, else of the last: what is read there is not used.
KS_DEVICE int inside(int i, int n) { return max_of(min_of(i, n - 1), 0); }

// x from −most to most; NaN stays.
KS_DEVICE float within(float x, float most) { return x < -most ? -most : x > most ? most : x; }
// log2 e · x of a bias or a sink, finite where x is: a row of them all still has a mean. Written out: by `within` gfx1100's loop of a
// bias has more instructions.
KS_DEVICE float in_base2(float x) {
  const float y = LOG2_E * x;
  return finite(x) ? (y < -LARGEST ? -LARGEST : y > LARGEST ? LARGEST : y) : y;
}
// The same of a slope, so small that its products with distances are finite.
KS_DEVICE float slope_in_base2(float x) { return within(LOG2_E * x, LARGEST / 2147483648.f); }

// A range [begin, end) of keys.
struct KeyRange { int begin, end; };

// The user's functions over the heads of an entry, from first_head on.
struct UserFunctions {
  Expression own;
  int batch, first_head, q_len, kv_len;

  KS_DEVICE Expression::Tile of_head(int h) const { return own.tile(batch, first_head + h, q_len, kv_len); }
  KS_DEVICE float score(float x, int h, int i, int j) const {
    const auto at = of_head(h);
    return own.score(x, at, own.row(at, i), own.column(at, j));
  }
  KS_DEVICE float slope(float x, int h, int i, int j) const {
    const auto at = of_head(h);
    return own.slope(x, at, own.row(at, i), own.column(at, j));
  }
  KS_DEVICE bool visible(int h, int i, int j) const {
    const auto at = of_head(h);
    return own.visible(at, own.row(at, i), own.column(at, j));
  }
};

struct Scores {
  static constexpr ScoreKind KIND = Config::ALIBI || HAS_BIAS || Expression::HAS_SCORE ? ScoreKind::ANY
                                    : Config::SOFTCAP                                  ? ScoreKind::CAPPED
                                                                                       : ScoreKind::MULTIPLE;
  static constexpr bool BANDED = !(Config::PREFIX && Config::WINDOW) && !Config::MASK && !Expression::HAS_MASK;
  static constexpr bool HAS_SLOPE = Config::SOFTCAP || Expression::HAS_SCORE;
  int S_q, S_k, left, right, prefix;
  float scale_log2, cap, cap_inverse;  // cap in base 2, and scale over the cap
  Plane<typename conditional<HAS_BIAS, Config::BIAS, float>::type> bias;
  Plane<unsigned char> mask;
  const float* slopes;
  i64 slopes_head;
  UserFunctions user;

  KS_DEVICE int shift() const { return S_k - S_q; }

  // The first key of query i's band, and the one after its last; in [0, S_k]. Without the prefix.
  KS_DEVICE int band_begin(int i) const {
    if (!Config::WINDOW) return 0;
    return min_of(max_of(i + shift() - left, 0), S_k);
  }
  KS_DEVICE int band_end(int i) const {
    if (!Config::CAUSAL && !Config::WINDOW) return S_k;
    return min_of(max_of(i + shift() + 1 + (Config::WINDOW ? right : 0), 0), S_k);
  }
  KS_DEVICE KeyRange any(int i0, int i1) const {
    return {Config::PREFIX && prefix > 0 ? 0 : band_begin(i0), Config::PREFIX ? max_of(band_end(i1), prefix) : band_end(i1)};
  }
  KS_DEVICE KeyRange all(int i0, int i1) const {
    const KeyRange band = all_of_band(i0, i1);
    return {band.begin, Config::MASK ? 0 : band.end};
  }
  // The same without masks.
  KS_DEVICE KeyRange all_of_band(int i0, int i1) const {
    const int begin = Config::PREFIX && prefix > 0 ? 0 : band_begin(i1);
    const int end = Config::PREFIX && prefix > 0 ? (Config::WINDOW ? prefix : max_of(band_end(i0), prefix)) : band_end(i0);
    return {begin, end};
  }

  KS_DEVICE bool visible(int h, int i, int j) const {
    const int d = j - i - shift();
    bool seen = !Config::CAUSAL || d <= 0;
    if (Config::WINDOW) seen = d >= -left && d <= right;
    if (Config::PREFIX) seen = seen || j < prefix;
    seen = seen && j < S_k;
    if (Config::MASK) seen = mask.at(h, inside(i, S_q), inside(j, S_k)) && seen;
    if (Expression::HAS_MASK) seen = user.visible(h, i, j) && seen;
    return seen;
  }

  KS_DEVICE float apply(float x, int h, int i, int j) const {
    x = built_in(x, h, i, j);
    return Expression::HAS_SCORE ? in_base2(user.score(LN_2 * x, h, i, j)) : x;
  }
  // Without the user's score_mod.
  KS_DEVICE float built_in(float x, int h, int i, int j) const {
    if (Config::SOFTCAP) x = cap * tanh_fast(x * cap_inverse);
    else x *= scale_log2;
    if (Config::ALIBI) {
      const int d = j - i - shift();
      x -= slope_in_base2(slopes[h * slopes_head]) * (float)(d < 0 ? -d : d);
    }
    if constexpr (HAS_BIAS) x += in_base2(to_sum(bias.at(h, inside(i, S_q), inside(j, S_k))));
    return x;
  }
  KS_DEVICE float slope(float x, int h, int i, int j) const {
    const float t = Config::SOFTCAP ? tanh_fast(x * cap_inverse) : 0.f, slope = 1.f - t * t;
    return Expression::HAS_SCORE ? slope * user.slope(LN_2 * built_in(x, h, i, j), h, i, j) : slope;
  }
};

// Whether shared kernels compute scores in base 2; else they leave the factor to the exponential.
constexpr bool IN_BASE2 = Scores::KIND != ScoreKind::MULTIPLE || Config::SINKS;

// ---- by what a kernel computes scores from products: an argument of its body. Of an option that is off nothing is read.

// A bias or a mask over [batch, head, query, key]; any strides.
template<class T> struct Planes {
  const T* base;
  i64 batch, head, row, column;
  KS_DEVICE Plane<T> from(int b, int h) const { return {base + b * batch + h * head, head, (int)row, (int)column}; }
  // One head's, where `base` is its entry's.
  KS_DEVICE Plane<T> of(int h) const { return {base + h * head, 0, (int)row, (int)column}; }
};

// ALiBi's, over [batch, head].
struct Slopes {
  const float* base;
  i64 batch, head;
};

// What the user's functions capture, if they do: a base, which takes no room where it is empty.
template<bool CAPTURES> struct UserArguments { KS_DEVICE Expression captured() const { return {}; } };
template<> struct UserArguments<true> {
  Expression expression;
  KS_DEVICE Expression captured() const { return expression; }
};

struct ScoreArguments : UserArguments<Config::CAPTURES> {
  Planes<typename conditional<HAS_BIAS, Config::BIAS, float>::type> bias;
  Planes<unsigned char> mask;
  Slopes slopes;
  const int* prefixes;
  int left, right;
  float scale_log2, cap, cap_inverse;

  // Those of an entry of the batch, without its bias, mask and slopes.
  KS_DEVICE Scores of(int batch, int S_q, int S_k) const {
    const int prefix = Config::PREFIX ? min_of(max_of(prefixes[batch], 0), S_k) : 0;
    Scores s{S_q, S_k, left, right, prefix, scale_log2, cap, cap_inverse};
    s.user = {captured(), batch, 0, S_q, S_k};
    return s;
  }
  // Those of its heads, counted from first_head on.
  KS_DEVICE Scores of(int batch, int first_head, int S_q, int S_k) const {
    Scores s = of(batch, S_q, S_k);
    s.user.first_head = first_head;
    if constexpr (HAS_BIAS) s.bias = bias.from(batch, first_head);
    if (Config::MASK) s.mask = mask.from(batch, first_head);
    if (Config::ALIBI) s.slopes = slopes.base + batch * slopes.batch + first_head * slopes.head, s.slopes_head = slopes.head;
    return s;
  }
};
