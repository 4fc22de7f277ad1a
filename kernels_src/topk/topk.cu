// The k largest elements of each row in order; see largest.cuh.
#include "largest.cuh"

namespace jitkern {

struct Count {
  static constexpr bool counts = true;
  __device__ unsigned long long weight(float) const { return 1; }
  __device__ int bin(float) const { return 0; }
};

// Put keys in order, a power of two of them: a bitonic network (Batcher 1968).
__device__ inline void order_many(Key *keys, int n) {
  for (int size = 2; size <= n; size *= 2)
    for (int step = size / 2; step; step /= 2) {
      for (int i = threadIdx.x; i < n / 2; i += SEARCH_THREADS) {
        const int a = 2 * i - (i & (step - 1)), b = a + step;
        const Key first = keys[a], second = keys[b];
        if ((first > second) == ((a & size) == 0)) keys[a] = second, keys[b] = first;
      }
      __syncthreads();
    }
}

}  // namespace jitkern

template <typename T>
__global__ void __launch_bounds__(jitkern::GROUP_THREADS)
    groups_of(int *groups, const T *x, int columns, int shift, int chunks) {
  using namespace jitkern;
  const long long r = blockIdx.x / chunks;
  const LongRow<T> row(x + r * columns, columns, shift, chunks);
  write_groups(row, blockIdx.x % chunks, (unsigned *)groups + r * row.groups);
}

template <typename T>
__global__ void __launch_bounds__(jitkern::SEARCH_THREADS, 1)
    topk(T *values, long long *indices, const T *x, int columns, int k, int shift, int chunks, const int *groups) {
  using namespace jitkern;
  extern __shared__ uint4 dynamic[];
  static_assert(sizeof(Search) == 49184, "MEMORY of kernel.py");
  Search &memory = *reinterpret_cast<Search *>(dynamic);
  const long long r = blockIdx.x;
  const LongRow<T> row(x + r * columns, columns, shift, chunks);
  wait_for_groups();
  Searcher<T> in(row, (const unsigned *)groups + r * row.groups, memory, reinterpret_cast<unsigned *>(&memory + 1));
  const unsigned limit = in.limit_of(k);
  unsigned n = limit != ~0u || columns <= POOL ? in.fill_pool(limit) : POOL + 1;
  if (n > POOL) {  // too many reach the limit: ties, or a row whose large elements lie together
    Key first = 0, last = in.search(Count(), 0, ~0ull, -1, 0, k).key;
    n = in.collect(Count(), first, last, -1, memory.pool, POOL);
  }
  if (n <= FEW) {
    order_few(memory.pool, n);
  } else {
    int size = 2 * FEW;
    while (size < n) size *= 2;
    for (int i = n + threadIdx.x; i < size; i += SEARCH_THREADS) memory.pool[i] = ~0ull;
    __syncthreads();
    order_many(memory.pool, size);
  }
  for (int i = threadIdx.x; i < k; i += SEARCH_THREADS) {
    const unsigned column = column_in(memory.pool[i]);
    values[r * k + i] = row.x[column], indices[r * k + i] = column;
  }
}
