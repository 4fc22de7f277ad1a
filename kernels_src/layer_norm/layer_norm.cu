// layer_norm in the forms of rows.cuh, its backward in those of column_sums.cuh. Means and sums of squared
// differences from them are merged part by part (Chan, Golub & LeVeque 1979): nothing cancels.
#include "column_sums.cuh"

namespace layer_norm_detail {
using namespace jitkern;

__device__ __forceinline__ float reciprocal_root(float x) { return rsqrtf(x); }
__device__ __forceinline__ double reciprocal_root(double x) { return rsqrt(x); }
__device__ __forceinline__ float quotient(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ double quotient(double a, double b) { return a / b; }

// Whether the i-th element from `column` on is in a row.
template <bool EDGES> __device__ __forceinline__ bool is_in(int column, int cols) {
  return !EDGES || (unsigned)column < (unsigned)cols;
}
// How many of V elements are.
template <bool EDGES, int V> __device__ __forceinline__ int counted(int column, int cols) {
  return EDGES ? min(V, cols - column) - max(0, -column) : V;
}

template <typename T_, typename W, bool EDGES> struct Forward {
  using T = T_;
  using A = widened<T>;
  struct State { A count, mean, squares; };
  struct Row { A mean, scale; };
  struct Held { typename Factors<T, W, EDGES>::Held weight, bias; };
  static constexpr int INPUTS = 1, OUTPUTS = 1, V = vector_size<T>;
  const T *in[1];
  T *out[1];
  Factors<T, W, EDGES> weight, bias;
  A eps, share;  // of a column in the mean
  int cols;

  __device__ State none() const { return {0, 0, 0}; }
  __device__ A padding() const { return 0; }
  __device__ Held hold(int column) const { return {weight.hold(column), bias.hold(column)}; }
  __device__ State add(State s, const A (&v)[1][V], Held, int column, bool) const { return add(s, v, column); }
  __device__ State add(State s, const A (&v)[1][V], int column) const {
    State part{A(counted<EDGES, V>(column, cols)), 0, 0};
#pragma unroll
    for (int i = 0; i < V; i++) part.mean += v[0][i];
    part.mean = quotient(part.mean, part.count);
#pragma unroll
    for (int i = 0; i < V; i++) {
      const A difference = is_in<EDGES>(column + i, cols) ? v[0][i] - part.mean : A(0);
      part.squares += difference * difference;
    }
    return merge(s, part);
  }
  __device__ State merge(State a, State b) const {
    const A count = a.count + b.count, part = count > 0 ? quotient(b.count, count) : A(0), difference = b.mean - a.mean;
    return {count, a.mean + difference * part, a.squares + b.squares + difference * difference * a.count * part};
  }
  __device__ Row row(State s, long long, bool) const { return {s.mean, reciprocal_root(s.squares * share + eps)}; }
  __device__ void results(Row r, const A (&v)[1][V], int column, A (&y)[1][V]) const { results(r, v, column, column, y); }
  template <class F> __device__ void results(Row r, const A (&v)[1][V], F of_columns, int, A (&y)[1][V]) const {
    A w[V], b[V];
    load(of_columns, w, b);
#pragma unroll
    for (int i = 0; i < V; i++) y[0][i] = (v[0][i] - r.mean) * r.scale * w[i] + b[i];
  }
  __device__ __forceinline__ void load(Held held, A (&w)[V], A (&b)[V]) const {
    weight.load(held.weight, w), bias.load(held.bias, b);
  }
  __device__ __forceinline__ void load(int column, A (&w)[V], A (&b)[V]) const {
    weight.load(column, w), bias.load(column, b);
  }
};

// With n = (x - mean) * scale and g = grad * weight, dx = scale * (g - mean(g) - n * mean(g * n)); the sums over
// the rows are those of grad * n and of grad.
template <typename T_, typename W, bool DX, bool EDGES> struct Backward {
  using T = T_;
  using A = widened<T>;
  struct State { A count, mean, squares, mean_g, products; };  // products: of the differences of x and g from their means
  struct Row { A mean, scale, mean_g, mean_gn; };
  using Held = typename Factors<T, W, EDGES>::Held;
  static constexpr int INPUTS = 2, OUTPUTS = DX, SUMS = 2, V = vector_size<T>;
  const T *in[2];
  T *out[1];
  A *statistics;  // mean and scale of each row, if they are to be stored
  Factors<T, W, EDGES> weight;
  A eps, share;
  int cols;

  __device__ State none() const { return {0, 0, 0, 0, 0}; }
  __device__ A padding() const { return 0; }
  __device__ Held hold(int column) const { return weight.hold(column); }
  __device__ State add(State s, const A (&v)[2][V], Held held, int, bool is_inside) const {
    A w[V];
    weight.load(held, w);
    return added(s, v, w, 0, is_inside ? V : 0);
  }
  __device__ State add(State s, const A (&v)[2][V], int column) const {
    A w[V];
    weight.load(column, w);
    return added(s, v, w, column, counted<EDGES, V>(column, cols));
  }
  __device__ __forceinline__ State added(State s, const A (&v)[2][V], const A (&w)[V], int column, int count) const {
    State part{A(count), 0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < V; i++) part.mean += v[1][i], part.mean_g += v[0][i] * w[i];
    const A each = quotient(A(1), A(max(count, 1)));
    part.mean *= each, part.mean_g *= each;
#pragma unroll
    for (int i = 0; i < V; i++) {
      const A difference = is_in<EDGES>(column + i, cols) ? v[1][i] - part.mean : A(0);
      part.squares += difference * difference, part.products += difference * (v[0][i] * w[i]);
    }
    return merge(s, part);  // the differences of x add up to 0: those of g from its mean need not be taken
  }
  __device__ State merge(State a, State b) const {
    const A count = a.count + b.count, part = count > 0 ? quotient(b.count, count) : A(0);
    const A difference = b.mean - a.mean, of_g = b.mean_g - a.mean_g, weighted = difference * a.count * part;
    return {count, a.mean + difference * part, a.squares + b.squares + difference * weighted,
            a.mean_g + of_g * part, a.products + b.products + of_g * weighted};
  }
  __device__ Row row(State s, long long row, bool first) const {
    const A scale = reciprocal_root(s.squares * share + eps);
    if (first && statistics) statistics[2 * row] = s.mean, statistics[2 * row + 1] = scale;
    return {s.mean, scale, s.mean_g, scale * (s.products * share)};
  }
  template <class F, class Y> __device__ void results(Row r, const A (&v)[2][V], F of_columns, int, Y &y) const {
    results(r, v, of_columns, y);
  }
  template <class F, class Y> __device__ void results(Row r, const A (&v)[2][V], F of_columns, Y &y) const {
    if constexpr (DX) {
      A w[V];
      weight.load(of_columns, w);
#pragma unroll
      for (int i = 0; i < V; i++)
        y[0][i] = r.scale * (v[0][i] * w[i] - r.mean_g - (v[1][i] - r.mean) * r.scale * r.mean_gn);
    }
  }
  template <int N> __device__ void sum(Row r, const A (&v)[2][N], A (&sums)[2][N]) const {
#pragma unroll
    for (int i = 0; i < N; i++) sums[0][i] += v[0][i] * ((v[1][i] - r.mean) * r.scale), sums[1][i] += v[0][i];
  }
  __device__ Row kept(long long row) const { return {statistics[2 * row], statistics[2 * row + 1], 0, 0}; }
};

}  // namespace layer_norm_detail

template <typename T, typename W, int LANES, int THREADS, int VPT, int MORE, bool EDGES>
__global__ void __launch_bounds__(THREADS)
    layer_norm(T *out, const T *x, const W *weight, const W *bias, double eps, long long rows, int cols) {
  using A = jitkern::widened<T>;
  const layer_norm_detail::Forward<T, W, EDGES> op{{x}, {out}, {weight, cols, 1}, {bias, cols, 0}, A(eps), A(1) / cols, cols};
  jitkern::rows_on_chip<LANES, THREADS, VPT, MORE, EDGES>(op, rows, cols);
}
template <typename T, typename W, int THREADS, bool EDGES>
__global__ void __launch_bounds__(THREADS)
    layer_norm_long(T *out, const T *x, const W *weight, const W *bias, double eps, int cols) {
  using A = jitkern::widened<T>;
  const layer_norm_detail::Forward<T, W, EDGES> op{{x}, {out}, {weight, cols, 1}, {bias, cols, 0}, A(eps), A(1) / cols, cols};
  jitkern::rows_read_twice<THREADS, EDGES>(op, cols);
}

template <typename T, typename W, typename A, bool DX, bool EDGES, int LANES, int THREADS, int VPT, int MORE>
__global__ void __launch_bounds__(THREADS)
    layer_norm_backward(T *dx, A *statistics, const T *grad, const T *x, const W *weight, double eps, long long rows, int cols) {
  const layer_norm_detail::Backward<T, W, DX, EDGES> op{{grad, x}, {dx}, statistics, {weight, cols, 1}, A(eps), A(1) / cols, cols};
  jitkern::rows_on_chip<LANES, THREADS, VPT, MORE, EDGES>(op, rows, cols);
}
template <typename T, typename W, typename A, bool DX, bool EDGES, int THREADS>
__global__ void __launch_bounds__(THREADS)
    layer_norm_backward_long(T *dx, A *statistics, const T *grad, const T *x, const W *weight, double eps, int cols) {
  const layer_norm_detail::Backward<T, W, DX, EDGES> op{{grad, x}, {dx}, statistics, {weight, cols, 1}, A(eps), A(1) / cols, cols};
  jitkern::rows_read_twice<THREADS, EDGES>(op, cols);
}
template <typename T, typename W, typename A, bool DX, int LANES, int THREADS, int VPT, int STAGES>
__global__ void __launch_bounds__(THREADS, 1)
    layer_norm_backward_sums(T *dx, A *partial, const T *grad, const T *x, const W *weight, double eps, long long rows, int cols) {
  const layer_norm_detail::Backward<T, W, DX, false> op{{grad, x}, {dx}, nullptr, {weight, cols, 1}, A(eps), A(1) / cols, cols};
  jitkern::rows_and_sums<LANES, THREADS, VPT, STAGES>(op, partial, rows, cols);
}
template <typename T, typename A, int THREADS, bool EDGES>
__global__ void __launch_bounds__(THREADS)
    layer_norm_backward_columns(A *partial, const T *grad, const T *x, A *statistics, long long rows, int cols) {
  const layer_norm_detail::Backward<T, T, false, EDGES> op{{grad, x}, {}, statistics, {nullptr, cols, 1}, 0, 0, cols};
  jitkern::column_sums<THREADS, EDGES>(op, partial, rows, cols);
}
template <typename W, typename A, int DEPTH>
__global__ void __launch_bounds__(32 * DEPTH)
    layer_norm_backward_total(W *dweight, W *dbias, const A *partial, int count, int cols) {
  jitkern::add_partials<DEPTH>(dweight, dbias, partial, count, cols);
}
