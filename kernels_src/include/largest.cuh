// The largest elements of long rows, without a sort of the row: two launches.
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
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");  // the second launch may come to its wait
#endif
  const int group = chunk * GROUP_THREADS + threadIdx.x;
  groups[group] = row.rank_of_group(group);
}
__device__ __forceinline__ void wait_for_groups() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ------------------------------------------------------------------ the search

struct Found {
  Key key;                  // the last element of the smallest prefix that reaches what is needed
  unsigned long long upto;  // the sum of that prefix
};

__device__ __forceinline__ int bits_above(Key range, Key bins) {  // the least s with range >> s < bins
  const int bits = 64 - __clzll(range), free = 63 - __clzll(bins);
  return bits > free ? bits - free : 0;
}

// Put at most FEW keys in order.
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

// The memory of a search.
struct alignas(16) Search {
  Bins<WINDOWS> windows;
  Key pool[POOL];
  union {
    Key few[FEW];
    unsigned short listed[POOL];  // groups to read again
  };
  Found found;
  unsigned count;
};

template <typename T> struct Searcher {
  const LongRow<T> &row;
  Search &memory;
  unsigned *ranks;      // of the groups, in shared memory
  unsigned best;        // the smallest rank of the row
  unsigned worst;       // and the largest of a group
  unsigned pooled = 0;  // elements in the pool, if the search is among those

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
  // Append the elements of which `hits` has a bit to the keys, as many as `most`.
  template <int N>
  __device__ __forceinline__ void keep(Key *keys, unsigned most, const float (&a)[N], int column, unsigned hits) {
    if (!hits) return;
    unsigned place = atomicAdd(&memory.count, (unsigned)__popc(hits));
#pragma unroll
    for (int e = 0; e < N; e++)
      if (hits >> e & 1) {
        if (place < most) keys[place] = key_of(rank_of(a[e]), column + e);
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
    for (unsigned i = threadIdx.x; i < listed << row.shift; i += SEARCH_THREADS) {
      const int vector = row.vector_of(memory.listed[i >> row.shift], i & ((1u << row.shift) - 1));
      if (vector >= row.vectors) continue;
      float a[LongRow<T>::V];
      widen<T>(row.load(vector), a);
      const int column = row.column_of(vector);
      unsigned hits = 0;
#pragma unroll
      for (int e = 0; e < LongRow<T>::V; e++)
        if (rank_of(a[e]) <= limit && row.has(column + e)) hits |= 1u << e;
      keep(memory.pool, POOL, a, column, hits);
    }
    __syncthreads();
    return memory.count;
  }

  // f(values, their first column) for all elements, a few at a time, but those of groups beyond the
  // limit. Columns may lie outside of the row. Of `parts` blocks, this one takes its part.
  template <typename F> __device__ __forceinline__ void each(unsigned limit, F f, int part = 0, int parts = 1) {
    if (pooled) {
      for (unsigned i = threadIdx.x; i < pooled; i += SEARCH_THREADS) {
        const float one[1] = {value_of(rank_in(memory.pool[i]))};
        f(one, (int)column_in(memory.pool[i]));
      }
      return;
    }
    for (int g = part * SEARCH_THREADS + threadIdx.x; g < row.groups; g += parts * SEARCH_THREADS) {
      if (ranks[g] > limit || ranks[g] == ~0u) continue;
      row.template each_vector<false>(g, [&](int vector, const uint4 &raw) {
        float a[LongRow<T>::V];
        widen<T>(raw, a);
        f(a, row.column_of(vector));
      });
    }
  }

  // Search the elements from `low` to `high`, in a bin if that is not negative, for the prefix that
  // reaches `need`. What an element adds to the sum is measure.weight(value), and its bin
  // measure.bin(value); the sum is `before` at the first of them.
  template <typename M>
  __device__ Found search(const M &measure, Key low, Key high, int bin, unsigned long long before,
                          unsigned long long need) {
    const unsigned outer = pooled;
    Key *few = pooled ? memory.few : memory.pool;
    unsigned n;
    for (;;) {
      n = collect(measure, low, high, bin, few, pooled ? FEW : POOL);
      if (n <= FEW) break;
      if (!pooled && n <= POOL) pooled = n, few = memory.few;
      const int s = bits_above(high - low, WINDOWS);
      const float least = value_of(rank_in(high)), most = value_of(rank_in(low));
      memory.windows.clear();
      each(rank_in(high), [&](const auto &a, int column) {
#pragma unroll
        for (int e = 0; e < sizeof a / sizeof *a; e++) {
          if (a[e] < least || a[e] > most) continue;
          const Key key = key_of(rank_of(a[e]), column + e);
          if (key < low || key > high || !row.has(column + e)) continue;
          if (measure.counts)
            memory.windows.count(int((key - low) >> s));
          else
            memory.windows.add(int((key - low) >> s), measure.weight(a[e]));
        }
      });
      const auto place = memory.windows.reach(need - before);
      before += place.before, bin = -1;
      low += (Key)place.bin << s;
      if (high - low > (Key(1) << s) - 1) high = low + ((Key(1) << s) - 1);
    }
    pooled = outer;
    order_few(few, n);
    const Key key = threadIdx.x < n ? few[threadIdx.x] : 0;
    return reach(key, threadIdx.x < n ? measure.weight(value_of(rank_in(key))) : 0, before, need);
  }

  // Narrow low and high to the elements between them, and put these into `keys`, as many as `most`;
  // return their number.
  template <typename M>
  __device__ __forceinline__ unsigned collect(const M &measure, Key &low, Key &high, int bin, Key *keys,
                                              unsigned most) {
    reset_count();
    Key first = ~0ull, last = ~0ull;  // the least key, and the least inverted one
    const float smallest = value_of(rank_in(high)), largest = value_of(rank_in(low));  // NaN: none
    each(rank_in(high), [&](const auto &a, int column) {
      unsigned hits = 0;
#pragma unroll
      for (int e = 0; e < sizeof a / sizeof *a; e++)
        if (!(a[e] < smallest || a[e] > largest)) hits |= 1u << e;
      if (!hits) return;
#pragma unroll
      for (int e = 0; e < sizeof a / sizeof *a; e++) {
        const Key key = key_of(rank_of(a[e]), column + e);
        if (key < low || key > high || !row.has(column + e) || bin >= 0 && measure.bin(a[e]) != bin)
          hits &= ~(1u << e);
        else
          first = min(first, key), last = min(last, ~key);
      }
      keep(keys, most, a, column, hits);
    });
    least_of_block(first, last);
    low = first, high = ~last;
    return memory.count;
  }

  // The same where each thread has at most one element, in order.
  __device__ Found reach(Key key, unsigned long long weight, unsigned long long before, unsigned long long need) {
    before += sum_before(weight).before;
    if (before < need && need <= before + weight) memory.found = {key, before + weight};
    __syncthreads();
    const Found found = memory.found;
    __syncthreads();
    return found;
  }
};

}  // namespace jitkern
