// Sums of products that begin with their row's reference, negated: what comes out is the score's distance from it, and 2^(c·x)
// needs no subtraction. The maxima of rows are joined over lanes only where some score exceeds its row's reference by more
// than REFERENCE_RISE in base 2, in few tiles: all that follows from a new reference stands behind that one branch.
#pragma once
#include "attention/scores.h"

// Whether the platform's sums may begin so at no cost (tile/README.md).
template<class> using Exists = void;
template<class E, class = void> struct Starts { static constexpr bool value = false; };
template<class E> struct Starts<E, Exists<typename E::template Start<16>>> { static constexpr bool value = true; };

// Without references: sums begin with 0.
template<class E, int R, bool STARTED> struct RowStart {
  template<class Row> KS_DEVICE RowStart(Row&, float, float) {}
  template<class Acc, class... Any> KS_DEVICE void begin(Acc& s, const Any&...) const { E::zero(s); }
  template<class... Any> KS_DEVICE void finish(Any&&...) const {}
  template<class... Any> KS_DEVICE void raise(Any&&...) const {}
};

// m, the rows' references in units of a score, is 0 until a row has seen a key; c > 0 makes them base 2. Where `factor`, a
// score's to its product, is not positive, sums begin with 0, too.
template<class E, int R> struct RowStart<E, R, true> {
  typedef typename E::template Row<R> Row;
  typename E::template Start<R> start;
  Row limit;  // the distance beyond which a reference is raised: −∞ until a row has seen a key
  const float factor, c;

  KS_DEVICE RowStart(Row& m, float factor, float c) : factor(factor), c(c) {
    E::fill(m, 0.f);
    E::fill(limit, -infinity());
    start = from(m);
  }
  // `masked` tiles, which are few, leave registers to what masks take: there the same start is made anew.
  template<class Acc> KS_DEVICE void begin(Acc& s, const Row& m, bool masked) const {
    E::begin(s, masked ? from(m) : start);
  }
  template<class Acc> KS_DEVICE void finish(Acc& s, const Row& m) const {
    if (!(factor > 0)) E::row_apply(s, m, [=](float x, float y) { return (factor < 0 ? -x : factor * x) - y; });
  }

  // s, distances from references, become those from references that no score exceeds too far; o and l follow.
  template<class S, class O> KS_DEVICE void raise(S& s, Row& m, Row& l, O& o) {
    Row top, rise, fade;
    E::row_max_partial(top, s);
    if (!E::any_above(top, limit)) return;
    E::row_max_finish(top);
    E::zip(rise, top, limit, [](float x, float y) { return x > y ? x : 0.f; });
    E::zip(fade, rise, limit, [=](float x, float y) { return y == -infinity() ? 0.f : exp2_fast(-x * c); });
    E::zip(limit, top, limit, [=](float x, float y) { return x > y ? REFERENCE_RISE / c : y; });
    E::zip(m, m, rise, [](float x, float y) { return x + y; });
    E::row_apply(s, rise, [](float x, float y) { return x - y; });
    E::zip(l, l, fade, [](float x, float y) { return x * y; });
    E::row_apply(o, fade, [](float x, float y) { return x * y; });
    start = from(m);
  }

 private:
  KS_DEVICE typename E::template Start<R> from(const Row& m) const {
    Row negated;
    E::zip(negated, m, m, [=](float x, float) { return factor > 0 ? -x : 0.f; });
    return E::start(negated);
  }
};
