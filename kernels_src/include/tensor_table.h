/* Tables of tensors as parameters of CUDA kernels: what `k.tables(...)` of a launch function passes.

   A table lies in the memory of the parameters, at most 32,764 bytes for all parameters together
   (4096 before CUDA 12.1). Declare it as `const __grid_constant__ jitkern::Table<T, N> table`, so
   that no thread copies it. N is the `capacity` of the table. */
#pragma once

namespace jitkern {

struct Chunk { /* the elements from `begin` to before `end` of one tensor */
  int tensor;
  long long begin, end;
};

template <typename T, int N> struct Pointers { /* 8 bytes a tensor */
  T *data[N];
};

template <typename T, int N> struct Table { /* 20 bytes a tensor */
  T *data[N];         /* the first `count` are set */
  long long numel[N]; /* elements of each tensor */
  int first[N + 1];   /* the first chunk of each tensor; first[count]: all chunks */
  int count;          /* tensors */

  /* The chunk of this number, of `size` elements (the `chunk` that was given to `k.tables`). */
  __device__ __forceinline__ Chunk chunk(int number, long long size) const {
    int low = 0, high = count; /* first[low] <= number < first[high] */
    while (high - low > 1) {
      int middle = (low + high) / 2;
      if (first[middle] <= number) low = middle;
      else high = middle;
    }
    long long begin = (number - first[low]) * size, end = begin + size;
    return {low, begin, end < numel[low] ? end : numel[low]};
  }
};

} // namespace jitkern
