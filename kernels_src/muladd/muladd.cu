// out[i] = a[i] * b[i] + c[i], rounded once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ float mul_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ double mul_add(double a, double b, double c) { return fma(a, b, c); }
__device__ __half mul_add(__half a, __half b, __half c) { return __float2half(fmaf(__half2float(a), __half2float(b), __half2float(c))); }
__device__ __nv_bfloat16 mul_add(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
  return __float2bfloat16(fmaf(__bfloat162float(a), __bfloat162float(b), __bfloat162float(c)));
}

template <typename T>
__global__ void muladd(T* __restrict__ out, const T* __restrict__ a, const T* __restrict__ b,
                       const T* __restrict__ c, long long n) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) out[i] = mul_add(a[i], b[i], c[i]);
}
