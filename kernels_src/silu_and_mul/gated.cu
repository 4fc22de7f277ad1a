// out = f(gate) * up, where a row has all numbers of gate, then all of up. A thread takes one vector
// of gate and one of up: on an H200 the quickest form, see docs/pointwise.md.

#include "vectors.cuh"

namespace gated_detail {

// The few ulp of float that fast functions lose vanish where a result is rounded to 16 bits.
template <bool FAST> __device__ __forceinline__ float exponential(float x) { return FAST ? __expf(x) : expf(x); }
template <bool FAST> __device__ __forceinline__ double exponential(double x) { return exp(x); }
template <bool FAST> __device__ __forceinline__ float inverse(float x) { return FAST ? __fdividef(1.f, x) : 1 / x; }
template <bool FAST> __device__ __forceinline__ double inverse(double x) { return 1 / x; }

// Density and distribution function of the normal distribution. FAST: the latter from its ratio to the
// density, a polynomial of 1 / (1 + 0.4 |x|) fitted by least squares, within 1.2e-7 and without a branch.
template <bool FAST, typename A> __device__ __forceinline__ void normal(A x, A& density, A& distribution) {
  density = A(0.3989422804014327) * exponential<FAST>(A(-0.5) * x * x);
  if constexpr (FAST) {
    const float t = inverse<true>(fmaf(0.4f, fabsf(x), 1.f));
    float p = fmaf(-0.0228356831f, t, 0.246146809f);
    p = fmaf(p, t, -0.836733717f);
    p = fmaf(p, t, 1.0494441f);
    p = fmaf(p, t, -0.076783319f);
    p = fmaf(p, t, 0.505139557f);
    p = fmaf(p, t, 0.388936414f);
    const float tail = density * (p * t);
    distribution = x < 0 ? tail : 1 - tail;
  } else if constexpr (sizeof(A) == 4) {
    distribution = normcdff(x);
  } else {
    distribution = normcdf(x);
  }
}

// f(x) and f'(x)
template <typename A> struct Value { A f, slope; };

enum { SILU, GELU, GELU_TANH, RELU2 };

template <int KIND, bool FAST, typename A> __device__ __forceinline__ Value<A> activation(A x) {
  if constexpr (KIND == RELU2) {
    const A r = x < 0 ? 0 : x;
    return {r * r, 2 * r};
  } else if constexpr (KIND == GELU) {
    A density, p;
    normal<FAST>(x, density, p);
    return {x * p, p + x * density};
  } else {  // x sigmoid(z); for GELU_TANH, (1 + tanh(z / 2)) / 2 is sigmoid(z)
    constexpr A a = A(1.5957691216057308), b = A(0.044715);
    const A z = KIND == SILU ? x : a * (x + b * x * x * x);
    const A e = exponential<FAST>(z < 0 ? z : -z), r = inverse<FAST>(1 + e);  // neither overflows nor cancels
    const A s = z < 0 ? e * r : r;
    return {x * s, s + x * (e * r * r) * (KIND == SILU ? 1 : a * (1 + 3 * b * x * x))};
  }
}

}  // namespace gated_detail

// n: vectors of the result. width: vectors of a row. I: an integer for n. step: of rows of gate_up,
// in elements.
template <typename T, typename I, int V, int KIND>
__global__ void __launch_bounds__(128)
    gated(T* __restrict__ out, const T* __restrict__ gate_up, long long n, long long width, long long step) {
  using namespace jitkern;
  using namespace gated_detail;
  using A = widened<T>;
  using i64 = long long;
  const I i = I(blockIdx.x) * 128 + threadIdx.x;
  if (i >= I(n)) return;
  const I row = i / I(width), column = i - row * I(width);
  const T* from = gate_up + i64(row) * step + i64(column) * V;
  const Vector<T, V> gate = load<V>(from), up = load<V>(from + width * V);
  Vector<T, V> y;
#pragma unroll
  for (int j = 0; j < V; j++)
    y.at[j] = T(activation<KIND, sizeof(T) == 2>(A(gate.at[j])).f * A(up.at[j]));
  store<V>(out + i64(i) * V, y);
}

// The gradient of gate_up, laid out as gate_up. grad_step: of rows of grad, in elements.
template <typename T, typename I, int V, int KIND>
__global__ void __launch_bounds__(128)
    gated_backward(T* __restrict__ out, const T* __restrict__ grad, const T* __restrict__ gate_up, long long n,
                   long long width, long long step, long long grad_step) {
  using namespace jitkern;
  using namespace gated_detail;
  using A = widened<T>;
  using i64 = long long;
  const I i = I(blockIdx.x) * 128 + threadIdx.x;
  if (i >= I(n)) return;
  const I row = i / I(width), column = i - row * I(width);
  const T* from = gate_up + i64(row) * step + i64(column) * V;
  const Vector<T, V> gate = load<V>(from), up = load<V>(from + width * V);
  const Vector<T, V> dy = load<V>(grad + i64(row) * grad_step + i64(column) * V);
  Vector<T, V> dgate, dup;
#pragma unroll
  for (int j = 0; j < V; j++) {
    const Value<A> value = activation<KIND, sizeof(T) == 2>(A(gate.at[j]));
    dgate.at[j] = T(A(dy.at[j]) * A(up.at[j]) * value.slope);
    dup.at[j] = T(A(dy.at[j]) * value.f);
  }
  T* to = out + (i64(row) * 2 * width + column) * V;
  store<V>(to, dgate);
  store<V>(to + width * V, dup);
}
