// out[r, i] = exp(x[r, i] - m) / d, where m = max_i x[r, i] and d = sum_i exp(x[r, i] - m).
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "float16.h"

using A = std::conditional_t<std::is_same_v<T, double>, double, float>;

static constexpr int64_t parallel_from = 1 << 15;  // elements below which starting threads costs more

extern "C" void softmax(T* out, const T* x, int64_t rows, int64_t cols) {
#pragma omp parallel for if (rows * cols >= parallel_from)
  for (int64_t r = 0; r < rows; r++) {
    const T* row = x + r * cols;
    A m = std::numeric_limits<A>::lowest(), d = 0;
    for (int64_t i = 0; i < cols; i++) m = std::fmax(m, A(row[i]));
    for (int64_t i = 0; i < cols; i++) d += std::exp(A(row[i]) - m);
    for (int64_t i = 0; i < cols; i++) out[r * cols + i] = T(std::exp(A(row[i]) - m) / d);
  }
}

// dx[r, i] = out[r, i] * (grad[r, i] - sum_j grad[r, j] * out[r, j])
extern "C" void softmax_backward(T* dx, const T* grad, const T* out, int64_t rows, int64_t cols) {
#pragma omp parallel for if (rows * cols >= parallel_from)
  for (int64_t r = 0; r < rows; r++) {
    A sum = 0;
    for (int64_t i = r * cols; i < (r + 1) * cols; i++) sum += A(grad[i]) * A(out[i]);
    for (int64_t i = r * cols; i < (r + 1) * cols; i++) dx[i] = T(A(out[i]) * (A(grad[i]) - sum));
  }
}
