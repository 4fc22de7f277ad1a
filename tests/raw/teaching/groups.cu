// Cooperative groups and a real CUDA header beside the host's.
#include <cooperative_groups.h>
#include <cuda_fp16.h>
#include <iostream>
#include "common.h"
namespace cg = cooperative_groups;

__global__ void sum(float *out, const __half *x, int n) {
  auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  float total = 0;
  for (int i = threadIdx.x; i < n; i += 32) total += square(__half2float(x[i]));
  for (int k = 16; k > 0; k /= 2) total += warp.shfl_down(total, k);
  if (threadIdx.x == 0) *out = total;
}

#ifndef __CUDACC_RTC__
int main() {
  float *out;
  check(cudaMalloc(&out, sizeof(float)), __LINE__);
  sum<<<1, 32>>>(out, nullptr, 0);
  std::cout << "done" << std::endl;
}
#endif
