// softmax and log_softmax of scale * x[r, :, i], and their backward; elements of a row lie `inner` apart.
#include <cmath>
#include <cstdint>
#include <limits>

#include "exponential.h"
#include "rows.h"

static constexpr int64_t width = 256;  // neighbouring rows that are computed side by side where inner > 1

// Call row(r) for dense rows, or block(start, rows) for up to `width` rows that begin at neighbouring elements.
template <typename Row, typename Block>
static void for_rows_of(int64_t rows, int64_t cols, int64_t inner, Row row, Block block) {
  if (inner == 1) return for_rows(rows, cols, row);
  const int64_t blocks = (inner + width - 1) / width;
  for_rows(rows * blocks, cols * width, [=](int64_t b) {
    const int64_t first = b % blocks * width;
    block(b / blocks * cols * inner + first, std::min(width, inner - first));
  });
}

template <typename A> static A largest(const A* v, int64_t n) {
  A m = -std::numeric_limits<A>::infinity();
#pragma omp simd reduction(max : m)
  for (int64_t i = 0; i < n; i++) m = v[i] > m ? v[i] : m;
  return m;
}

// The numbers as A: where they lie, if that is their type, else widened into `room`.
template <typename A, typename T> static const A* widened(A* room, const T* from, int64_t n) {
  if constexpr (std::is_same_v<A, T>) {
    return from;
  } else {
    widen(room, from, n);
    return room;
  }
}

// out = exp(scale * x - m) / sum, or scale * x - m - log(sum), with m the largest of a row
template <typename T, bool LOG>
void softmax(T* out, const T* x, int64_t rows, int64_t cols, int64_t inner, double scale_) {
  using A = accumulator<T>;
  const A scale = A(scale_);
  const auto row = [=](int64_t r) {
    A* v = scratch<A>(cols);
    widen(v, x + r * cols, cols);
    if (scale != 1)
      for (int64_t i = 0; i < cols; i++) v[i] *= scale;
    const A m = largest(v, cols);
    A total;
    if constexpr (LOG) {
      total = std::log(sum<A>(cols, [=](int64_t i) { return exponential(v[i] - m); }));
      for (int64_t i = 0; i < cols; i++) v[i] = v[i] - m - total;
    } else {
      for (int64_t i = 0; i < cols; i++) v[i] = exponential(v[i] - m);
      total = sum<A>(cols, [=](int64_t i) { return v[i]; });
      for (int64_t i = 0; i < cols; i++) v[i] /= total;
    }
    narrow(out + r * cols, v, cols);
  };
  const auto block = [=](int64_t start, int64_t n) {
    A m[width], total[width], room[width];
    for (int64_t i = 0; i < n; i++) m[i] = -std::numeric_limits<A>::infinity(), total[i] = 0;
    for (int64_t c = 0; c < cols; c++) {
      const A* v = widened(room, x + start + c * inner, n);
#pragma omp simd
      for (int64_t i = 0; i < n; i++) m[i] = v[i] * scale > m[i] ? v[i] * scale : m[i];
    }
    for (int64_t c = 0; c < cols; c++) {
      const A* v = widened(room, x + start + c * inner, n);
#pragma omp simd
      for (int64_t i = 0; i < n; i++) total[i] += exponential(v[i] * scale - m[i]);
    }
    for (int64_t i = 0; i < n; i++) total[i] = LOG ? std::log(total[i]) : 1 / total[i];
    for (int64_t c = 0; c < cols; c++) {
      const A* v = widened(room, x + start + c * inner, n);
      A results[width];
#pragma omp simd
      for (int64_t i = 0; i < n; i++)
        results[i] = LOG ? v[i] * scale - m[i] - total[i] : exponential(v[i] * scale - m[i]) * total[i];
      narrow(out + start + c * inner, results, n);
    }
  };
  for_rows_of(rows, cols, inner, row, block);
}

// dx = scale * out * (grad - sum(grad * out)), or of the logarithm scale * (grad - exp(out) * sum(grad))
template <typename T, bool LOG>
void softmax_backward(T* dx, const T* grad, const T* out, int64_t rows, int64_t cols, int64_t inner, double scale_) {
  using A = accumulator<T>;
  const A scale = A(scale_);
  const auto element = [=](A g, A y, A total) {
    return scale * (LOG ? g - exponential(y) * total : y * (g - total));
  };
  const auto row = [=](int64_t r) {
    constexpr int64_t piece = 1024;  // which stays in the nearest cache
    const int64_t start = r * cols;
    A gradients[piece], outputs[piece], results[piece];
    double sum = 0;
    for (int64_t begin = 0; begin < cols; begin += piece) {
      const int64_t n = std::min(piece, cols - begin);
      const A* g = widened(gradients, grad + start + begin, n);
      const A* y = LOG ? g : widened(outputs, out + start + begin, n);
      A part = 0;
#pragma omp simd reduction(+ : part)
      for (int64_t i = 0; i < n; i++) part += LOG ? g[i] : g[i] * y[i];
      sum += part;
    }
    for (int64_t begin = 0; begin < cols; begin += piece) {
      const int64_t n = std::min(piece, cols - begin);
      const A* g = widened(gradients, grad + start + begin, n);
      const A* y = widened(outputs, out + start + begin, n);
#pragma omp simd
      for (int64_t i = 0; i < n; i++) results[i] = element(g[i], y[i], A(sum));
      narrow(dx + start + begin, results, n);
    }
  };
  const auto block = [=](int64_t start, int64_t n) {
    A total[width] = {}, gradients[width], outputs[width];
    for (int64_t c = 0; c < cols; c++) {
      const A* g = widened(gradients, grad + start + c * inner, n);
      const A* y = LOG ? g : widened(outputs, out + start + c * inner, n);
#pragma omp simd
      for (int64_t i = 0; i < n; i++) total[i] += LOG ? g[i] : g[i] * y[i];
    }
    for (int64_t c = 0; c < cols; c++) {
      const A* g = widened(gradients, grad + start + c * inner, n);
      const A* y = widened(outputs, out + start + c * inner, n);
      A results[width];
#pragma omp simd
      for (int64_t i = 0; i < n; i++) results[i] = element(g[i], y[i], total[i]);
      narrow(dx + start + c * inner, results, n);
    }
  };
  for_rows_of(rows, cols, inner, row, block);
}
