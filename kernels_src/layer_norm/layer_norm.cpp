// out[r, i] = (x[r, i] - mean[r]) * scale[r] * weight[i] + bias[i], scale[r] = 1 / sqrt(variance[r] + eps). The
// variance is that of the differences from the mean. Weight and bias may be null: 1, and 0.

#include "rows.h"

// A row minus its mean, times scale.
template <typename T> struct Normalized {
  using A = accumulator<T>;
  const T* x;
  A mean, rest, scale;  // rest: what rounding left of the mean

  Normalized(const T* x, double eps, int64_t cols) : x(x) {
    mean = sum<A>(cols, [=](int64_t i, auto n) { return load<A>(x + i, n); }) / A(cols);
    const A m = mean;
    const auto difference = [=](int64_t i, auto n) { return with_rest(load<A>(x + i, n) - m, n, A(0)); };
    rest = sum<A>(cols, difference) / A(cols);
    const A squares = sum<A>(cols, [=](int64_t i, auto n) {
      const auto d = difference(i, n);
      return d * d;
    });
    const A variance = squares / A(cols) - rest * rest;
    scale = 1 / light::sqrt((variance > 0 ? variance : variance * 0) + A(eps));
  }
  template <typename N> Vector<A> operator()(int64_t i, N n) const { return (load<A>(x + i, n) - mean - rest) * scale; }
};

// What all rows share, widened, in memory of this thread; `missing` where there is none.
template <int slot, typename A, typename W> static const A* shared(const W* from, A missing, int64_t cols) {
  A* to = scratch<A, slot>(cols);
  if (from)
    widen(to, from, cols);
  else
    light::fill(to, to + cols, missing);
  return to;
}

template <typename T, typename W>
void layer_norm(T* out, const T* x, const W* weight, const W* bias, double eps, int64_t rows, int64_t cols) {
  using A = accumulator<T>;
  const A *w = shared<2, A>(weight, 1, cols), *b = shared<3, A>(bias, 0, cols);
  for_rows(rows, cols, [=](int64_t r) {
    const Normalized<T> normalized(x + r * cols, eps, cols);
    each_vector<A>(cols, [&](int64_t i, auto n) {
      store(out + r * cols + i, normalized(i, n) * load<A>(w + i, n) + load<A>(b + i, n), n);
    });
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
    const Normalized<T> normalized(x + r * cols, eps, cols);
    const T* from = grad + r * cols;
    const auto weighted = [=](int64_t i, auto n) { return load<A>(from + i, n) * load<A>(w + i, n); };
    const A mean = sum<A>(cols, weighted) / A(cols);
    const A dot = sum<A>(cols, [&](int64_t i, auto n) {
      const auto g = load<A>(from + i, n), v = normalized(i, n);
      if (sums) {
        A *of_weight = sums + i, *of_bias = of_weight + cols;
        store(of_weight, load<A>(of_weight, n) + g * v, n);
        store(of_bias, load<A>(of_bias, n) + g, n);
      }
      return g * load<A>(w + i, n) * v;
    }) / A(cols);
    if (dx) each_vector<A>(cols, [&](int64_t i, auto n) {
      store(dx + r * cols + i, normalized.scale * (weighted(i, n) - mean - normalized(i, n) * dot), n);
    });
  };
  if (!dweight && !dbias) return for_rows(rows, 2 * cols, [=](int64_t r) { row(r, nullptr); });
  const auto sums = sums_over_rows<A>(rows, cols, 2 * cols, row);
  if (dweight) narrow(dweight, sums.get(), cols);
  if (dbias) narrow(dbias, sums.get() + cols, cols);
}
