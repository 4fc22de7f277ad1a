// Private. Numbers of 8 bits in units of the largest of their row: int8, or float8_e4m3fn.
#pragma once
#include <cuda_fp8.h>

#include "rows.cuh"

namespace jitkern {

template <int BYTES> struct Word;
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned; };
template <> struct Word<8> { using type = uint2; };

// q = x * scale, rounded to nearest even. The sum of 1.5 * 2^23 and a number has its integer in its last bits. The product
// is rounded first, as on the CPU: half of the largest number is often there, and halfway between two.
template <int V> __device__ __forceinline__ void quantize(signed char (&q)[V], const float (&x)[V], float scale) {
#pragma unroll
  for (int i = 0; i < V; i++) q[i] = (signed char)__float_as_uint(__fadd_rn(__fmul_rn(x[i], scale), 12582912.f));
}
template <int V> __device__ __forceinline__ void quantize(__nv_fp8_e4m3 (&q)[V], const float (&x)[V], float scale) {
#pragma unroll
  for (int i = 0; i < V; i += 2) {
    const float2 both = make_float2(x[i] * scale, x[i + 1] * scale);
    const __nv_fp8x2_storage_t pair = __nv_cvt_float2_to_fp8x2(both, __NV_SATFINITE, __NV_E4M3);
    q[i].__x = (__nv_fp8_storage_t)pair, q[i + 1].__x = (__nv_fp8_storage_t)(pair >> 8);
  }
}
__host__ __device__ constexpr float largest(const signed char *) { return 127; }
__host__ __device__ constexpr float largest(const __nv_fp8_e4m3 *) { return 448; }

// The unit of a row whose largest number is `top`, at least the smallest normal float, and numbers per unit: both are finite
// unless `top` is not. A row of zeros has 0 of both.
template <typename Q, typename A> __device__ __forceinline__ float unit_of(A top) {
  return top > 0 ? fmaxf(float(top) / largest((const Q *)nullptr), 0x1p-126f) : float(top);
}
template <typename Q, typename A> __device__ __forceinline__ A per_unit_of(A top) {
  return top > 0 ? min(largest((const Q *)nullptr) / top, A(0x1p126f)) : A(0);
}

// The V numbers of a row from `column` on, at `row`; those beyond the row's ends are left out.
template <bool EDGES, int V, typename Q>
__device__ __forceinline__ void store_quantized(Q *row, const Q (&q)[V], int column, int cols) {
  using Bytes = typename Word<V>::type;
  Q *to = row + column;
  if (!EDGES || (column >= 0 && column <= cols - V && (unsigned long long)to % V == 0))
    return __stcs((Bytes *)to, reinterpret_cast<const Bytes &>(q));
#pragma unroll
  for (int i = 0; i < V; i++)
    if ((unsigned)(column + i) < (unsigned)cols) to[i] = q[i];
}

// q = x / units[row], an Op of rows.cuh. A row with NaN has the unit NaN, one with an infinity has infinity.
template <typename T_, typename Q, bool EDGES> struct QuantizedRows {
  using T = T_;
  using A = widened<T>;
  struct State { A top; };
  struct Row { A scale; long long start; };
  static constexpr int INPUTS = 1, OUTPUTS = 0, V = vector_size<T>;
  const T *in[1];
  T *out[1];
  Q *quantized;
  float *units;
  int cols;

  static __device__ __forceinline__ A most(A a, A b) { return b > a || b != b ? b : a; }  // NaN is the largest
  __device__ State none() const { return {0}; }
  __device__ A padding() const { return 0; }
  template <int N> __device__ State add(State s, const A (&v)[1][N], int) const {
#pragma unroll
    for (int i = 0; i < N; i++) s.top = most(s.top, fabs(v[0][i]));
    return s;
  }
  __device__ State merge(State a, State b) const { return {most(a.top, b.top)}; }
  __device__ Row row(State s, long long row, bool first) const {
    if (first) units[row] = unit_of<Q>(s.top);
    return {per_unit_of<Q>(s.top), row * cols};
  }
  template <class Y> __device__ void results(Row r, const A (&v)[1][V], int column, Y &) const {
    alignas(8) Q q[V];
    float numbers[V];
#pragma unroll
    for (int i = 0; i < V; i++) numbers[i] = float(v[0][i]);
    quantize(q, numbers, float(r.scale));
    store_quantized<EDGES>(quantized + r.start, q, column, cols);
  }
};

}  // namespace jitkern
