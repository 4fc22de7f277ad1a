// x and weights of 8 bits in the two forms of low_bit.cuh, rows of x as 8 bits, and scales of what PyTorch multiplied.
#include "low_bit.cuh"
#include "quantized_rows.cuh"

namespace low_bit = jitkern::low_bit;

template <typename T, typename Q, int LANES, int THREADS, int VPT, int MORE, bool EDGES>
__global__ void __launch_bounds__(THREADS) quantize(Q *q, float *units, const T *x, long long rows, int cols) {
  jitkern::rows_on_chip<LANES, THREADS, VPT, MORE, EDGES>(jitkern::QuantizedRows<T, Q, EDGES>{{x}, {}, q, units, cols}, rows, cols);
}
template <typename T, typename Q, int THREADS, bool EDGES>
__global__ void __launch_bounds__(THREADS) quantize_long(Q *q, float *units, const T *x, int cols) {
  jitkern::rows_read_twice<THREADS, EDGES>(jitkern::QuantizedRows<T, Q, EDGES>{{x}, {}, q, units, cols}, cols);
}

template <typename T, typename S, int NT, int WARPS, int DEPTH>
__global__ void __launch_bounds__(WARPS * 32, 32 / WARPS)
    int8_few(T *y, const signed char *x, const float *units, const signed char *q, const S *scale, const T *bias, int M, int N, int K) {
  const low_bit::Result<T, S> result{y, scale, units, bias, M, N};
  low_bit::few_tokens<low_bit::Int8Both, NT, WARPS, DEPTH>(low_bit::Int8Both{{q, N, K}}, result, x, K);
}
template <typename T, typename S, int NT, int MT, int WARPS, int DEPTH>
__global__ void __launch_bounds__(WARPS * 32, low_bit::blocks_of<low_bit::Int8Both>(NT, MT, WARPS))
    int8_many(T *y, const signed char *x, const float *units, const signed char *q, const S *scale, const T *bias, int *partial,
              unsigned *counters, int M, int N, int K) {
  const low_bit::Result<T, S> result{y, scale, units, bias, M, N};
  low_bit::many_tokens<low_bit::Int8Both, NT, MT, WARPS, DEPTH>(low_bit::Int8Both{{q, N, K}}, result, x, K, partial, counters);
}

// Products of whole numbers become results. Grid: tokens * rows / 256, rounded up.
template <typename T, typename S>
__global__ void __launch_bounds__(256) scale_products(T *y, const int *products, const float *units, const S *scale, const T *bias, int M, int N) {
  const long long at = (long long)blockIdx.x * 256 + threadIdx.x;
  if (at < (long long)M * N) low_bit::Result<T, S>{y, scale, units, bias, M, N}.store(products[at], at / N, at % N);
}
