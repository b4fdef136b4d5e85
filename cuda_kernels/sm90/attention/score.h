// The loop's Score policy: how a block's products q·k become weights, and which keys a query sees. `scores` (attention/scores.h) says both
// of a single product; this is what a warpgroup does with a block of them, as its KIND allows:
//
//   MULTIPLE  products stay: their factor is left to the exponential, and largest scores are those of products.
//   CAPPED    softcap's tanh is a polynomial within the exponent where all of a warp's products are small; else it is applied first.
//   ANY       has no form here yet: begin() would apply it in place, and each block would take its largest scores.
//
// A thread has two rows of a block (softmax.h). The loop asks
//   factor(scale)                     what a tile's products are multiplied by, `scale` being that of numbers of 8 bits
//   begin(s, f)                       products to what the others take, in place; which form that is
//   hide(s, x, y, from)               scores of keys that the queries x and y of the rows do not see become −∞; `from`: the first column's key
//   largest(s, top, form)             the rows' largest scores, of which f.c is a multiple in base 2
//   exponentials(s, m, sum, form, c)  weights in place of a part of the scores, above references m, and their sums
//   apply(s, f)                       rare: of products that were made again, scores in units of f.c
#pragma once
#include "sm90/attention/softmax.h"

static_assert(Scores::BANDED && Scores::KIND != ScoreKind::ANY, "hide() takes a range of keys a row, and begin() a multiple or a cap");

template<int BN> struct TileScore {
  static constexpr bool CAPPED = Scores::KIND == ScoreKind::CAPPED;
  Scores scores;
  const SmallCap& small_cap;

  // What is applied in place, where it is no factor above 0, and what is left to the exponential.
  struct Factor { float here, c; };
  KS_DEVICE Factor factor(float own) const {
    const float scale = CAPPED ? 1.f : scores.scale_log2;
    if constexpr (!Config::Q_SCALES) return {1.f, scale};
    const float c = fabsf(own) * scale;
    if (CAPPED) return {own, 1.f};
    if (c > 0.f) return {own < 0.f ? -1.f : 1.f, c};
    return {own * 0.f, 1.f};
  }
  static KS_DEVICE void multiply(float (&s)[BN / 2], const Factor& f) {
    if (Config::Q_SCALES && f.here != 1.f) {
#pragma unroll
      for (int i = 0; i < BN / 2; i++) s[i] *= f.here;
    }
  }

  KS_DEVICE SoftcapMode begin(float (&s)[BN / 2], const Factor& f) const {
    multiply(s, f);
    return CAPPED ? cap_large(s, scores.cap, scores.cap_inverse, small_cap) : APPLIED;
  }
  KS_DEVICE void hide(float (&s)[BN / 2], const Scores& own, int x, int y, int from) const {
    const KeyRange first = own.any(x, x), second = own.any(y, y);
    const int low[2] = {first.begin - from, second.begin - from};
    const int high[2] = {first.end - from, second.end - from};
    mask_columns(s, low, high);
  }
  // A softcap that is not yet applied to products keeps their order.
  KS_DEVICE void largest(const float (&s)[BN / 2], float (&top)[2], SoftcapMode mode) const {
    row_max(s, top);
#pragma unroll
    for (int r = 0; r < 2; r++)
      if (CAPPED && mode != APPLIED && top[r] != -infinity()) top[r] = Capped<true>{small_cap}(top[r], 0.f);
  }
  // The short polynomial serves unmasked blocks alone: elsewhere it would be code, a tenth of a kernel's, for few blocks.
  template<int FROM, int TO, bool MASKED>
  KS_DEVICE bool exponentials(float (&s)[BN / 2], const float (&m)[2], float (&sum)[2], SoftcapMode mode, float c) const {
    if (CAPPED && mode == SHORT && !MASKED) return exp2_and_sum<FROM, TO, MASKED>(s, m, sum, Capped<false>{small_cap});
    if (CAPPED && mode != APPLIED) return exp2_and_sum<FROM, TO, MASKED>(s, m, sum, Capped<true>{small_cap});
    return exp2_and_sum<FROM, TO, MASKED>(s, m, sum, Scaled{c});
  }
  KS_DEVICE void apply(float (&s)[BN / 2], const Factor& f) const {
    multiply(s, f);
    if (CAPPED) cap_scores(s, scores.cap, scores.cap_inverse);
  }
};
