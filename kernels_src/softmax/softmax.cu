// softmax and log_softmax of rows of scale * x, and their backward, in the forms of rows.cuh.
#include "rows.cuh"

namespace softmax_detail {
using namespace jitkern;

// out[i] = exp(scale * x[i]) / sum_j exp(scale * x[j]), or its logarithm
// SIGN: that of the scale. 0 is a scale of 1 over x * 0, without padding, which would become NaN.
template <typename T_, bool LOG, int SIGN> struct Forward {
  using T = T_;
  using A = widened<T>;
  using State = Exponentials<A>;
  struct Row { A base, of_sum; };
  static constexpr int INPUTS = 1, OUTPUTS = 1;
  const T *in[1];
  T *out[1];
  A scale, log2_scale;  // of -x where the SIGN is -1, so that the largest number has the largest power

  __device__ Forward(T *out, const T *x, double scale)
      : in{x}, out{out}, scale(SIGN ? A(fabs(scale)) : A(1)),
        log2_scale(A((SIGN ? fabs(scale) : 1) * 1.4426950408889634)) {}
  static __device__ __forceinline__ A number(A x) { return SIGN < 0 ? -x : SIGN ? x : x * A(0); }
  __device__ State none() const { return State::none(); }
  __device__ A padding() const { return number(-infinity<A>()); }
  template <int V> __device__ State add(State s, const A (&v)[1][V], int) const {
    A x[V];
#pragma unroll
    for (int i = 0; i < V; i++) x[i] = number(v[0][i]);
    return s.add(x, log2_scale);
  }
  __device__ State merge(State a, State b) const { return State::merged(a, b, log2_scale); }
  __device__ Row row(State s, long long, bool) const { return {s.base(), LOG ? log(s.sum) : 1 / s.sum}; }
  template <int V> __device__ void results(Row r, const A (&v)[1][V], int, A (&y)[1][V]) const {
#pragma unroll
    for (int i = 0; i < V; i++) {
      const A x = scaled_difference(number(v[0][i]), r.base, LOG ? scale : log2_scale);
      y[0][i] = LOG ? x - r.of_sum : power_of_2(x) * r.of_sum;
    }
  }
};

// dx = scale * out * (grad - sum_j grad[j] * out[j]); of the logarithm: scale * (grad - exp(out) * sum_j grad[j])
template <typename T_, bool LOG> struct Backward {
  using T = T_;
  using A = widened<T>;
  struct State { A sum; };
  using Row = State;
  static constexpr int INPUTS = 2, OUTPUTS = 1;
  const T *in[2];
  T *out[1];
  A scale;

  __device__ Backward(T *dx, const T *grad, const T *y, double scale) : in{grad, y}, out{dx}, scale(A(scale)) {}
  __device__ State none() const { return {0}; }
  __device__ A padding() const { return 0; }
  template <int V> __device__ State add(State s, const A (&v)[2][V], int) const {
#pragma unroll
    for (int i = 0; i < V; i++) s.sum += LOG ? v[0][i] : v[0][i] * v[1][i];
    return s;
  }
  __device__ State merge(State a, State b) const { return {a.sum + b.sum}; }
  __device__ Row row(State s, long long, bool) const { return s; }
  template <int V> __device__ void results(Row r, const A (&v)[2][V], int, A (&y)[1][V]) const {
#pragma unroll
    for (int i = 0; i < V; i++)
      y[0][i] = scale * (LOG ? v[0][i] - power_of_2(v[1][i] * A(1.4426950408889634)) * r.sum
                             : v[1][i] * (v[0][i] - r.sum));
  }
};

}  // namespace softmax_detail

template <typename T, bool LOG, int SIGN, int LANES, int THREADS, int VPT, int MORE, bool EDGES>
__global__ void __launch_bounds__(THREADS, jitkern::blocks_of<THREADS, VPT, MORE>) softmax(T *out, const T *x, double scale, long long rows, int cols) {
  jitkern::rows_on_chip<LANES, THREADS, VPT, MORE, EDGES>(softmax_detail::Forward<T, LOG, SIGN>(out, x, scale), rows, cols);
}
template <typename T, bool LOG, int SIGN, int THREADS, bool EDGES>
__global__ void __launch_bounds__(THREADS) softmax_long(T *out, const T *x, double scale, int cols) {
  jitkern::rows_read_twice<THREADS, EDGES>(softmax_detail::Forward<T, LOG, SIGN>(out, x, scale), cols);
}
template <typename T, bool LOG, int SIGN, int DEPTH>
__global__ void __launch_bounds__(32 * DEPTH) softmax_strided(T *out, const T *x, double scale, int cols, long long inner) {
  jitkern::rows_strided<DEPTH>(softmax_detail::Forward<T, LOG, SIGN>(out, x, scale), cols, inner);
}

template <typename T, bool LOG, int LANES, int THREADS, int VPT, int MORE, bool EDGES>
__global__ void __launch_bounds__(THREADS) softmax_backward(T *dx, const T *grad, const T *out, double scale, long long rows,
                                                            int cols) {
  const softmax_detail::Backward<T, LOG> op(dx, grad, out, scale);
  jitkern::rows_on_chip<LANES, THREADS, VPT, MORE, EDGES>(op, rows, cols);
}
template <typename T, bool LOG, int THREADS, bool EDGES>
__global__ void __launch_bounds__(THREADS) softmax_backward_long(T *dx, const T *grad, const T *out, double scale, int cols) {
  jitkern::rows_read_twice<THREADS, EDGES>(softmax_detail::Backward<T, LOG>(dx, grad, out, scale), cols);
}
template <typename T, bool LOG, int DEPTH>
__global__ void __launch_bounds__(32 * DEPTH) softmax_backward_strided(T *dx, const T *grad, const T *out, double scale,
                                                                       int cols, long long inner) {
  jitkern::rows_strided<DEPTH>(softmax_detail::Backward<T, LOG>(dx, grad, out, scale), cols, inner);
}
