// exponential(x), e^x of a float, a double or a vector of them, without a branch or a call, so that the
// compiler vectorizes loops over it, which it does not with std::exp.
//
// e^x = 2^n e^r, n = round(x / ln 2), |r| <= ln(2) / 2 (Cody and Waite 1980: ln 2 in two parts, so that
// n times the first is exact), e^r by its Taylor polynomial. Within 1.1 ulp of e^x; infinity from where
// e^x rounds to it, NaN at NaN, 0 at -infinity and wherever e^x is below 1.42 times the smallest normal
// number (x < -86.989, in double -708.050): subnormal numbers would slow rows with many such values.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "vectors.h"

namespace exponential_detail {

struct Single {
  using Real = float;
  static constexpr int mantissa = 23, degree = 7;
  static constexpr float shift = 0x1.8p23f + 126;  // added, it leaves the exponent bits of 2^(n - 1) lowest
  static constexpr float least = -87.3f, most = 89;
  static constexpr float ln2 = 0.693359375f, ln2_rest = -2.12194440e-4f;
};

struct Double {
  using Real = double;
  static constexpr int mantissa = 52, degree = 13;
  static constexpr double shift = 0x1.8p52 + 1022;
  static constexpr double least = -708.3, most = 710;
  static constexpr double ln2 = 6.93145751953125e-1, ln2_rest = 1.42860682030941723212e-6;
};

template <typename Real> constexpr Real one_over_factorial(int n) {
  double product = 1;
  for (int i = 2; i <= n; i++) product *= i;
  return Real(1 / product);
}

// Below, Real is the type of F or a vector of it, and Bits are unsigned integers in its place.

// 1 / I! + r / (I + 1)! + ... + r^(degree - I) / degree!
template <typename F, int I, typename Real> inline Real polynomial(Real r) {
  constexpr auto first = one_over_factorial<typename F::Real>(I);
  if constexpr (I == F::degree)
    return Real{} + first;
  else
    return polynomial<F, I + 1>(r) * r + first;
}

// 2^(n - 1) of a whole number, from n + shift; 0 for n one below those of normal numbers.
template <typename F, typename Bits, typename Real> inline Real power(Real shifted) {
  Bits bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits <<= F::mantissa;
  std::memcpy(&shifted, &bits, sizeof bits);
  return shifted;
}

// beyond ? bound : value, of which GCC 12 would make a branch around all that follows, and then not
// vectorize.
template <typename Bits, typename Real, typename Beyond> inline Real bounded(Real value, Real bound, Beyond beyond) {
  Bits bits, other;
  std::memcpy(&bits, &value, sizeof bits);
  std::memcpy(&other, &bound, sizeof other);
  const Bits mask = -Bits(beyond);
  bits = (bits & ~mask) | (other & mask);
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

template <typename F, typename Bits, typename Real> inline Real exponential_of(Real x) {
  using Number = typename F::Real;
  if constexpr (std::is_same_v<Real, Number>) {
    x = bounded<Bits>(x, F::least, x < F::least);  // a NaN passes both comparisons
    x = bounded<Bits>(x, F::most, x > F::most);
  } else {
    x = larger(Real{} + F::least, x);
    x = -larger(Real{} - F::most, -x);
  }
  const Real shifted = x * Number(1.4426950408889634074) + F::shift, n = shifted - F::shift;
  const Real e = polynomial<F, 0>((x - n * F::ln2) - n * F::ln2_rest) * power<F, Bits>(shifted);
  return e + e;  // 2^n may be infinite where e^x is not
}

}  // namespace exponential_detail

inline float exponential(float x) {
  using namespace exponential_detail;
  return exponential_of<Single, uint32_t>(x);
}
inline double exponential(double x) {
  using namespace exponential_detail;
  return exponential_of<Double, uint64_t>(x);
}
inline Vector<float> exponential(Vector<float> x) {
  using namespace exponential_detail;
  return exponential_of<Single, Integers<uint32_t, float>>(x);
}
inline Vector<double> exponential(Vector<double> x) {
  using namespace exponential_detail;
  return exponential_of<Double, Integers<uint64_t, double>>(x);
}
