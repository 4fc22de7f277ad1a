// The RMS norms of rms_norm.cu and add_rms_norm.cu, as Ops of rows.cuh and column_sums.cuh.
#pragma once
#include "column_sums.cuh"
#include "quantized_rows.cuh"

namespace rms_norm_detail {
using namespace jitkern;

__device__ __forceinline__ float reciprocal_root(float x) { return rsqrtf(x); }
__device__ __forceinline__ double reciprocal_root(double x) { return rsqrt(x); }

// y = x * scale * factor, where x may be a sum: of the inputs, and the second output.
template <typename T_, typename W, int INPUTS_, bool EDGES> struct Forward {
  using T = T_;
  using A = widened<T>;
  struct State { A squares; };
  struct Row { A scale; };
  using Held = typename Factors<T, W, EDGES>::Held;
  static constexpr int INPUTS = INPUTS_, OUTPUTS = INPUTS_, V = vector_size<T>;
  const T *in[INPUTS];
  T *out[OUTPUTS];
  Factors<T, W, EDGES> factors;
  A eps, share;  // of a column in the mean
  int cols;

  __device__ State none() const { return {0}; }
  __device__ A padding() const { return 0; }
  __device__ Held hold(int column) const { return factors.hold(column); }
  __device__ State add(State s, const A (&v)[INPUTS][V], Held, int, bool) const { return add(s, v, 0); }
  __device__ State add(State s, const A (&v)[INPUTS][V], int) const {
#pragma unroll
    for (int i = 0; i < V; i++) {
      const A x = INPUTS == 2 ? v[0][i] + v[INPUTS - 1][i] : v[0][i];
      s.squares += x * x;
    }
    return s;
  }
  __device__ State merge(State a, State b) const { return {a.squares + b.squares}; }
  __device__ Row row(State s, long long, bool) const { return {reciprocal_root(s.squares * share + eps)}; }
  __device__ void results(Row r, const A (&v)[INPUTS][V], Held held, int column, A (&y)[OUTPUTS][V]) const {
    A factor[V];
    factors.load(held, factor);
    finished(r, v, factor, column, y);
  }
  __device__ void results(Row r, const A (&v)[INPUTS][V], int column, A (&y)[OUTPUTS][V]) const {
    A factor[V];
    factors.load(column, factor);
    finished(r, v, factor, column, y);
  }
  __device__ __forceinline__ void finished(Row r, const A (&v)[INPUTS][V], const A (&factor)[V], int column, A (&y)[OUTPUTS][V]) const {
#pragma unroll
    for (int i = 0; i < V; i++) {
      const A x = INPUTS == 2 ? v[0][i] + v[INPUTS - 1][i] : v[0][i];
      if (!EDGES || (unsigned)(column + i) < (unsigned)cols) y[0][i] = x * r.scale * factor[i];
      if (INPUTS == 2) y[OUTPUTS - 1][i] = x;
    }
  }
};

template <int INPUTS, bool EDGES, typename T, typename W>
__device__ Forward<T, W, INPUTS, EDGES> forward(T *out, T *sum, const T *x, const T *residual, const W *weight,
                                                double eps, double offset, int cols) {
  using A = widened<T>;
  if constexpr (INPUTS == 1)
    return {{x}, {out}, {weight, cols, 1, offset}, A(eps), A(1) / cols, cols};
  else
    return {{x, residual}, {out, sum}, {weight, cols, 1, offset}, A(eps), A(1) / cols, cols};
}

// y = x * scale * factor in units of unit[row], with which the row's largest number is the largest of Q. The second
// input is added to x; the only output is then the sum.
template <typename T_, typename W, typename Q, int INPUTS_, bool EDGES> struct Quantized {
  using T = T_;
  using A = widened<T>;
  struct State { A squares, top; };
  struct Row { A scale; long long start; };
  using Held = typename Factors<T, W, EDGES>::Held;
  static constexpr int INPUTS = INPUTS_, OUTPUTS = INPUTS_ - 1, V = vector_size<T>;
  const T *in[INPUTS];
  T *out[1];
  Q *quantized;
  float *units;
  Factors<T, W, EDGES> factors;
  A eps, share;  // of a column in the mean
  int cols;

  __device__ State none() const { return {0, 0}; }
  __device__ A padding() const { return 0; }
  __device__ Held hold(int column) const { return factors.hold(column); }
  template <class F> __device__ State add(State s, const A (&v)[INPUTS][V], F of_columns, int, bool) const {
    return add(s, v, of_columns);
  }
  template <class F> __device__ State add(State s, const A (&v)[INPUTS][V], F of_columns) const {
    A factor[V];
    factors.load(of_columns, factor);
#pragma unroll
    for (int i = 0; i < V; i++) {
      const A x = INPUTS == 2 ? v[0][i] + v[INPUTS - 1][i] : v[0][i];
      s.squares += x * x;
      s.top = larger(s.top, fabs(x * factor[i]));
    }
    return s;
  }
  __device__ State merge(State a, State b) const { return {a.squares + b.squares, larger(a.top, b.top)}; }
  __device__ Row row(State s, long long row, bool first) const {
    const A scale = reciprocal_root(s.squares * share + eps), top = s.top * scale;  // a NaN is in both
    if (first) units[row] = unit_of<Q>(top);
    return {scale * per_unit_of<Q>(top), row * cols};
  }
  template <class Y> __device__ void results(Row r, const A (&v)[INPUTS][V], int column, Y &y) const {
    results(r, v, column, column, y);
  }
  template <class F, class Y>
  __device__ void results(Row r, const A (&v)[INPUTS][V], F of_columns, int column, Y &y) const {
    A factor[V];
    factors.load(of_columns, factor);
    alignas(8) Q q[V];
    float scaled[V];
#pragma unroll
    for (int i = 0; i < V; i++) {
      const A x = INPUTS == 2 ? v[0][i] + v[INPUTS - 1][i] : v[0][i];
      scaled[i] = float(x * factor[i]);
      if (INPUTS == 2) y[0][i] = x;
    }
    quantize(q, scaled, float(r.scale));
    store_quantized<EDGES>(quantized + r.start, q, column, cols);
  }
};

// dx = grad * factor * scale - x * scale^3 * mean(grad * factor * x), and more if there is a third input;
// the sum over the rows is that of grad * x * scale.
template <typename T_, typename W, int INPUTS_, bool DX, bool EDGES> struct Backward {
  using T = T_;
  using A = widened<T>;
  struct State { A squares, dot; };
  struct Row { A scale, of_x; };
  using Held = typename Factors<T, W, EDGES>::Held;
  static constexpr int INPUTS = INPUTS_, OUTPUTS = DX, SUMS = 1, V = vector_size<T>;
  const T *in[INPUTS];
  T *out[1];
  A *scales;  // of the rows, if they are to be stored
  Factors<T, W, EDGES> factors;
  A eps, share;  // of a column in the mean
  int cols;

  __device__ State none() const { return {0, 0}; }
  __device__ A padding() const { return 0; }
  __device__ Held hold(int column) const { return factors.hold(column); }
  template <class F> __device__ State add(State s, const A (&v)[INPUTS][V], F of_columns, int, bool) const {
    return add(s, v, of_columns);
  }
  template <class F> __device__ State add(State s, const A (&v)[INPUTS][V], F of_columns) const {
    A factor[V];
    if (DX) factors.load(of_columns, factor);
#pragma unroll
    for (int i = 0; i < V; i++) {
      s.squares += v[1][i] * v[1][i];
      if (DX) s.dot += v[0][i] * factor[i] * v[1][i];
    }
    return s;
  }
  __device__ State merge(State a, State b) const { return {a.squares + b.squares, a.dot + b.dot}; }
  __device__ Row row(State s, long long row, bool first) const {
    const A scale = reciprocal_root(s.squares * share + eps);
    if (first && scales) scales[row] = scale;
    return {scale, scale * scale * (scale * (s.dot * share))};  // scale^3 may be more than A holds
  }
  template <class F, class Y> __device__ void results(Row r, const A (&v)[INPUTS][V], F of_columns, int, Y &y) const {
    results(r, v, of_columns, y);
  }
  template <class F, class Y> __device__ void results(Row r, const A (&v)[INPUTS][V], F of_columns, Y &y) const {
    if constexpr (DX) {
      A factor[V];
      factors.load(of_columns, factor);
#pragma unroll
      for (int i = 0; i < V; i++) {
        y[0][i] = v[0][i] * r.scale * factor[i] - v[1][i] * r.of_x;
        if (INPUTS == 3) y[0][i] += v[INPUTS - 1][i];
      }
    }
  }
  template <int N> __device__ void sum(Row r, const A (&v)[INPUTS][N], A (&sums)[1][N]) const {
#pragma unroll
    for (int i = 0; i < N; i++) sums[0][i] += v[0][i] * r.scale * v[1][i];
  }
  __device__ Row kept(long long row) const { return {scales[row], 0}; }
};

}  // namespace rms_norm_detail
