// exponential(x), e^x in float or double, without a branch or a call, so that the compiler vectorizes
// loops over it, which it does not with std::exp.
//
// e^x = 2^n e^r, n = round(x / ln 2), |r| <= ln(2) / 2 (Cody and Waite 1980: ln 2 in two parts, so that
// n times the first is exact), e^r by its Taylor polynomial. Within 1.1 ulp of e^x; infinity from where
// e^x rounds to it, NaN at NaN, 0 at -infinity and wherever e^x is below 1.42 times the smallest normal
// number (x < -86.989, in double -708.050): subnormal numbers would slow rows with many such values.
#pragma once
#include <cstdint>
#include <cstring>

namespace exponential_detail {

struct Single {
  using Real = float;
  using Bits = uint32_t;
  static constexpr int mantissa = 23, degree = 7;
  static constexpr float shift = 0x1.8p23f + 127;  // added, it leaves the exponent bits of 2^n lowest
  static constexpr float least = -87.3f, most = 89;
  static constexpr float ln2 = 0.693359375f, ln2_rest = -2.12194440e-4f;
};

struct Double {
  using Real = double;
  using Bits = uint64_t;
  static constexpr int mantissa = 52, degree = 13;
  static constexpr double shift = 0x1.8p52 + 1023;
  static constexpr double least = -708.3, most = 710;
  static constexpr double ln2 = 6.93145751953125e-1, ln2_rest = 1.42860682030941723212e-6;
};

template <typename Real> constexpr Real one_over_factorial(int n) {
  double product = 1;
  for (int i = 2; i <= n; i++) product *= i;
  return Real(1 / product);
}

// 1 / I! + r / (I + 1)! + ... + r^(degree - I) / degree!
template <typename F, int I> inline typename F::Real polynomial(typename F::Real r) {
  if constexpr (I == F::degree)
    return one_over_factorial<typename F::Real>(I);
  else
    return polynomial<F, I + 1>(r) * r + one_over_factorial<typename F::Real>(I);
}

// 2^n of a whole number, from n + shift; 0 for n one below those of normal numbers.
template <typename F> inline typename F::Real power(typename F::Real shifted) {
  typename F::Bits bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits <<= F::mantissa;
  typename F::Real result;
  std::memcpy(&result, &bits, sizeof bits);
  return result;
}

// beyond ? bound : value, of which GCC 12 would make a branch around all that follows, and then not
// vectorize.
template <typename F>
inline typename F::Real bounded(typename F::Real value, typename F::Real bound, bool beyond) {
  typename F::Bits bits, other;
  std::memcpy(&bits, &value, sizeof bits);
  std::memcpy(&other, &bound, sizeof other);
  const typename F::Bits mask = -typename F::Bits(beyond);
  bits = (bits & ~mask) | (other & mask);
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

template <typename F> inline typename F::Real exponential_of(typename F::Real x) {
  using Real = typename F::Real;
  x = bounded<F>(x, F::least, x < F::least);  // a NaN passes both comparisons
  x = bounded<F>(x, F::most, x > F::most);
  const Real n = (x * Real(1.4426950408889634074) + F::shift) - F::shift;
  const Real r = (x - n * F::ln2) - n * F::ln2_rest;
  const Real e = (polynomial<F, 2>(r) * r) * r + r + Real(1);
  return e * power<F>(n + (F::shift - 1)) * 2;  // 2^n may be infinite where e^x is not
}

}  // namespace exponential_detail

inline float exponential(float x) { return exponential_detail::exponential_of<exponential_detail::Single>(x); }
inline double exponential(double x) { return exponential_detail::exponential_of<exponential_detail::Double>(x); }
