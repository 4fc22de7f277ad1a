#include "rows.cuh"

template <typename T_> struct Unit {
  using T = T_;
  using A = jitkern::widened<T>;  // float, or double for double
  struct State { A squares; };
  struct Row { A by; };
  static constexpr int INPUTS = 1, OUTPUTS = 1;
  const T *in[1];
  T *out[1];

  __device__ State none() const { return {0}; }
  __device__ A padding() const { return 0; }
  template <int V> __device__ State add(State s, const A (&v)[1][V], int column) const {
    for (int i = 0; i < V; i++) s.squares += v[0][i] * v[0][i];
    return s;
  }
  __device__ State merge(State a, State b) const { return {a.squares + b.squares}; }
  __device__ Row row(State s, long long row, bool first) const { return {rsqrt(s.squares)}; }
  template <int V> __device__ void results(Row r, const A (&v)[1][V], int column, A (&y)[1][V]) const {
    for (int i = 0; i < V; i++) y[0][i] = v[0][i] * r.by;
  }
};

template <typename T> __global__ void __launch_bounds__(128) unit(T *out, const T *x, long long rows, int cols) {
  jitkern::rows_on_chip<128, 128, 4, 0, true>(Unit<T>{{x}, {out}}, rows, cols);
}
