#pragma once
#include <stdexcept>
#include <string>

inline void check(cudaError_t status, int line) {
  if (status != cudaSuccess) throw std::runtime_error("line " + std::to_string(line));
}

__device__ inline float square(float x) { return x * x; }
