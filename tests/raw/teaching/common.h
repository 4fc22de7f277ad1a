#pragma once
#include <stdexcept>
#include <string>

#ifndef __CUDACC_RTC__
inline void check(cudaError_t status, int line) {
  if (status != cudaSuccess) throw std::runtime_error("line " + std::to_string(line));
}
#endif

__device__ inline float square(float x) { return x * x; }
