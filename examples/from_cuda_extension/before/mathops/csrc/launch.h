#pragma once
#if defined(WITH_CUDA) || defined(__CUDACC__)
#include <cuda_runtime_api.h>

void launch_axpy(float* out, const float* x, const float* y, float a, long long n, cudaStream_t stream);
void launch_half_squares(float* out, const float* x, float half, long long n, cudaStream_t stream);
#endif
