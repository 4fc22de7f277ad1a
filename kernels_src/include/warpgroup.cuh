// Private. Matrix instructions of four warps (wgmma), of sm_90a alone. What threads wrote to shared memory is fenced by
// `fence_memory` of barriers.cuh before they read it.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace jitkern::warpgroup {

// Before instructions whose registers were written by others; after them, `commit`.
__device__ __forceinline__ void fence_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until all but the last LEFT of what was committed is done.
template <int LEFT> __device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// Keeps the compiler from moving sums while instructions add to them.
template <int M> __device__ __forceinline__ void keep(float (&c)[M][4]) {
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[m][i])::"memory");
}

// Describes b in shared memory: 8 numbers k of 8 columns are 128 bytes, 16 of each column. How many bytes it is to the
// next 8 numbers k, and to the next 8 columns.
__device__ __forceinline__ unsigned long long described(unsigned b, unsigned next_k, unsigned next_columns) {
  return (unsigned long long)(next_columns >> 4) << 32 | (next_k >> 4) << 16 | b >> 4;
}

// c = a * b, or c += a * b, for 64 rows, 16 numbers k and 16, 32 or 64 columns. A warp has 16 rows of a and c, in the
// registers that mma.m16n8k16 has them in.
#define JITKERN_PLACES_16 "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, add, 1, 1, 0; }"
#define JITKERN_PLACES_32                                                                                                         \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, add, 1, 1, 0; }"
#define JITKERN_PLACES_64                                                                                                         \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "     \
  "%26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, add, 1, 1, 0; }"
#define JITKERN_SUMS(m) "+f"(c[m][0]), "+f"(c[m][1]), "+f"(c[m][2]), "+f"(c[m][3])
#define JITKERN_SUMS_16 JITKERN_SUMS(0), JITKERN_SUMS(1)
#define JITKERN_SUMS_32 JITKERN_SUMS_16, JITKERN_SUMS(2), JITKERN_SUMS(3)
#define JITKERN_SUMS_64 JITKERN_SUMS_32, JITKERN_SUMS(4), JITKERN_SUMS(5), JITKERN_SUMS(6), JITKERN_SUMS(7)
#define JITKERN_MULTIPLY(COLUMNS, ADD, TYPE, T)                                                                                   \
  __device__ __forceinline__ void multiply(float (&c)[COLUMNS / 8][4], const unsigned (&a)[4], unsigned long long b, int add,     \
                                           const T *) {                                                                           \
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %" #ADD ", 0; wgmma.mma_async.sync.aligned.m64n" #COLUMNS                    \
                 "k16.f32." TYPE "." TYPE " " JITKERN_PLACES_##COLUMNS                                                            \
                 : JITKERN_SUMS_##COLUMNS                                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                                                 \
  }
JITKERN_MULTIPLY(16, 13, "bf16", __nv_bfloat16)
JITKERN_MULTIPLY(32, 21, "bf16", __nv_bfloat16)
JITKERN_MULTIPLY(64, 37, "bf16", __nv_bfloat16)
JITKERN_MULTIPLY(16, 13, "f16", __half)
JITKERN_MULTIPLY(32, 21, "f16", __half)
JITKERN_MULTIPLY(64, 37, "f16", __half)
#undef JITKERN_MULTIPLY
#undef JITKERN_SUMS_64
#undef JITKERN_SUMS_32
#undef JITKERN_SUMS_16
#undef JITKERN_SUMS
#undef JITKERN_PLACES_64
#undef JITKERN_PLACES_32
#undef JITKERN_PLACES_16

}  // namespace jitkern::warpgroup
