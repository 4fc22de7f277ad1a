// Adds ten floats: the whole of a first CUDA program.
#include <stdio.h>
#include <stdlib.h>
#include <cuda_runtime.h>

#define N 10

__global__ void vecadd(const float *a, const float *b, float *c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}

#ifndef __CUDACC_RTC__
int main(void) {
  float a[N], b[N], c[N];
  float *d_a, *d_b, *d_c;
  for (int i = 0; i < N; i++) { a[i] = i; b[i] = 2 * i; }
  cudaMalloc((void **)&d_a, N * sizeof(float));
  cudaMalloc((void **)&d_b, N * sizeof(float));
  cudaMalloc((void **)&d_c, N * sizeof(float));
  cudaMemcpy(d_a, a, N * sizeof(float), cudaMemcpyHostToDevice);
  cudaMemcpy(d_b, b, N * sizeof(float), cudaMemcpyHostToDevice);
  vecadd<<<1, N>>>(d_a, d_b, d_c, N);
  cudaMemcpy(c, d_c, N * sizeof(float), cudaMemcpyDeviceToHost);
  for (int i = 0; i < N; i++) printf("%g + %g = %g\n", a[i], b[i], c[i]);
  cudaFree(d_a); cudaFree(d_b); cudaFree(d_c);
  return EXIT_SUCCESS;
}
#endif
