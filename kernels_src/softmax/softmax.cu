// out[r, i] = exp(x[r, i] - m) / d, where m = max_i x[r, i] and d = sum_i exp(x[r, i] - m) are found together:
// (m, d) + x = (n, d * exp(m - n) + exp(x - n)), n = max(m, x).   Milakov & Gimelshein 2018. One block a row.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace softmax_detail {

template <typename T> struct accumulator { using type = float; };
template <> struct accumulator<double> { using type = double; };

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline double larger(double a, double b) { return fmax(a, b); }
// Finite, so that a row that begins with -inf (a mask) does not turn into NaN.
__device__ inline void lowest(float& x) { x = -3.402823466e38f; }
__device__ inline void lowest(double& x) { x = -1.7976931348623157e308; }

template <typename A> struct normalizer {
  A m, d;
  __device__ void add(A m2, A d2) {
    const A n = larger(m, m2);
    d = d * exponential(m - n) + d2 * exponential(m2 - n);
    m = n;
  }
};

template <typename A> __device__ A block_sum(A value) {
  __shared__ A partial[32];
  for (int i = 16; i; i /= 2) value += __shfl_xor_sync(~0u, value, i);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
  for (int w = 0; w < blockDim.x / 32; w++) value += partial[w];
  return value;
}

template <typename A> __device__ normalizer<A> block_normalizer(normalizer<A> v) {
  __shared__ A m[32], d[32];
  for (int i = 16; i; i /= 2) v.add(__shfl_xor_sync(~0u, v.m, i), __shfl_xor_sync(~0u, v.d, i));
  if (threadIdx.x % 32 == 0) m[threadIdx.x / 32] = v.m, d[threadIdx.x / 32] = v.d;
  __syncthreads();
  v = {m[0], d[0]};
  for (int w = 1; w < blockDim.x / 32; w++) v.add(m[w], d[w]);
  return v;
}

}  // namespace softmax_detail

template <typename T>
__global__ void softmax(T* __restrict__ out, const T* __restrict__ x, long long cols) {
  using namespace softmax_detail;
  using A = typename accumulator<T>::type;
  x += blockIdx.x * cols;
  out += blockIdx.x * cols;
  normalizer<A> v;
  lowest(v.m);
  v.d = 0;
  for (long long i = threadIdx.x; i < cols; i += blockDim.x) v.add(A(x[i]), 1);
  v = block_normalizer(v);
  for (long long i = threadIdx.x; i < cols; i += blockDim.x) out[i] = T(exponential(A(x[i]) - v.m) / v.d);
}

// dx[r, i] = out[r, i] * (grad[r, i] - sum_j grad[r, j] * out[r, j])
template <typename T>
__global__ void softmax_backward(T* __restrict__ dx, const T* __restrict__ grad, const T* __restrict__ out,
                                 long long cols) {
  using namespace softmax_detail;
  using A = typename accumulator<T>::type;
  const long long start = blockIdx.x * cols;
  A sum = 0;
  for (long long i = threadIdx.x; i < cols; i += blockDim.x) sum += A(grad[start + i]) * A(out[start + i]);
  sum = block_sum(sum);
  for (long long i = threadIdx.x; i < cols; i += blockDim.x)
    dx[start + i] = T(A(out[start + i]) * (A(grad[start + i]) - sum));
}
