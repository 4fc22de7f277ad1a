// The k largest elements of each row in order: long rows as in largest.cuh, short ones by a warp each.
#include "largest.cuh"

namespace jitkern {

struct Count {
  __device__ unsigned long long weight(float) const { return 1; }
};

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
  static_assert(sizeof(Search) == 40992, "MEMORY of kernel.py");
  Search &memory = *reinterpret_cast<Search *>(dynamic);
  const long long r = blockIdx.x;
  const LongRow<T> row(x + r * columns, columns, shift, chunks);
  wait_for_inputs();
  Searcher<T> in(row, (const unsigned *)groups + r * row.groups, memory, reinterpret_cast<unsigned *>(&memory + 1));
  const unsigned limit = in.limit_of(k);
  unsigned n = limit != ~0u || columns <= POOL ? in.fill_pool(limit) : POOL + 1;
  if (n > POOL)  // too many reach the limit: ties, or a row whose large elements lie together
    n = in.collect(0, in.search(Count(), 0, ~0ull, 0, k).key);
  order(memory.pool, n);
  for (int i = threadIdx.x; i < k; i += SEARCH_THREADS) {
    const unsigned column = column_in(memory.pool[i]);
    values[r * k + i] = row.x[column], indices[r * k + i] = column;
  }
}

// Rows of up to 32 * E columns, which a warp sorts in registers by a bitonic network (Batcher 1968). Key
// number 32 * e + lane is keys[e] of a lane.
template <typename T, int E>
__global__ void __launch_bounds__(256)
    topk_short(T *values, long long *indices, const T *x, long long rows, int columns, int k) {
  using namespace jitkern;
  const long long r = blockIdx.x * 8ll + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (r >= rows) return;
  x += r * columns;
  Key keys[E];
#pragma unroll
  for (int e = 0; e < E; e++) {
    const int column = 32 * e + lane;
    keys[e] = column < columns ? key_of(rank_of((float)x[column]), column) : ~0ull;
  }
#pragma unroll
  for (int size = 2; size <= 32 * E; size *= 2)
#pragma unroll
    for (int step = size / 2; step; step /= 2) {
      Key next[E];
#pragma unroll
      for (int e = 0; e < E; e++) {
        const int at = 32 * e + lane;
        const Key own = keys[e];
        const Key other = step >= 32 ? keys[e ^ step / 32] : __shfl_xor_sync(~0u, own, step);
        const bool smaller = ((at & size) == 0) == ((at & step) == 0);  // whether this place gets the smaller key
        next[e] = smaller == (other < own) ? other : own;
      }
#pragma unroll
      for (int e = 0; e < E; e++) keys[e] = next[e];
    }
#pragma unroll
  for (int e = 0; e < E; e++)
    if (const int i = 32 * e + lane; i < k) {
      const unsigned column = column_in(keys[e]);
      values[r * k + i] = x[column], indices[r * k + i] = column;
    }
}
