// Whether values are infinite or NaN, by their bits: the exponent of such a value is all ones.
// Memory is read in 16 bytes, once, and stays out of the L1 cache.
#pragma once

// The exponents of the values in a 32-bit word, and one in the lowest place of each: their sum
// reaches the sign, which the mask leaves free, only where an exponent is all ones.
template <int SIZE, int EXPONENT>  // bytes of a value, bits of its exponent
struct Word {
  // Of a double, the word is the high half.
  static constexpr unsigned one = SIZE == 2 ? 0x10001u << (15 - EXPONENT) : 1u << (31 - EXPONENT);
  static constexpr unsigned signs = SIZE == 2 ? 0x80008000u : 0x80000000u;
  static constexpr unsigned mask = signs - one;
  static __device__ unsigned carry(unsigned word) { return (word & mask) + one; }
};

__device__ __forceinline__ uint4 load_once(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

template <int SIZE, int EXPONENT>
__device__ __forceinline__ unsigned carries(const uint4& v) {
  using W = Word<SIZE, EXPONENT>;
  if constexpr (SIZE == 8) return W::carry(v.y) | W::carry(v.w);
  return W::carry(v.x) | W::carry(v.y) | W::carry(v.z) | W::carry(v.w);
}

// The same of one value, whose high half is the last of its words.
template <int SIZE, int EXPONENT, typename T>
__device__ __forceinline__ unsigned carry_of(const T* p) {
  using W = Word<SIZE, EXPONENT>;
  if constexpr (SIZE == 2)
    return W::carry(*reinterpret_cast<const unsigned short*>(p));
  else
    return W::carry(reinterpret_cast<const unsigned*>(p)[SIZE / 4 - 1]);
}

// Whether one of n values from p on, which the threads of the block read together, is not finite;
// every thread gets the answer.
template <int EXPONENT, typename T>
__device__ __forceinline__ bool any_nonfinite(const T* p, long long n) {
  constexpr int size = sizeof(T), wide = 16 / size, at_once = 4;
  unsigned bad = 0;
  // Values before the first whole 16 bytes, and after the last.
  long long head = (16 - reinterpret_cast<unsigned long long>(p) % 16) % 16 / size;
  if (head > n) head = n;
  const long long vectors = (n - head) / wide, tail = head + vectors * wide;
  if (threadIdx.x < head) bad |= carry_of<size, EXPONENT>(p + threadIdx.x);
  if (threadIdx.x < n - tail) bad |= carry_of<size, EXPONENT>(p + tail + threadIdx.x);

  const uint4* v = reinterpret_cast<const uint4*>(p + head);
  long long i = threadIdx.x;
  for (; i + (at_once - 1) * blockDim.x < vectors; i += at_once * blockDim.x) {
    uint4 part[at_once];
#pragma unroll
    for (int j = 0; j < at_once; j++) part[j] = load_once(v + i + j * blockDim.x);
#pragma unroll
    for (int j = 0; j < at_once; j++) bad |= carries<size, EXPONENT>(part[j]);
  }
  for (; i < vectors; i += blockDim.x) bad |= carries<size, EXPONENT>(load_once(v + i));
  return __syncthreads_or(bad & Word<size, EXPONENT>::signs);
}

// Whether the flag has all bits of the code already: nothing is left to find then. Another block
// may set them at any time; either answer is right. One thread asks, for all blocks read one address.
__device__ __forceinline__ bool is_set(const int* flag, long long code) {
  const int bits = int(code);
  return __syncthreads_or(threadIdx.x == 0 && (*(const volatile int*)flag & bits) == bits);
}
