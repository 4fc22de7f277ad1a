// softmax of scale * x[r, :, i], and its backward; elements of a row lie `inner` apart.
#include <cstdint>

#include "exponential.h"
#include "rows.h"

static constexpr int64_t width = 256;  // neighbouring rows that are computed side by side where inner > 1

// Call row(r) for dense rows, or block(start, rows) for up to `width` rows that begin at neighbouring elements.
// work: that of a number.
template <typename Row, typename Block>
static void for_rows_of(int64_t rows, int64_t cols, int64_t inner, int64_t work, Row row, Block block) {
  if (inner == 1) return for_rows(rows, work * cols, row);
  const int64_t most = rows * inner < 4 * width ? width / 4 : width;
  const int64_t blocks = (inner + most - 1) / most;
  for_rows(rows * blocks, work * cols * light::min(inner, most), [=](int64_t b) {
    const int64_t first = b % blocks * most;
    block(b / blocks * cols * inner + first, light::min(most, inner - first));
  });
}

// out = exp(scale * x - m) / sum, with m the largest of a row
template <typename T>
void softmax(T* out, const T* x, int64_t rows, int64_t cols, int64_t inner, double scale_) {
  using A = accumulator<T>;
  using V = Vector<A>;
  constexpr A infinity = std::numeric_limits<A>::infinity();
  const A scale = A(scale_);
  const auto row = [=](int64_t r) {
    const T* from = x + r * cols;
    T* to = out + r * cols;
    const auto scaled = [=](int64_t i, auto n) { return with_rest(load<A>(from + i, n) * scale, n, -infinity); };
    const A m = largest<A>(cols, scaled);
    A* e = scratch<A>(cols);
    const A factor = 1 / sum<A>(cols, [=](int64_t i, auto n) {
      const V v = exponential(scaled(i, n) - m);
      store(e + i, v, n);
      return v;
    });
    each_vector<A>(cols, [=](int64_t i, auto n) { store(to + i, load<A>(e + i, n) * factor, n); });
  };
  const auto block = [=](int64_t start, int64_t n) {
    A most[width], total[width];
    light::fill(most, most + n, -infinity);
    light::fill(total, total + n, A(0));
    const auto each = [=](auto step) {
      for (int64_t c = 0; c < cols; c++) {
        const int64_t at = start + c * inner;
        each_vector<A>(n, [=](int64_t i, auto m) { step(at + i, i, m, load<A>(x + at + i, m) * scale); });
      }
    };
    each([&](int64_t, int64_t i, auto m, V v) {
      const V known = load<A>(most + i, m);
      store(most + i, v > known ? v : known, m);
    });
    each([&](int64_t, int64_t i, auto m, V v) {
      store(total + i, load<A>(total + i, m) + exponential(v - load<A>(most + i, m)), m);
    });
    for (int64_t i = 0; i < n; i++) total[i] = 1 / total[i];
    each([&](int64_t at, int64_t i, auto m, V v) {
      store(out + at, exponential(v - load<A>(most + i, m)) * load<A>(total + i, m), m);
    });
  };
  for_rows_of(rows, cols, inner, 2, row, block);
}

// dx = scale * out * (grad - sum(grad * out))
template <typename T>
void softmax_backward(T* dx, const T* grad, const T* out, int64_t rows, int64_t cols, int64_t inner, double scale_) {
  using A = accumulator<T>;
  const A scale = A(scale_);
  const auto term = [=](int64_t at, auto n) { return load<A>(grad + at, n) * load<A>(out + at, n); };
  const auto finish = [=](int64_t at, auto n, auto total) {
    store(dx + at, scale * (load<A>(out + at, n) * (load<A>(grad + at, n) - total)), n);
  };
  const auto row = [=](int64_t r) {
    const int64_t start = r * cols;
    const A total = sum<A>(cols, [=](int64_t i, auto n) { return term(start + i, n); });
    each_vector<A>(cols, [=](int64_t i, auto n) { finish(start + i, n, total); });
  };
  const auto block = [=](int64_t start, int64_t n) {
    A total[width] = {};
    for (int64_t c = 0; c < cols; c++)
      each_vector<A>(n, [&](int64_t i, auto m) {
        store(total + i, load<A>(total + i, m) + term(start + c * inner + i, m), m);
      });
    for (int64_t c = 0; c < cols; c++)
      each_vector<A>(n, [&](int64_t i, auto m) { finish(start + c * inner + i, m, load<A>(total + i, m)); });
  };
  for_rows_of(rows, cols, inner, 1, row, block);
}
