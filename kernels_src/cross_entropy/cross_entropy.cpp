// Cross-entropy of rows of logits on the CPU, a row a thread; see kernel.py for the formula.
#include <cmath>
#include <limits>

#include "exponential.h"
#include "rows.h"

// cap * tanh(x / cap) = cap - 2 * cap / (1 + e^(2 * x / cap)), within rounding of cap
template <typename A> static void cap_all(A* v, int64_t n, A cap) {
  const A twice = 2 / cap;
  for (int64_t i = 0; i < n; i++) v[i] = cap - 2 * cap / (1 + exponential(v[i] * twice));
}

template <typename A> static A largest(const A* v, int64_t n) {
  A m = -std::numeric_limits<A>::infinity();  // where a NaN is, the sum becomes NaN
#pragma omp simd reduction(max : m)
  for (int64_t i = 0; i < n; i++) m = v[i] > m ? v[i] : m;
  return m;
}

// What all rows share.
template <typename A> struct Settings {
  A smoothing, z_loss, cap;
  int64_t cols, ignored;
};

// The logits of a row, widened and capped, and what they are reduced to; e: null, or memory for e^(v - base).
template <typename A> struct Row {
  const A* v;
  A base, sum, loss;

  template <typename T> Row(const T* x, int64_t target, A* e, const Settings<A>& s) {
    if (std::is_same_v<T, A> && s.cap == 0) {
      v = reinterpret_cast<const A*>(x);
    } else {
      A* memory = e && s.cap == 0 ? e : scratch<A>(s.cols);  // e, where v is not needed once e is known
      widen(memory, x, s.cols);
      if (s.cap != 0) cap_all(memory, s.cols, s.cap);
      v = memory;
    }
    const A* v = this->v;
    const A m = largest(v, s.cols), b = m == -std::numeric_limits<A>::infinity() ? A(0) : m;
    loss = b - v[target];  // before the logarithm, which may be far smaller than either; and before e is written
    if (s.smoothing != 0) {
      const A below = ::sum<A>(s.cols, [=](int64_t i) { return v[i] - b; });
      loss = (1 - s.smoothing) * loss - s.smoothing / A(s.cols) * below;
    }
    base = b;
    if (e)
      sum = ::sum<A>(s.cols, [=](int64_t i) { return e[i] = exponential(v[i] - b); });
    else
      sum = ::sum<A>(s.cols, [=](int64_t i) { return exponential(v[i] - b); });
    loss += std::log(sum) + s.z_loss * lse() * lse();
  }
  A lse() const { return base + std::log(sum); }
};

template <typename T, typename I>
void cross_entropy_loss(accumulator<T>* losses, const T* x, const I* targets, int64_t rows, int64_t cols,
                        double smoothing, double z_loss, double cap, int64_t ignored) {
  using A = accumulator<T>;
  const Settings<A> s{A(smoothing), A(z_loss), A(cap), cols, ignored};
  for_rows(rows, cols, [=](int64_t r) {
    const int64_t target = targets[r];
    if (target == ignored)
      losses[r] = 0;
    else if (target < 0 || target >= cols)
      losses[r] = std::numeric_limits<A>::quiet_NaN();
    else
      losses[r] = Row<A>(x + r * cols, target, nullptr, s).loss;
  });
}

// Losses, and in out their gradients by the logits times scales[r * scale_stride], or 1 without scales. out may be x.
template <typename T, typename I>
void cross_entropy_rows(accumulator<T>* losses, T* out, const T* x, const I* targets, const accumulator<T>* scales,
                        int64_t scale_stride, int64_t rows, int64_t cols, double smoothing, double z_loss, double cap,
                        int64_t ignored) {
  using A = accumulator<T>;
  const Settings<A> s{A(smoothing), A(z_loss), A(cap), cols, ignored};
  for_rows(rows, cols, [=](int64_t r) {
    const int64_t target = targets[r];
    T* to = out + r * cols;
    if (target == ignored || target < 0 || target >= cols) {
      losses[r] = target == ignored ? 0 : std::numeric_limits<A>::quiet_NaN();
      std::fill(to, to + cols, T(losses[r]));
      return;
    }
    A* e = std::is_same_v<T, A> && s.cap == 0 ? reinterpret_cast<A*>(to) : scratch<A, 1>(cols);
    const Row<A> row(x + r * cols, target, e, s);
    losses[r] = row.loss;
    const A scale = scales ? scales[r * scale_stride] : A(1);
    const A by = scale * (1 + 2 * s.z_loss * row.lse()) / row.sum, less = scale * s.smoothing / A(cols);
    const A at = e[target] * by - less - scale * (1 - s.smoothing);
    for (int64_t i = 0; i < cols; i++) e[i] = e[i] * by - less;
    e[target] = at;
    if (s.cap != 0) {
      const A* v = row.v;
      const A per_cap = 1 / s.cap;
      for (int64_t i = 0; i < cols; i++) e[i] *= 1 - v[i] * per_cap * (v[i] * per_cap);
    }
    if (reinterpret_cast<void*>(e) != to) narrow(to, e, cols);
  });
}

// scale = grad / the number of targets that are not ignored; grad: 1 if there is none
template <typename A, typename I>
void cross_entropy_scale(A* scale, const A* grad, const I* targets, int64_t rows, int64_t ignored) {
  int64_t count = 0;
  for (int64_t i = 0; i < rows; i++) count += targets[i] != ignored;
  *scale = A((grad ? double(*grad) : 1.) / double(count));
}

// The sum of the losses, or with `mean` their mean over the targets that are not ignored
template <typename A, typename I>
void cross_entropy_reduce(A* out, const A* losses, const I* targets, int64_t rows, int64_t ignored, bool mean) {
  double total = 0;
  int64_t count = 0;
  for (int64_t i = 0; i < rows; i++) total += losses[i], count += targets[i] != ignored;
  *out = A(mean ? total / double(count) : total);
}

// x *= by, where that is not 1; by[row * by_stride]
template <typename T>
void cross_entropy_rescale(T* x, const accumulator<T>* by, int64_t by_stride, int64_t rows, int64_t cols) {
  using A = accumulator<T>;
  for_rows(rows, cols, [=](int64_t r) {
    const A factor = by[r * by_stride];
    if (factor == 1) return;
    A* v = scratch<A>(cols);
    widen(v, x + r * cols, cols);
    for (int64_t i = 0; i < cols; i++) v[i] *= factor;
    narrow(x + r * cols, v, cols);
  });
}
