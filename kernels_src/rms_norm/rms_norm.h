// What the RMS norms share on the CPU.
#pragma once
#include "quantized_rows.h"

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
  return 1 / light::sqrt(squares / A(cols) + A(eps));
}

// As in quantized_rows.h, of v[i] * scale * factor[i].
template <typename Q, typename A> static float quantized(Q* out, A* v, const A* factor, A scale, int64_t cols) {
#pragma omp simd
  for (int64_t i = 0; i < cols; i++) v[i] = v[i] * scale * factor[i];
  return quantized(out, v, cols);
}
