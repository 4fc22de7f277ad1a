// What the RMS norms share on the CPU.
#pragma once
#include <cmath>

#include "rows.h"

// weight[i] + offset for all i, in memory of this thread; 1 without a weight.
template <typename A, typename W> static const A* factors(const W* weight, double offset, int64_t cols) {
  A* factor = scratch<A, 2>(cols);
  for (int64_t i = 0; i < cols; i++) factor[i] = weight ? A(weight[i]) + A(offset) : A(1);
  return factor;
}

template <typename A> static A scale_of(const A* v, double eps, int64_t cols) {
  const A squares = sum<A>(cols, [=](int64_t i, auto n) {
    const auto x = load<A>(v + i, n);
    return x * x;
  });
  return 1 / std::sqrt(squares / A(cols) + A(eps));
}

// Write v[i] * scale * factor[i] in units of the result, the least with which the row fits Q. A NaN makes it NaN.
template <typename Q, typename A> static float quantized(Q* out, A* v, const A* factor, A scale, int64_t cols) {
  constexpr bool is_integer = std::is_integral_v<Q>;
  constexpr float most = is_integer ? 127 : 448;
  float top = 0, nan = 0;
#pragma omp simd reduction(max : top) reduction(+ : nan)
  for (int64_t i = 0; i < cols; i++) {
    v[i] = v[i] * scale * factor[i];
    const float size = std::fabs(float(v[i]));
    top = size > top ? size : top;
    nan += size * 0;
  }
  if (nan != 0 || top != top) top = NAN;
  const float unit = (top + nan) / most, per_unit = top > 0 ? most / top : 0;
#pragma omp simd
  for (int64_t i = 0; i < cols; i++) {
    const A q = v[i] * per_unit;
    v[i] = q > most ? most : q < -most ? -most : q;
  }
  if constexpr (is_integer)
    for (int64_t i = 0; i < cols; i++) out[i] = Q(std::nearbyint(v[i]));
  else
    for (int64_t i = 0; i < cols; i++) out[i] = Q(float(v[i]));
  return unit;
}
