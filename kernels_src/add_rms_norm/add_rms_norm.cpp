// total = x + residual; out = rms_norm(total), of the sum before it is rounded.
#include "../rms_norm/rms_norm.h"

// v[i] = x[i] + residual[i], and rounded in total.
template <typename T, typename A> static void add(A* v, T* total, const T* x, const T* residual, int64_t cols) {
  A* other = scratch<A, 1>(cols);
  widen(v, x, cols);
  widen(other, residual, cols);
#pragma omp simd
  for (int64_t i = 0; i < cols; i++) v[i] += other[i];
  narrow(total, v, cols);
}

template <typename T, typename W>
void add_rms_norm(T* out, T* total, const T* x, const T* residual, const W* weight, double eps, double offset,
                  int64_t rows, int64_t cols) {
  using A = accumulator<T>;
  const A* factor = factors<A>(weight, offset, cols);
  for_rows(rows, cols, [=](int64_t r) {
    A* v = scratch<A>(cols);
    add(v, total + r * cols, x + r * cols, residual + r * cols, cols);
    const A scale = scale_of(v, eps, cols);
#pragma omp simd
    for (int64_t i = 0; i < cols; i++) v[i] = v[i] * scale * factor[i];
    narrow(out + r * cols, v, cols);
  });
}

template <typename T, typename W, typename Q>
void add_rms_norm_quantized(Q* out, float* units, T* total, const T* x, const T* residual, const W* weight, double eps,
                            double offset, int64_t rows, int64_t cols) {
  using A = accumulator<T>;
  const A* factor = factors<A>(weight, offset, cols);
  for_rows(rows, cols, [=](int64_t r) {
    A* v = scratch<A>(cols);
    add(v, total + r * cols, x + r * cols, residual + r * cols, cols);
    units[r] = quantized(out + r * cols, v, factor, scale_of(v, eps, cols), cols);
  });
}
