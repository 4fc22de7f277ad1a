// Cross-entropy of rows of logits on the CPU, a row a thread; see kernel.py for the formula.
#include <limits>

#include "exponential.h"
#include "rows.h"

// What all rows share.
template <typename A> struct Settings {
  A smoothing, z_loss, cap;
  int64_t cols, ignored;
};

// Call use(logits) with the logits of a row: capped, in memory of this thread, or where they lie.
template <typename A, typename T, typename Use> static inline void with_capped(const T* x, const Settings<A>& s, Use use) {
  if (s.cap == 0) return use(x);
  const A cap = s.cap, twice = 2 / cap;
  A* v = scratch<A>(s.cols);
  // cap * tanh(x / cap) = cap - 2 * cap / (1 + e^(2 * x / cap)), within rounding of cap
  each_vector<A>(s.cols, [=](int64_t i, auto n) {
    store(v + i, cap - 2 * cap / (1 + exponential(load<A>(x + i, n) * twice)), n);
  });
  use(static_cast<const A*>(v));
}

// What the logits of a row are reduced to. e: null, or memory for e^(logit - base), which may be the logits'.
template <typename A> struct Row {
  A base, sum, loss;

  template <typename V> Row(const V* v, int64_t target, A* e, const Settings<A>& s) {
    constexpr A infinity = std::numeric_limits<A>::infinity();
    const auto logits = [=](int64_t i, auto n) { return with_rest(load<A>(v + i, n), n, -infinity); };
    const A m = largest<A>(s.cols, logits), b = m == -infinity ? A(0) : m;  // where a NaN is, the sum becomes NaN
    loss = b - A(v[target]);  // before the logarithm, which may be far smaller than either; and before e is written
    if (s.smoothing != 0) {
      const A below =
          ::sum<A>(s.cols, [=](int64_t i, auto n) { return with_rest(load<A>(v + i, n) - b, n, A(0)); });
      loss = (1 - s.smoothing) * loss - s.smoothing / A(s.cols) * below;
    }
    base = b;
    sum = ::sum<A>(s.cols, [=](int64_t i, auto n) {
      const auto power = exponential(logits(i, n) - b);
      if (e) store(e + i, power, n);
      return power;
    });
    loss += light::log(sum) + s.z_loss * lse() * lse();
  }
  A lse() const { return base + light::log(sum); }
};

template <typename T, typename I>
void cross_entropy_loss(accumulator<T>* losses, const T* x, const I* targets, int64_t rows, int64_t cols,
                        double smoothing, double z_loss, double cap, int64_t ignored) {
  using A = accumulator<T>;
  const Settings<A> s{A(smoothing), A(z_loss), A(cap), cols, ignored};
  for_rows(rows, 2 * cols, [=](int64_t r) {
    const int64_t target = targets[r];
    if (target == ignored)
      losses[r] = 0;
    else if (target < 0 || target >= cols)
      losses[r] = std::numeric_limits<A>::quiet_NaN();
    else
      with_capped(x + r * cols, s, [&](auto v) { losses[r] = Row<A>(v, target, nullptr, s).loss; });
  });
}

// Losses, and in out their gradients by the logits times scales[r * scale_stride], or 1 without scales. out may be x.
template <typename T, typename I>
void cross_entropy_rows(accumulator<T>* losses, T* out, const T* x, const I* targets, const accumulator<T>* scales,
                        int64_t scale_stride, int64_t rows, int64_t cols, double smoothing, double z_loss, double cap,
                        int64_t ignored) {
  using A = accumulator<T>;
  const Settings<A> s{A(smoothing), A(z_loss), A(cap), cols, ignored};
  for_rows(rows, 2 * cols, [=](int64_t r) {
    const int64_t target = targets[r];
    T* to = out + r * cols;
    if (target == ignored || target < 0 || target >= cols) {
      losses[r] = target == ignored ? 0 : std::numeric_limits<A>::quiet_NaN();
      light::fill(to, to + cols, T(losses[r]));
      return;
    }
    A* e;
    if constexpr (std::is_same_v<T, A>)
      e = to;
    else
      e = scratch<A, 1>(cols);
    with_capped(x + r * cols, s, [&](auto v) {
      const Row<A> row(v, target, e, s);
      losses[r] = row.loss;
      const A scale = scales ? scales[r * scale_stride] : A(1);
      const A by = scale * (1 + 2 * s.z_loss * row.lse()) / row.sum, less = scale * s.smoothing / A(cols);
      // The derivative of capping, by what it made of a logit.
      const A per_cap = s.cap != 0 ? 1 / s.cap : 0;
      const auto slope = [=](auto capped) { return 1 - capped * per_cap * (capped * per_cap); };
      A at = e[target] * by - less - scale * (1 - s.smoothing);
      if (s.cap != 0) at *= slope(A(v[target]));
      each_vector<A>(cols, [=](int64_t i, auto n) {
        auto d = load<A>(e + i, n) * by - less;
        if (per_cap != 0) d *= slope(load<A>(v + i, n));
        store(to + i, d, n);
      });
      to[target] = T(at);
    });
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
    T* row = x + r * cols;
    each_vector<A>(cols, [=](int64_t i, auto n) { store(row + i, load<A>(row + i, n) * factor, n); });
  });
}
