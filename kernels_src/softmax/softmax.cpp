// out[r, i] = exp(x[r, i] - m) / d, where m = max_i x[r, i] and d = sum_i exp(x[r, i] - m).
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "float16.h"

using A = std::conditional_t<std::is_same_v<T, double>, double, float>;

static constexpr int64_t parallel_from = 1 << 15;  // elements below which starting threads costs more

template <typename Row>
static void for_rows(int64_t rows, int64_t cols, Row row) {
  if (rows * cols < parallel_from) {  // not an `if` clause: that costs as much as a small softmax
    for (int64_t r = 0; r < rows; r++) row(r);
    return;
  }
#pragma omp parallel for
  for (int64_t r = 0; r < rows; r++) row(r);
}

template <typename U>
static void softmax_row(U* out, const U* x, int64_t cols) {
  A m = std::numeric_limits<A>::lowest();
  double sum = 0;  // a float would lose the small terms of a long row
  for (int64_t i = 0; i < cols; i++) m = A(x[i]) > m ? A(x[i]) : m;
  if constexpr (std::is_same_v<U, A>) {
    for (int64_t i = 0; i < cols; i++) sum += out[i] = std::exp(x[i] - m);
    for (int64_t i = 0; i < cols; i++) out[i] /= A(sum);
  } else {  // out is too coarse for what the sum is made of
    for (int64_t i = 0; i < cols; i++) sum += std::exp(A(x[i]) - m);
    for (int64_t i = 0; i < cols; i++) out[i] = U(std::exp(A(x[i]) - m) / A(sum));
  }
}

extern "C" void softmax(T* out, const T* x, int64_t rows, int64_t cols) {
  for_rows(rows, cols, [=](int64_t r) { softmax_row(out + r * cols, x + r * cols, cols); });
}

// dx[r, i] = out[r, i] * (grad[r, i] - sum_j grad[r, j] * out[r, j])
extern "C" void softmax_backward(T* dx, const T* grad, const T* out, int64_t rows, int64_t cols) {
  for_rows(rows, cols, [=](int64_t r) {
    double sum = 0;
    for (int64_t i = r * cols; i < (r + 1) * cols; i++) sum += A(grad[i]) * A(out[i]);
    const A dot = A(sum);
    for (int64_t i = r * cols; i < (r + 1) * cols; i++) dx[i] = T(A(out[i]) * (A(grad[i]) - dot));
  });
}
