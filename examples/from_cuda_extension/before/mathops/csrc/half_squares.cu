#include "launch.h"

__global__ void half_squares(float* out, const float* x, float half, long long n) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) out[i] = half * x[i] * x[i];
}

void launch_half_squares(float* out, const float* x, float half, long long n, cudaStream_t stream) {
  if (n) half_squares<<<(n + 255) / 256, 256, 0, stream>>>(out, x, half, n);
}
