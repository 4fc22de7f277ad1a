// Private. Sums before each thread, minima and histograms of a block of BLOCK_THREADS threads. They are called by all
// threads of the block, and are of integers, whose sums do not depend on an order.
#pragma once

namespace jitkern {

constexpr int BLOCK_THREADS = 1024;

template <typename N> struct Part {
  N before, all;  // the sum of the threads before this one, and of all threads
};
template <typename N> __device__ __forceinline__ Part<N> sum_before_in_warp(N value) {
  N sum = value;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const N other = __shfl_up_sync(~0u, sum, i);
    if (threadIdx.x % 32 >= i) sum += other;
  }
  return {sum - value, __shfl_sync(~0u, sum, 31)};
}
template <typename N> __device__ Part<N> sum_before(N value) {
  __shared__ N of_warps[BLOCK_THREADS / 32];
  const Part<N> lanes = sum_before_in_warp(value);
  __syncthreads();  // the former call may still be read
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = lanes.all;
  __syncthreads();
  const Part<N> warps = sum_before_in_warp(of_warps[threadIdx.x % 32]);
  return {lanes.before + __shfl_sync(~0u, warps.before, threadIdx.x / 32), warps.all};
}

template <typename N> __device__ __forceinline__ N least_of_warp(N value) {
#pragma unroll
  for (int i = 16; i; i /= 2) value = min(value, __shfl_xor_sync(~0u, value, i));
  return value;
}
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ unsigned least_of_warp(unsigned value) { return __reduce_min_sync(~0u, value); }
#endif
// Make both values the least ones of the block.
template <typename N> __device__ void least_of_block(N &a, N &b) {
  __shared__ N of_warps[2][BLOCK_THREADS / 32];
  a = least_of_warp(a), b = least_of_warp(b);
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[0][threadIdx.x / 32] = a, of_warps[1][threadIdx.x / 32] = b;
  __syncthreads();
  a = least_of_warp(of_warps[0][threadIdx.x % 32]), b = least_of_warp(of_warps[1][threadIdx.x % 32]);
}

// 64-bit sums in shared memory, as two halves: an addition of 32 bits is one instruction there.
template <int N> struct Bins {
  unsigned low[N], high[N];

  __device__ void clear() {
    for (int i = threadIdx.x; i < N; i += BLOCK_THREADS) low[i] = high[i] = 0;
    __syncthreads();
  }
  template <int COUNT>
  __device__ __forceinline__ void add(const int (&bins)[COUNT], const unsigned long long (&values)[COUNT]) {
    unsigned before[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) before[i] = values[i] ? atomicAdd(&low[bins[i]], (unsigned)values[i]) : 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const bool carry = before[i] + (unsigned)values[i] < before[i];
      const unsigned rest = (unsigned)(values[i] >> 32) + carry;
      if (rest) atomicAdd(&high[bins[i]], rest);
    }
  }
  __device__ void count(int bin) { atomicAdd(&low[bin], 1u); }
  __device__ unsigned long long at(int bin) const { return (unsigned long long)high[bin] << 32 | low[bin]; }

  struct Place {
    int bin;                               // where the sum of the bins from 0 on reaches what is needed
    unsigned long long before, here, all;  // the sums of the bins before it, of it, and of all
  };
  // To be called by all threads, after the last addition.
  __device__ Place reach(unsigned long long need) const {
    __shared__ Place place;
    constexpr int each = (N + BLOCK_THREADS - 1) / BLOCK_THREADS;
    __syncthreads();
    unsigned long long sum = 0;
    for (int i = 0; i < each; i++)
      if (const int bin = threadIdx.x * each + i; bin < N) sum += at(bin);
    auto part = sum_before(sum);
    if (part.before < need && need <= part.before + sum) {
      int bin = threadIdx.x * each;
      while (part.before + at(bin) < need) part.before += at(bin++);
      place = {bin, part.before, at(bin), part.all};
    }
    __syncthreads();
    const Place found = place;
    __syncthreads();
    return {found.bin, found.before, found.here, part.all};
  }
};

}  // namespace jitkern
