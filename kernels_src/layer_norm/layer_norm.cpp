// out[r, i] = (x[r, i] - mean[r]) * scale[r] * weight[i] + bias[i], scale[r] = 1 / sqrt(variance[r] + eps). The
// variance is that of the differences from the mean. Weight and bias may be null: 1, and 0.
#include <cmath>

#include "rows.h"

// v[i] = (v[i] - mean) * scale; returns scale. What rounding left of the mean is found in a second pass.
template <typename A> static A normalize(A* v, double eps, int64_t cols) {
  const A mean = sum<A>(cols, [=](int64_t i) { return v[i]; }) / A(cols);
#pragma omp simd
  for (int64_t i = 0; i < cols; i++) v[i] -= mean;
  const A rest = sum<A>(cols, [=](int64_t i) { return v[i]; }) / A(cols);
  const A squares = sum<A>(cols, [=](int64_t i) { return (v[i] - rest) * (v[i] - rest); });
  const A scale = 1 / std::sqrt(squares / A(cols) + A(eps));
#pragma omp simd
  for (int64_t i = 0; i < cols; i++) v[i] = (v[i] - rest) * scale;
  return scale;
}

// What all rows share, widened, in memory of this thread; `missing` where there is none.
template <int slot, typename A, typename W> static const A* shared(const W* from, A missing, int64_t cols) {
  A* to = scratch<A, slot>(cols);
  if (from)
    widen(to, from, cols);
  else
    std::fill(to, to + cols, missing);
  return to;
}

template <typename T, typename W>
void layer_norm(T* out, const T* x, const W* weight, const W* bias, double eps, int64_t rows, int64_t cols) {
  using A = accumulator<T>;
  const A *w = shared<2, A>(weight, 1, cols), *b = shared<3, A>(bias, 0, cols);
  for_rows(rows, cols, [=](int64_t r) {
    A* v = scratch<A>(cols);
    widen(v, x + r * cols, cols);
    normalize(v, eps, cols);
#pragma omp simd
    for (int64_t i = 0; i < cols; i++) v[i] = v[i] * w[i] + b[i];
    narrow(out + r * cols, v, cols);
  });
}

// With n = (x - mean) * scale and g = grad * weight:
//   dx = scale * (g - mean(g) - n * mean(g * n)), dweight = sum over rows of grad * n, dbias = that of grad
// dx, dweight and dbias may be null.
template <typename T, typename W>
void layer_norm_backward(T* dx, W* dweight, W* dbias, const T* grad, const T* x, const W* weight, double eps,
                         int64_t rows, int64_t cols) {
  using A = accumulator<T>;
  const A* w = shared<2, A>(weight, 1, cols);
  const auto row = [=](int64_t r, A* sums) {
    A *v = scratch<A>(cols), *g = scratch<A, 1>(cols);
    widen(v, x + r * cols, cols);
    widen(g, grad + r * cols, cols);
    const A scale = normalize(v, eps, cols);
    if (sums) {
      A* of_bias = sums + cols;
#pragma omp simd
      for (int64_t i = 0; i < cols; i++) sums[i] += g[i] * v[i], of_bias[i] += g[i];
    }
    if (!dx) return;
#pragma omp simd
    for (int64_t i = 0; i < cols; i++) g[i] *= w[i];
    const A mean = sum<A>(cols, [=](int64_t i) { return g[i]; }) / A(cols);
    const A dot = sum<A>(cols, [=](int64_t i) { return g[i] * v[i]; }) / A(cols);
#pragma omp simd
    for (int64_t i = 0; i < cols; i++) g[i] = scale * (g[i] - mean - v[i] * dot);
    narrow(dx + r * cols, g, cols);
  };
  if (!dweight && !dbias) return for_rows(rows, cols, [=](int64_t r) { row(r, nullptr); });
  const auto sums = sums_over_rows<A>(rows, cols, 2 * cols, row);
  if (dweight) narrow(dweight, sums.get(), cols);
  if (dbias) narrow(dbias, sums.get() + cols, cols);
}
