// out[i] = x[i] + y[i]
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename T>
__global__ void vec_add(T* __restrict__ out, const T* __restrict__ x, const T* __restrict__ y, long long n) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] + y[i];
}
