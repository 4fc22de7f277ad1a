// Weights of 4 bits in the forms of low_bit.cuh and int4_warpgroups.cuh, and their values as a matrix.
#include "int4_warpgroups.cuh"

namespace low_bit = jitkern::low_bit;

template <typename T, int GROUP, int ZEROS, bool EDGES> using Int4 = low_bit::Int4<T, GROUP, ZEROS, EDGES>;

template <typename T, int GROUP, int ZEROS, bool EDGES, int NT, int WARPS, int DEPTH>
__global__ void __launch_bounds__(WARPS * 32, 32 / WARPS)
    w4a16_few(T *y, const T *x, const int *q, const T *scale, const void *zero, const T *bias, int M, int N, int K) {
  using F = Int4<T, GROUP, ZEROS, EDGES>;
  const F f{(const uint4 *)q, scale, (const typename F::Zero *)zero, N, K / GROUP};
  low_bit::few_tokens<F, NT, WARPS, DEPTH>(f, low_bit::Result<T, float>{y, nullptr, nullptr, bias, M, N}, x, K);
}
template <typename T, int GROUP, int ZEROS, bool EDGES, int WARPS, int CHUNK, int DEPTH>
__global__ void __launch_bounds__(WARPS * 32, 1)
    w4a16_few_streamed(T *y, const T *x, const int *q, const T *scale, const void *zero, const T *bias,
                       unsigned long long *handed, int M, int N, int K) {
  using F = Int4<T, GROUP, ZEROS, EDGES>;
  const F f{(const uint4 *)q, scale, (const typename F::Zero *)zero, N, K / GROUP};
  low_bit::few_tokens_streamed<F, WARPS, CHUNK, DEPTH>(f, low_bit::Result<T, float>{y, nullptr, nullptr, bias, M, N}, x, K, handed);
}
template <typename T, int GROUP, int ZEROS, bool EDGES, int NT, int MT, int WARPS, int DEPTH>
__global__ void __launch_bounds__(WARPS * 32, low_bit::blocks_of<Int4<T, GROUP, ZEROS, EDGES>>(NT, MT, WARPS))
    w4a16_many(T *y, const T *x, const int *q, const T *scale, const void *zero, const T *bias, float *partial,
               unsigned *counters, int M, int N, int K) {
  using F = Int4<T, GROUP, ZEROS, EDGES>;
  const F f{(const uint4 *)q, scale, (const typename F::Zero *)zero, N, K / GROUP};
  low_bit::many_tokens<F, NT, MT, WARPS, DEPTH>(f, low_bit::Result<T, float>{y, nullptr, nullptr, bias, M, N}, x, K, partial, counters);
}

// Grid: MT * K / 256.
template <typename T, int MT>
__global__ void __launch_bounds__(256) order_tokens(uint4 *ordered, const T *x, int M, int K) {
  low_bit::order_tokens<MT>(ordered, x, M, K);
}
template <typename T, int ZEROS, int MT, int WARPGROUPS, int DEPTH, int PIECES, int BLOCKS, bool ORDERED>
__global__ void __launch_bounds__(WARPGROUPS * 128 + (ORDERED ? 32 : 128), BLOCKS)
    w4a16_wide(T *y, const T *x, const int *q, const T *scale, const void *zero, const T *bias, float *partial,
               unsigned *counters, int M, int N, int K) {
  using F = Int4<T, 128, ZEROS, false>;
  const F f{(const uint4 *)q, scale, (const typename F::Zero *)zero, N, K / 128};
  low_bit::wide_tokens<T, ZEROS, MT, WARPGROUPS, DEPTH, PIECES, ORDERED>(f, low_bit::Result<T, float>{y, nullptr, nullptr, bias, M, N}, x, K, partial, counters);
}

// A warp for a tile of 16 rows and 64 k. Grid: tiles * (K / 64) / 8, rounded up.
template <typename T, int GROUP, int ZEROS>
__global__ void __launch_bounds__(256) dequantize_int4(T *w, const uint4 *q, const T *scale, const void *zero, int N, int K) {
  using Zero = typename low_bit::ZeroOf<T, ZEROS>::type;
  const long long at = (long long)blockIdx.x * 8 + threadIdx.x / 32, pieces = K / 64, tiles = (N + 15) / 16;
  if (at >= tiles * pieces) return;
  const int lane = threadIdx.x % 32, t = lane % 4;
  const long long row0 = at / pieces * 16 + lane / 4 * 2;
  const int k0 = at % pieces * 64;
  const uint4 words = jitkern::load_once(q + at * 32 + lane);
  const unsigned word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const long long row = row0 + h, of = (long long)(k0 / GROUP) * N + row;
    if (row >= N) return;
    const float s = jitkern::wide(scale[of]);
    float whole = 8, added = 0;
    if (ZEROS == low_bit::WHOLE_ZEROS) whole = ((const unsigned char *)zero)[of];
    if constexpr (ZEROS == low_bit::ADDED_ZEROS) added = jitkern::wide(((const Zero *)zero)[of]);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      jitkern::Vector<T, 8> values;
#pragma unroll
      for (int j = 0; j < 8; j++)
        jitkern::round_to(values.at[j], fmaf(float(word[i * 2 + h] >> (j / 2 + j % 2 * 4) * 4 & 15) - whole, s, added));
      jitkern::store<8>(w + row * K + k0 + i * 32 + t * 8, values);
    }
  }
}
