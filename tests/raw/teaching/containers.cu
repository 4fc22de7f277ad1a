// Thrust on the host, a lambda, timing, and overloaded kernels.
#include <chrono>
#include <random>
#ifndef __CUDACC_RTC__
#include <thrust/device_vector.h>
#include <thrust/host_vector.h>

auto now = [] { return std::chrono::steady_clock::now(); };
using Clock = std::chrono::steady_clock;
typedef thrust::device_vector<float> Vector;
#endif

__global__ void twice(float *x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }
__global__ void twice(double *x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }

#ifndef __CUDACC_RTC__
static double seconds(Clock::time_point since) {
  return std::chrono::duration<double>(Clock::now() - since).count();
}

int main() {
  std::mt19937 random(42);
  Vector v(32, 1.0f);
  auto start = now();
  twice<<<1, 32>>>(thrust::raw_pointer_cast(v.data()), 32);
  return seconds(start) > 1;
}
#endif
