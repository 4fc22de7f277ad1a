// A struct with host and device methods, constant memory, device printf, and a helper for both.
#include <cstdio>
#include <cstdint>
#include <string>
#define BOTH __host__ __device__
#define BOTH_INLINE BOTH inline

__constant__ float weights[4] = {1.f, 2.f, 3.f, 4.f};

struct Matrix {
  int width, height;
  float *elements;
#ifndef __CUDACC_RTC__
  Matrix(int w, int h) : width(w), height(h) {
    if (cudaMalloc(&elements, w * h * sizeof(float)) != cudaSuccess) fprintf(stderr, "no memory\n");
  }
  ~Matrix() { cudaFree(elements); }
#endif
  BOTH float at(int row, int column) const { return elements[row * width + column]; }
};

BOTH_INLINE float weigh(float x, std::size_t i) { return x * (i + 1); }

namespace demo {
__global__ void weighted(float *out, const float *x, int64_t n) {
  int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i < n) out[i] = weigh(x[i], 0) * weights[i % 4];
  if (x[0] != x[0]) printf("%s\n", "not a number {");
}
}  // namespace demo

#ifndef __CUDACC_RTC__
std::string describe(const Matrix &m) { return std::to_string(m.width) + R"(x{)"; }

#ifdef PROFILE
int main() { Matrix m(4, 4); return 1; }
#else
int main() {
  Matrix m(2, 2);
  demo::weighted<<<1, 4>>>(m.elements, m.elements, 4);
#if defined(SYNC)
  cudaDeviceSynchronize();
#endif
  printf("%s\n", describe(m).c_str());
}
#endif
#endif
