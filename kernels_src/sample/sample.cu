// One token of each row of logits; see rule.h for the weights, largest.cuh for the search.
//
// The kept elements are a prefix of the row in the order of ranked.h, and the token is where the sum
// of their weights, in that order, passes a random part of its total. So the k-th element, the end
// of the smallest prefix of enough weight, and the token are found by one kind of search.
#include "largest.cuh"
#include "rule.h"

namespace jitkern {

constexpr int OCTAVE = 32;                         // bins for a factor of two
constexpr int WEIGHTS = OCTAVE * int(-LEAST) + 1;  // bins of exponents, which grow with rank

struct SampleMemory {  // the ranks of the groups follow
  Search search;
  Bins<WEIGHTS> weights;
};

// What an element adds to a sum: its weight, or 1.
struct Measure {
  Scale scale;
  bool counts;

  __device__ unsigned long long weight(float v) const { return counts ? 1 : weight_of(exponent_of(v, scale)); }
  __device__ int bin(float v) const {  // WEIGHTS without a weight
    const float t = exponent_of(v, scale);
    return t >= LEAST ? octaves_of(t, OCTAVE) : WEIGHTS;
  }
  // The first rank of a bin, or of a later one; a warp finds it.
  __device__ unsigned first_rank_of(int bin_wanted) const {
    unsigned low = scale.rank, high = ~0u;
    while (low < high) {
      const unsigned step = (high - low) / 32 + 1, lane = threadIdx.x % 32;
      const unsigned long long mine = low + (unsigned long long)lane * step;
      const bool reached = mine >= high || bin(value_of((unsigned)mine)) >= bin_wanted;
      const int first = __ffs(__ballot_sync(~0u, reached)) - 1;
      const unsigned long long bound = low + (unsigned long long)first * step;
      if (first >= 0 && bound < high) high = (unsigned)bound;
      if (first != 0) low += (first > 0 ? first - 1 : 31) * step + 1;
    }
    return low;
  }
  // The keys of a bin, low and high.
  __device__ Found keys_of(int bin) const {
    __shared__ unsigned first[2];
    const int warp = threadIdx.x / 32;
    if (warp < 2) {
      const unsigned rank = first_rank_of(bin + warp);
      if (threadIdx.x % 32 == 0) first[warp] = rank;
    }
    __syncthreads();
    const Found keys = {key_of(first[0], 0), key_of(first[1] - 1, ~0u)};
    __syncthreads();
    return keys;
  }
};

// Sum the weights up to a key, by exponent, of this block's part of the row.
template <typename T>
__device__ void fill(Searcher<T> &in, Bins<WEIGHTS> &weights, const Scale &scale, Key last, int part, int parts) {
  weights.clear();
  in.each(scale.finite ? rank_of(scale.most + (LEAST - 1) / scale.factor) : scale.rank, [&](const auto &a, int column) {
    constexpr int V = LongRow<T>::V;
    float t[V];
    if (scale.finite)  // asked once
#pragma unroll
      for (int e = 0; e < V; e++) t[e] = exponent_of(a[e], Scale{scale.most, scale.rank, true, scale.factor});
    else
#pragma unroll
      for (int e = 0; e < V; e++) t[e] = exponent_of(a[e], Scale{scale.most, scale.rank, false, scale.factor});
    int bins[V];
    unsigned long long values[V];
#pragma unroll
    for (int e = 0; e < V; e++) {
      const bool has = t[e] >= LEAST && in.row.has(column + e) &&
                       (last == ~0ull || key_of(rank_of(a[e]), column + e) <= last);
      bins[e] = has ? octaves_of(t[e], OCTAVE) : 0, values[e] = has ? (unsigned long long)power_of(t[e]) : 0;
    }
    weights.add(bins, values);
  }, part, parts);
  __syncthreads();
}

// Add the sums of all blocks of a row in the last one of them; return whether this is it. `sums` and
// `counter` are 0 before and after.
__device__ inline bool gathered(Bins<WEIGHTS> &weights, unsigned long long *sums, unsigned *counter, int parts) {
  __shared__ bool last;
  for (int i = threadIdx.x; i < WEIGHTS; i += SEARCH_THREADS)
    if (const auto sum = weights.at(i)) atomicAdd(sums + i, sum);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1u) == parts - 1;
    if (last) *counter = 0;
    __threadfence();
  }
  __syncthreads();
  if (!last) return false;
  for (int i = threadIdx.x; i < WEIGHTS; i += SEARCH_THREADS) {
    const unsigned long long sum = __ldcg(sums + i);
    weights.low[i] = (unsigned)sum, weights.high[i] = (unsigned)(sum >> 32);
    sums[i] = 0;
  }
  __syncthreads();
  return true;
}

// The key of the last element that is kept, or with DRAW of the token, where what top-k keeps are the
// first n of the pool in order, shared among so many threads.
template <bool DRAW, int THREADS>
__device__ Key last_of_few(Search &memory, int n, const Measure &measure, float top_p, unsigned long long random) {
  const Ordered<THREADS, Measure> ordered(measure, memory, n);
  Found end = {memory.pool[n - 1], ordered.part.all};
  if (drops(top_p)) end = ordered.reach(0, needed(top_p, end.upto));
  if (DRAW) end = ordered.reach(0, high_product(random, end.upto) + 1);
  return end.key;
}

// The same where what can be kept does not lie in the pool. filled: the weights are those of the whole row.
template <bool DRAW, typename T>
__device__ Key last_of_many(Searcher<T> &in, Bins<WEIGHTS> &weights, bool filled, const Scale &scale, unsigned top_k,
                            float top_p, unsigned long long random) {
  Found end = {~0ull, 0};
  for (int step = top_k < in.row.columns ? 0 : 1; step < 3; step++) {  // top-k, top-p, draw
    const Measure measure{scale, step == 0};
    Found keys = {0, ~0ull};
    unsigned long long before = 0, need = top_k;
    if (step == 1 && (DRAW || drops(top_p))) {  // the sum of what top-k keeps
      if (!filled) fill(in, weights, scale, end.key, 0, 1);
      end.upto = weights.reach(1).all;
    }
    if (step == 1 && !drops(top_p) || step == 2 && !DRAW) continue;
    if (step > 0) {
      need = step == 1 ? needed(top_p, end.upto) : high_product(random, end.upto) + 1;
      const auto place = weights.reach(need);
      before = place.before;
      keys = measure.keys_of(place.bin);
    }
    end = in.search(measure, keys.key, keys.upto, before, need);
  }
  return end.key;
}

}  // namespace jitkern

template <typename T>
__global__ void __launch_bounds__(jitkern::GROUP_THREADS)
    groups_of(int *groups, const T *logits, long long stride, int columns, int shift, int chunks) {
  using namespace jitkern;
  const long long r = blockIdx.x / chunks;
  const LongRow<T> row(logits + r * stride, columns, shift, chunks);
  write_groups(row, blockIdx.x % chunks, (unsigned *)groups + r * row.groups);
}

// out[row] = the token, or if !DRAW the key of the last element that is kept.
// by_row_...: null, or a number for each row in place of the one for all.
// parts: blocks of a row, among which rows without top-k share the sum of their weights.
template <typename T, bool DRAW>
__global__ void __launch_bounds__(jitkern::SEARCH_THREADS, 1)
    sample(long long *out, const T *logits, long long stride, int columns, int shift, int chunks, const int *groups,
           int parts, long long *sums, int *counters, float temperature, long long top_k, float top_p,
           const float *by_row_temperature, const long long *by_row_top_k, const float *by_row_top_p,
           const long long *seed, int seeds, const long long *offset, int offsets) {
  using namespace jitkern;
  extern __shared__ uint4 dynamic[];
  static_assert(sizeof(SampleMemory) == 51248, "MEMORY of kernel.py");
  SampleMemory &memory = *reinterpret_cast<SampleMemory *>(dynamic);
  const long long r = blockIdx.x / parts;
  const int part = blockIdx.x % parts;
  const LongRow<T> row(logits + r * stride, columns, shift, chunks);
  if (by_row_temperature) temperature = by_row_temperature[r];
  if (by_row_top_k) top_k = by_row_top_k[r];
  if (by_row_top_p) top_p = by_row_top_p[r];
  if (!(temperature > 0)) top_k = 1;
  if (top_k <= 0 || top_k > columns) top_k = columns;
  const bool all = top_k == columns && columns > FEW;
  if (part && !(all && (DRAW || drops(top_p)))) return;
  unsigned long long random = 0;
  if constexpr (DRAW)  // a seed for each row is a stream for each row
    random = random_bits(seed[seeds > 1 ? r : 0], offset[offsets > 1 ? r : 0], seeds > 1 ? 0 : r);

  wait_for_inputs();
  Searcher<T> in(row, (const unsigned *)groups + r * row.groups, memory.search,
                 reinterpret_cast<unsigned *>(&memory + 1));
  const Scale scale = scale_of(in.best, temperature);
  unsigned n = POOL + 1;
  const bool filled = all && (DRAW || drops(top_p));
  if (filled) {
    fill(in, memory.weights, scale, ~0ull, part, parts);
    if (parts > 1 && !gathered(memory.weights, (unsigned long long *)sums + r * WEIGHTS, (unsigned *)counters + r, parts))
      return;
  } else if (top_k <= POOL / 2) {
    const unsigned limit = columns <= FEW ? ~0u : in.limit_of((unsigned)top_k);
    if (limit != ~0u || columns <= POOL) n = in.fill_pool(limit);
  }
  Key last;
  if (n <= POOL) {
    order(memory.search.pool, n);
    n = min(n, (unsigned)top_k);
    const Measure measure{scale, false};
    if (n <= FEW) {
      if (threadIdx.x >= 32) return;
      last = last_of_few<DRAW, 32>(memory.search, n, measure, top_p, random);
    } else {
      last = last_of_few<DRAW, SEARCH_THREADS>(memory.search, n, measure, top_p, random);
    }
  } else {
    last = last_of_many<DRAW>(in, memory.weights, filled, scale, (unsigned)top_k, top_p, random);
  }
  if (threadIdx.x == 0) out[r] = DRAW ? column_in(last) : (long long)last;
}

// out = x where it is kept, else minus infinity.
template <typename T>
__global__ void keep_until(T *out, const T *x, const long long *last, long long stride, int columns, int chunks) {
  using namespace jitkern;
  const long long r = blockIdx.x / chunks;
  const Key key = (Key)last[r];
  x += r * stride, out += r * columns;
  for (int c = blockIdx.x % chunks * blockDim.x + threadIdx.x; c < columns; c += chunks * blockDim.x) {
    const T v = x[c];
    out[c] = key_of(rank_of((float)v), c) <= key ? v : T(-float_of(0x7f800000u));
  }
}
