// Private. The largest elements of long rows, without a sort of the row: two launches.
//
// 1. Blocks stream the rows once and write the smallest rank of each group of elements (ranked.h).
// 2. A block searches a row: k of the groups' best are no later than the k-th best of them, and so are
//    k elements; only groups that reach it are read again.
// 3. Where that leaves too many (ties, or no k at all), windows of keys are narrowed by histograms,
//    ten bits at a time, until few elements are left: a radix search by count or by weight.
//
// Sums are of integers, so nothing depends on the order in which threads arrive.
#pragma once
#include "block_sums.cuh"
#include "dependent_launch.cuh"
#include "ranked.h"
#include "rows.cuh"

namespace jitkern {

constexpr int GROUP_THREADS = 256;             // of the first launch
constexpr int SEARCH_THREADS = BLOCK_THREADS;  // of the second
constexpr int POOL = 4096;                     // elements that are kept for a search
constexpr int FEW = 256;                       // elements that are ordered by comparing all with all
constexpr int WINDOWS = 1024;                  // bins of a histogram

// ------------------------------------------------------------------ a row and its groups

__device__ __forceinline__ unsigned larger(unsigned a, unsigned b, const __nv_bfloat16 *) {
  const auto m = __hmax2_nan(reinterpret_cast<const __nv_bfloat162 &>(a), reinterpret_cast<const __nv_bfloat162 &>(b));
  return reinterpret_cast<const unsigned &>(m);
}
__device__ __forceinline__ unsigned larger(unsigned a, unsigned b, const __half *) {
  const auto m = __hmax2_nan(reinterpret_cast<const __half2 &>(a), reinterpret_cast<const __half2 &>(b));
  return reinterpret_cast<const unsigned &>(m);
}
__device__ __forceinline__ float larger_or_nan(float a, float b) { return a != a || a > b ? a : b; }
__device__ __forceinline__ unsigned larger(unsigned a, unsigned b, const float *) {
  return __float_as_uint(larger_or_nan(__uint_as_float(a), __uint_as_float(b)));
}

template <typename T> struct LongRow {
  static constexpr int V = vector_size<T>;
  const T *x;
  int columns;
  int lead;     // elements between 16 aligned bytes and the row's first element
  int vectors;  // of 16 bytes, the first and the last of which may be of other rows in part
  int shift;    // a group has 1 << shift vectors
  int groups;   // a multiple of the threads; those beyond the row are empty

  __device__ LongRow(const T *x, int columns, int shift, int chunks)
      : x(x), columns(columns), lead(elements_before<true>(x)), shift(shift), groups(chunks * GROUP_THREADS) {
    vectors = (int)(((long long)lead + columns + V - 1) / V);
  }
  // A vector of a group; neighbouring groups have neighbouring vectors.
  __device__ int vector_of(int group, int j) const {
    return ((group / GROUP_THREADS << shift) + j) * GROUP_THREADS + group % GROUP_THREADS;
  }
  __device__ int column_of(int vector) const { return vector * V - lead; }
  __device__ bool has(int column) const { return (unsigned)column < (unsigned)columns; }
  __device__ uint4 load(int vector) const {
    return load_vector<true>(x, column_of(vector), columns, -float_of(0x7f800000u));
  }
  // f(vector, its 16 bytes) for each vector of a group; four loads are on their way at once. A long
  // f is UNROLLED at the price of compile time.
  template <bool UNROLLED, typename F> __device__ __forceinline__ void each_vector(int group, F f) const {
    constexpr int at_once = 4;
    for (int j = 0; j < 1 << shift; j += at_once) {
      const int first = vector_of(group, j), n = min(at_once, 1 << shift);
      const int last = first + (n - 1) * GROUP_THREADS;
      uint4 raw[at_once];
      if (first >= vectors) return;
      if (column_of(first) >= 0 && last < vectors && column_of(last) <= columns - V) {
#pragma unroll
        for (int i = 0; i < at_once; i++)
          if (i < n) raw[i] = load_once(x + column_of(first + i * GROUP_THREADS));
      } else {
#pragma unroll
        for (int i = 0; i < at_once; i++) raw[i] = load(first + i * GROUP_THREADS);
      }
      if constexpr (UNROLLED) {
#pragma unroll
        for (int i = 0; i < at_once; i++)
          if (i < n) f(first + i * GROUP_THREADS, raw[i]);
      } else {
#pragma unroll 1
        for (int i = 0; i < n; i++) {
          f(first + i * GROUP_THREADS, raw[0]);
#pragma unroll
          for (int next = 1; next < at_once; next++) raw[next - 1] = raw[next];
        }
      }
    }
  }
  // The smallest rank of a group.
  __device__ unsigned rank_of_group(int group) const {
    if (vector_of(group, 0) >= vectors) return ~0u;
    float none[V];
#pragma unroll
    for (int e = 0; e < V; e++) none[e] = -float_of(0x7f800000u);
    uint4 most = narrow<T>(none);
    each_vector<true>(group, [&](int, const uint4 &v) {
      most.x = larger(most.x, v.x, x), most.y = larger(most.y, v.y, x);
      most.z = larger(most.z, v.z, x), most.w = larger(most.w, v.w, x);
    });
    float a[4 / sizeof(T)];
    widen(larger(larger(most.x, most.y, x), larger(most.z, most.w, x), x), a, x);
    if constexpr (sizeof(T) == 2) a[0] = larger_or_nan(a[0], a[1]);
    return rank_of(a[0]);
  }
};

// The first launch: the ranks of the groups of a chunk of a row.
template <typename T> __device__ __forceinline__ void write_groups(const LongRow<T> &row, int chunk, unsigned *groups) {
  let_next_begin();
  const int group = chunk * GROUP_THREADS + threadIdx.x;
  groups[group] = row.rank_of_group(group);
}

// ------------------------------------------------------------------ the search

__device__ __forceinline__ int bits_above(Key range, Key bins) {  // the least s with range >> s < bins
  const int bits = 64 - __clzll(range), free = 63 - __clzll(bins);
  return bits > free ? bits - free : 0;
}

// Put at most FEW keys in order: each goes to the place that is the number of smaller ones.
__device__ inline void order_few(Key *keys, int n) {
  constexpr int least = SEARCH_THREADS / FEW;
  const int each = n <= FEW / 4 ? 4 * least : n <= FEW / 2 ? 2 * least : least;  // threads for a key
  const int i = threadIdx.x / each;
  const Key own = i < n ? keys[i] : 0;
  int place = 0;
  for (int j = threadIdx.x % each; j < n; j += each) place += keys[j] < own;
  for (int step = 1; step < each; step *= 2) place += __shfl_xor_sync(~0u, place, step);
  __syncthreads();
  if (i < n && threadIdx.x % each == 0) keys[place] = own;
  __syncthreads();
}

// Put at most POOL keys in order by a bitonic network (Batcher 1968).
__device__ inline void order_many(Key *keys, int n) {
  int padded = 64;
  while (padded < n) padded *= 2;
  for (int i = n + threadIdx.x; i < padded; i += SEARCH_THREADS) keys[i] = ~0ull;
  __syncthreads();
  for (int size = 2; size <= padded; size *= 2)
    for (int step = size / 2; step; step /= 2) {
      for (int i = threadIdx.x; i < padded / 2; i += SEARCH_THREADS) {
        const int a = 2 * i - (i & (step - 1)), b = a + step;
        const Key first = keys[a], second = keys[b];
        if ((first > second) == ((a & size) == 0)) keys[a] = second, keys[b] = first;
      }
      // Steps of up to 32 stay within the 64 keys of a warp.
      const int next = step > 1 ? step / 2 : size;
      if (step > 32 || next > 32)
        __syncthreads();
      else
        __syncwarp();
    }
  __syncthreads();
}

__device__ inline void order(Key *keys, int n) {
  if (n <= FEW)
    order_few(keys, n);
  else
    order_many(keys, n);
}

struct Found {
  Key key;                  // the last element of the smallest prefix that reaches what is needed
  unsigned long long upto;  // the sum of that prefix
};

// The memory of a search.
struct alignas(16) Search {
  union {
    Bins<WINDOWS> windows;
    unsigned short listed[POOL];  // groups to read again
  };
  Key pool[POOL];
  Found found;
  unsigned count;
};

// Keys in order, shared among the THREADS first threads of the block: a warp, or all. What an element
// adds to the sum is measure.weight(value).
template <int THREADS, typename M> struct Ordered {
  const M &measure;
  Search &memory;
  int begin, end;  // of this thread
  Part<unsigned long long> part;

  static __device__ void wait() {
    if constexpr (THREADS == 32)
      __syncwarp();
    else
      __syncthreads();
  }
  __device__ unsigned long long weight(int i) const { return measure.weight(value_of(rank_in(memory.pool[i]))); }

  __device__ Ordered(const M &measure, Search &memory, int n) : measure(measure), memory(memory) {
    const int each = (n + THREADS - 1) / THREADS;
    begin = min(n, (int)threadIdx.x * each), end = min(n, begin + each);
    unsigned long long sum = 0;
    for (int i = begin; i < end; i++) sum += weight(i);
    if constexpr (THREADS == 32)
      part = sum_before_in_warp(sum);
    else
      part = sum_before(sum);
  }
  // The prefix that reaches `need`, where the sum is `before` at the first key.
  __device__ Found reach(unsigned long long before, unsigned long long need) const {
    before += part.before;
    for (int i = begin; i < end && before < need; i++) {
      const unsigned long long upto = before + weight(i);
      if (upto >= need) memory.found = {memory.pool[i], upto};
      before = upto;
    }
    wait();
    const Found found = memory.found;
    wait();
    return found;
  }
};

template <typename T> struct Searcher {
  const LongRow<T> &row;
  Search &memory;
  unsigned *ranks;  // of the groups, in shared memory
  unsigned best;    // the smallest rank of the row
  unsigned worst;   // and the largest of a group

  // Take over what the first launch wrote.
  __device__ Searcher(const LongRow<T> &row, const unsigned *groups, Search &memory, unsigned *ranks)
      : row(row), memory(memory), ranks(ranks) {
    unsigned least = ~0u, inverse = ~0u;
    for (int i = threadIdx.x; i < row.groups / 4; i += SEARCH_THREADS) {
      const uint4 four = __ldcg(reinterpret_cast<const uint4 *>(groups) + i);
      reinterpret_cast<uint4 *>(ranks)[i] = four;
      least = min(least, min(min(four.x, four.y), min(four.z, four.w)));
      const auto inverse_of = [](unsigned rank) { return rank == ~0u ? ~0u : ~rank; };
      inverse = min(inverse, min(min(inverse_of(four.x), inverse_of(four.y)),
                                 min(inverse_of(four.z), inverse_of(four.w))));
    }
    least_of_block(least, inverse);
    best = least, worst = ~inverse;
  }

  // A rank that at least `count` groups reach, and few more do.
  __device__ unsigned limit_of(unsigned count) {
    unsigned low = best, high = worst, need = count;
    for (;;) {
      const int s = bits_above(high - low, WINDOWS);
      memory.windows.clear();
      for (int g = threadIdx.x; g < row.groups; g += SEARCH_THREADS)
        if (ranks[g] >= low && ranks[g] <= high) memory.windows.count((ranks[g] - low) >> s);
      const auto place = memory.windows.reach(need);
      if (place.all < need) return ~0u;  // fewer groups than `count`
      low += (unsigned)place.bin << s;
      if (high - low > (1u << s) - 1) high = low + ((1u << s) - 1);
      need -= (unsigned)place.before;
      if (s == 0 || place.here <= need + count / 8 + 32) return high;
    }
  }

  __device__ void reset_count() {
    __syncthreads();
    if (threadIdx.x == 0) memory.count = 0;
    __syncthreads();
  }
  // Append the elements of which `hits` has a bit to the pool, as far as it has room.
  template <int N> __device__ __forceinline__ void keep(const float (&a)[N], int column, unsigned hits) {
    if (!hits) return;
    unsigned place = atomicAdd(&memory.count, (unsigned)__popc(hits));
#pragma unroll
    for (int e = 0; e < N; e++)
      if (hits >> e & 1) {
        if (place < POOL) memory.pool[place] = key_of(rank_of(a[e]), column + e);
        place++;
      }
  }

  // Put the elements whose rank is at most the limit into the pool; return their number, which may
  // be more than the pool holds.
  __device__ unsigned fill_pool(unsigned limit) {
    reset_count();
    for (int g = threadIdx.x; g < row.groups; g += SEARCH_THREADS)
      if (ranks[g] <= limit && ranks[g] != ~0u) {
        const unsigned place = atomicAdd(&memory.count, 1u);
        if (place < POOL) memory.listed[place] = g;
      }
    __syncthreads();
    const unsigned listed = memory.count;
    reset_count();
    if (listed > POOL) return listed;  // each has an element
    for (unsigned i = threadIdx.x; i < listed; i += SEARCH_THREADS)
      each_of(memory.listed[i], [&](const auto &a, int column) {
        unsigned hits = 0;
#pragma unroll
        for (int e = 0; e < LongRow<T>::V; e++)
          if (rank_of(a[e]) <= limit && row.has(column + e)) hits |= 1u << e;
        keep(a, column, hits);
      });
    __syncthreads();
    return memory.count;
  }

  // f(values, their first column) for the vectors of a group. Columns may lie outside of the row.
  template <typename F> __device__ __forceinline__ void each_of(int group, F f) {
    row.template each_vector<false>(group, [&](int vector, const uint4 &raw) {
      float a[LongRow<T>::V];
      widen<T>(raw, a);
      f(a, row.column_of(vector));
    });
  }
  // The same for all groups but those beyond the limit. Of `parts` blocks, this one takes its part.
  template <typename F> __device__ __forceinline__ void each(unsigned limit, F f, int part = 0, int parts = 1) {
    for (int g = part * SEARCH_THREADS + threadIdx.x; g < row.groups; g += parts * SEARCH_THREADS)
      if (ranks[g] <= limit && ranks[g] != ~0u) each_of(g, f);
  }
  // f(value, key) for the elements from low to high.
  template <typename F> __device__ __forceinline__ void between(Key low, Key high, F f) {
    const float smallest = value_of(rank_in(high)), largest = value_of(rank_in(low));  // NaN: none
    each(rank_in(high), [&](const auto &a, int column) {
#pragma unroll
      for (int e = 0; e < LongRow<T>::V; e++) {
        if (a[e] < smallest || a[e] > largest) continue;
        const Key key = key_of(rank_of(a[e]), column + e);
        if (key >= low && key <= high && row.has(column + e)) f(a[e], key);
      }
    });
  }

  // Put the elements from low to high into the pool; return their number, which may be more than the
  // pool holds.
  __device__ __forceinline__ unsigned collect(Key low, Key high) {
    const float smallest = value_of(rank_in(high)), largest = value_of(rank_in(low));  // NaN: none
    const bool by_value = column_in(low) == 0 && column_in(high) == ~0u && smallest <= largest;
    reset_count();
    each(rank_in(high), [&](const auto &a, int column) {
      unsigned hits = 0;
#pragma unroll
      for (int e = 0; e < LongRow<T>::V; e++)
        if (!(a[e] < smallest || a[e] > largest)) hits |= 1u << e;
      if (!hits) return;
      if (!by_value || column < 0 || column > row.columns - LongRow<T>::V)
#pragma unroll
        for (int e = 0; e < LongRow<T>::V; e++) {
          const Key key = key_of(rank_of(a[e]), column + e);
          if (key < low || key > high || !row.has(column + e)) hits &= ~(1u << e);
        }
      keep(a, column, hits);
    });
    __syncthreads();
    return memory.count;
  }

  // Search the elements from low to high for the prefix that reaches `need`, where the sum is
  // `before` at the first of them. What an element adds is measure.weight(value).
  template <typename M>
  __device__ Found search(const M &measure, Key low, Key high, unsigned long long before, unsigned long long need) {
    unsigned n;
    while ((n = collect(low, high)) > POOL) {
      Key first = ~0ull, last = ~0ull;  // the least key, and the least inverted one
      between(low, high, [&](float, Key key) { first = min(first, key), last = min(last, ~key); });
      least_of_block(first, last);
      low = first, high = ~last;
      const int s = bits_above(high - low, WINDOWS);
      memory.windows.clear();
      between(low, high, [&](float v, Key key) {
        memory.windows.add<1>({int((key - low) >> s)}, {measure.weight(v)});
      });
      const auto place = memory.windows.reach(need - before);
      before += place.before;
      low += (Key)place.bin << s;
      if (high - low > (Key(1) << s) - 1) high = low + ((Key(1) << s) - 1);
    }
    order(memory.pool, n);
    return Ordered<SEARCH_THREADS, M>(measure, memory, n).reach(before, need);
  }
};

}  // namespace jitkern
