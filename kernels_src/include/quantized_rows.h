// Numbers of 8 bits in units of the largest of their row, on the CPU: int8, or float8_e4m3fn.
#pragma once
#include <limits>

#include "rows.h"

// Write v in units of the result, the least with which the row fits Q. A NaN makes it NaN. v is changed.
template <typename Q, typename A> static float quantized(Q* out, A* v, int64_t cols) {
  constexpr bool is_integer = std::is_integral_v<Q>;
  constexpr float most = is_integer ? 127 : 448, least = std::numeric_limits<float>::min();  // a unit whose reciprocal is finite
  float top = 0, nan = 0;
#pragma omp simd reduction(max : top) reduction(+ : nan)
  for (int64_t i = 0; i < cols; i++) {
    const float size = light::fabs(float(v[i]));
    top = size > top ? size : top;
    nan += size * 0;
  }
  if (nan != 0 || top != top) top = std::numeric_limits<float>::quiet_NaN();
  const float unit = top > 0 ? light::max(top / most, least) : top, per_unit = top > 0 ? light::min(most / top, 1 / least) : 0;
#pragma omp simd
  for (int64_t i = 0; i < cols; i++) {
    const A q = v[i] * per_unit;
    v[i] = q > most ? most : q < -most ? -most : q;
  }
  if constexpr (is_integer)
    for (int64_t i = 0; i < cols; i++) out[i] = Q(light::nearbyint(v[i]));
  else
    for (int64_t i = 0; i < cols; i++) out[i] = Q(float(v[i]));
  return unit;
}
