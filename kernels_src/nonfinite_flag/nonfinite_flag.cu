// flag |= code if a value is infinite or NaN.
#include "nonfinite.cuh"
#include "tensor_table.h"

template <typename T, int EXPONENT, int CHUNK>
__global__ void __launch_bounds__(512) nonfinite_flag_tensor(int* flag, const T* x, long long n, long long code) {
  if (is_set(flag, code)) return;
  const long long begin = blockIdx.x * (long long)CHUNK;
  const long long count = n - begin < CHUNK ? n - begin : CHUNK;
  if (any_nonfinite<EXPONENT>(x + begin, count) && threadIdx.x == 0) atomicOr(flag, int(code));
}

// One block for each chunk of each tensor of a list.
template <typename T, int N, int EXPONENT, int CHUNK>
__global__ void __launch_bounds__(512)
    nonfinite_flag(int* flag, const __grid_constant__ jitkern::Table<const T, N> table, long long code) {
  if (is_set(flag, code)) return;
  const jitkern::Chunk c = table.chunk(blockIdx.x, CHUNK);
  if (any_nonfinite<EXPONENT>(table.data[c.tensor] + c.begin, c.end - c.begin) && threadIdx.x == 0)
    atomicOr(flag, int(code));
}
