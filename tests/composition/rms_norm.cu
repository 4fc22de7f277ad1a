#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "epilogue.h"
#include "prologue.h"

template <typename T> struct accumulator { using type = float; };
template <> struct accumulator<double> { using type = double; };

// A warp a row.
template <typename T>
__global__ void rms_norm(T* out, const T* x, const T* weight, double eps, long long n PROLOGUE_PARAMETERS EPILOGUE_PARAMETERS) {
  using A = typename accumulator<T>::type;
  const long long row = blockIdx.x;
  x += row * n, out += row * n;
  A sum = 0;
  for (long long i = threadIdx.x; i < n; i += 32) {
    const A value = PROLOGUE(A(x[i]), row, i);
    sum += value * value;
  }
  for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
  const A scale = 1 / sqrt(sum / n + A(eps));
  for (long long i = threadIdx.x; i < n; i += 32) {
    const A value = PROLOGUE(A(x[i]), row, i);
    out[i] = T(EPILOGUE(value * scale * A(weight[i]), row, i));
  }
}
