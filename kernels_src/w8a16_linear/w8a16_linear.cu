// Weights of 8 bits and x of 16 in the two forms of low_bit.cuh, and the values of weights as a matrix.
#include "low_bit.cuh"

namespace low_bit = jitkern::low_bit;

template <typename T, typename S, int NT, int WARPS, int DEPTH>
__global__ void __launch_bounds__(WARPS * 32, 32 / WARPS)
    w8a16_few(T *y, const T *x, const signed char *q, const S *scale, const T *bias, int M, int N, int K) {
  const low_bit::Result<T, S> result{y, scale, nullptr, bias, M, N};
  low_bit::few_tokens<low_bit::Int8<T>, NT, WARPS, DEPTH>(low_bit::Int8<T>{q, N, K}, result, x, K);
}
template <typename T, typename S, int NT, int MT, int WARPS, int DEPTH>
__global__ void __launch_bounds__(WARPS * 32, low_bit::blocks_of<low_bit::Int8<T>>(NT, MT, WARPS))
    w8a16_many(T *y, const T *x, const signed char *q, const S *scale, const T *bias, float *partial, unsigned *counters, int M,
               int N, int K) {
  const low_bit::Result<T, S> result{y, scale, nullptr, bias, M, N};
  low_bit::many_tokens<low_bit::Int8<T>, NT, MT, WARPS, DEPTH>(low_bit::Int8<T>{q, N, K}, result, x, K, partial, counters);
}

// Eight numbers of a row for a thread; columns is a multiple of 64. Grid: rows * columns / 8 / 256, rounded up.
template <typename T, typename S>
__global__ void __launch_bounds__(256) dequantize_int8(T *w, const signed char *q, const S *scale, int rows, int columns) {
  const long long at = ((long long)blockIdx.x * 256 + threadIdx.x) * 8;
  if (at >= (long long)rows * columns) return;
  const float s = jitkern::wide(scale[at / columns]);
  const uint2 bytes = *(const uint2 *)(q + at);
  jitkern::Vector<T, 8> values;
#pragma unroll
  for (int i = 0; i < 8; i++)
    jitkern::round_to(values.at[i], float((signed char)((i < 4 ? bytes.x : bytes.y) >> i % 4 * 8)) * s);
  jitkern::store<8>(w + at, values);
}
