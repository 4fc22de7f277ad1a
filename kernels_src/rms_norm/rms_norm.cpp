// out[r, i] = x[r, i] * scale[r] * factor[i], where scale[r] = 1 / sqrt(mean_i x[r, i]^2 + eps) and
// factor[i] = weight[i] + offset.
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
  return 1 / light::sqrt(squares / A(cols) + A(eps));
}

template <typename T, typename W>
void rms_norm(T* out, const T* x, const W* weight, double eps, double offset, int64_t rows,
              int64_t cols) {
  using A = accumulator<T>;
  const A* factor = factors<A>(weight, offset, cols);
  for_rows(rows, cols, [=](int64_t r) {
    A* v = scratch<A>(cols);
    widen(v, x + r * cols, cols);
    const A scale = scale_of(v, eps, cols);
#pragma omp simd
    for (int64_t i = 0; i < cols; i++) v[i] = v[i] * scale * factor[i];
    narrow(out + r * cols, v, cols);
  });
}

// With c[r] = scale[r]^3 * mean_i grad[r, i] * factor[i] * x[r, i]:
//   dx[r, i] = grad[r, i] * factor[i] * scale[r] - x[r, i] * c[r] + more[r, i]
//   dweight[i] = sum_r grad[r, i] * x[r, i] * scale[r]
// dx, dweight and more may be null.
template <typename T, typename W>
void rms_norm_backward(T* dx, W* dweight, const T* grad, const T* x, const W* weight, const T* more, double eps,
                       double offset, int64_t rows, int64_t cols) {
  using A = accumulator<T>;
  const A* factor = factors<A>(weight, offset, cols);
  const auto row = [=](int64_t r, A* of_weight) {
    A *v = scratch<A>(cols), *g = scratch<A, 1>(cols);
    widen(v, x + r * cols, cols);
    widen(g, grad + r * cols, cols);
    const A scale = scale_of(v, eps, cols);
    if (of_weight) {
#pragma omp simd
      for (int64_t i = 0; i < cols; i++) of_weight[i] += g[i] * v[i] * scale;
    }
    if (!dx) return;
    const A dot = sum<A>(cols, [=](int64_t i, auto n) {
      return load<A>(g + i, n) * load<A>(factor + i, n) * load<A>(v + i, n);
    });
    const A c = scale * scale * (scale * dot / A(cols));  // scale^3 may be more than A holds
#pragma omp simd
    for (int64_t i = 0; i < cols; i++) g[i] = g[i] * factor[i] * scale - v[i] * c;
    if (more) {
      widen(v, more + r * cols, cols);
#pragma omp simd
      for (int64_t i = 0; i < cols; i++) g[i] += v[i];
    }
    narrow(dx + r * cols, g, cols);
  };
  if (dweight)
    narrow(dweight, sums_over_rows<A>(rows, cols, cols, row).get(), cols);
  else
    for_rows(rows, 2 * cols, [=](int64_t r) { row(r, nullptr); });
}
