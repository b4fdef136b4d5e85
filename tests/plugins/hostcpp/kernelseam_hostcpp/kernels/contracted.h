// float as the most zealous compiler has it that contracts products and sums: what a sum takes of the product made last
// is not rounded, whatever else takes that product too. hiprtc does so by default, across statements, and where both
// operands are the product (y = a·b, then y − y). Compilers for CPUs fuse only what nothing else needs, so that their
// options do not show what goes wrong there; and not every CPU has the instruction.
//
// Each thread remembers its last product, and a sum knows it by its bits. double is left as it is, and no float
// becomes one without a cast.
#pragma once
#include <string.h>
#include <type_traits>
#include <utility>  // for entry.h: no system header may come after the macro below

namespace host {

struct Product {
  Plain a, b, rounded;
};
static thread_local Product last_product;
static inline bool is_last_product(Plain x) { return !memcmp(&x, &last_product.rounded, sizeof x); }

struct Contracted {
  Plain x;
  Contracted() = default;
  template<class A, class = std::enable_if_t<std::is_arithmetic_v<A>>> constexpr Contracted(A a) : x((Plain)a) {}
  template<class A, class = std::enable_if_t<std::is_arithmetic_v<A>>> explicit operator A() const { return (A)x; }

  friend Contracted operator*(Contracted a, Contracted b) {
    last_product = {a.x, b.x, a.x * b.x};
    return last_product.rounded;
  }
  friend Contracted operator+(Contracted a, Contracted b) {
    const Product y = last_product;
    if (is_last_product(a.x)) return __builtin_fmaf(y.a, y.b, b.x);
    if (is_last_product(b.x)) return __builtin_fmaf(y.a, y.b, a.x);
    return a.x + b.x;
  }
  friend Contracted operator-(Contracted a, Contracted b) {
    const Product y = last_product;
    if (is_last_product(a.x)) return __builtin_fmaf(y.a, y.b, -b.x);
    if (is_last_product(b.x)) return __builtin_fmaf(-y.a, y.b, a.x);
    return a.x - b.x;
  }
  friend Contracted operator/(Contracted a, Contracted b) { return a.x / b.x; }
  friend constexpr Contracted operator-(Contracted a) { return -a.x; }
  friend Contracted& operator+=(Contracted& a, Contracted b) { return a = a + b; }
  friend Contracted& operator-=(Contracted& a, Contracted b) { return a = a - b; }
  friend Contracted& operator*=(Contracted& a, Contracted b) { return a = a * b; }
  friend Contracted& operator/=(Contracted& a, Contracted b) { return a = a / b; }
  friend constexpr bool operator==(Contracted a, Contracted b) { return a.x == b.x; }
  friend constexpr bool operator!=(Contracted a, Contracted b) { return a.x != b.x; }
  friend constexpr bool operator<(Contracted a, Contracted b) { return a.x < b.x; }
  friend constexpr bool operator>(Contracted a, Contracted b) { return a.x > b.x; }
  friend constexpr bool operator<=(Contracted a, Contracted b) { return a.x <= b.x; }
  friend constexpr bool operator>=(Contracted a, Contracted b) { return a.x >= b.x; }
};
static_assert(sizeof(Contracted) == 4 && std::is_trivially_copyable_v<Contracted>, "it lies in memory as a float does");

}  // namespace host

#define float host::Contracted
