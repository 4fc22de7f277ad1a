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
  __device__ int bin(float v) const {  // beyond all bins without a weight
    const float t = exponent_of(v, scale);
    return t >= LEAST ? octaves_of(t, OCTAVE) : WEIGHTS;
  }
  // The rank of a value that is so many octaves below the largest.
  __device__ unsigned rank_below(float octaves) const {
    return scale.finite ? rank_of(scale.most - octaves / scale.factor) : scale.rank;
  }
};

// Sum the weights up to a key, by exponent, of this block's part of the row.
template <typename T>
__device__ void fill(Searcher<T> &in, Bins<WEIGHTS> &weights, const Scale &scale, Key last, int part, int parts) {
  weights.clear();
  in.each(Measure{scale, false}.rank_below(1 - LEAST), [&](const auto &a, int column) {
#pragma unroll
    for (int e = 0; e < sizeof a / sizeof *a; e++) {
      const float t = exponent_of(a[e], scale);
      if (t >= LEAST && in.row.has(column + e) && (last == ~0ull || key_of(rank_of(a[e]), column + e) <= last))
        weights.add(octaves_of(t, OCTAVE), (unsigned long long)power_of(t));
    }
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

// The key of the last element that is kept, or with DRAW of the token, where what can be kept does
// not lie in a few elements. filled: the weights are those of the whole row.
template <bool DRAW, typename T>
__device__ Key last_of(Searcher<T> &in, Bins<WEIGHTS> &weights, bool filled, const Scale &scale, unsigned top_k,
                       float top_p, unsigned long long random) {
  Found end = {~0ull, 0};
  for (int step = top_k < in.row.columns ? 0 : 1; step < 3; step++) {  // top-k, top-p, draw
    const Measure measure{scale, step == 0};
    Key low = 0, high = ~0ull;
    int bin = -1;
    unsigned long long before = 0, need = top_k;
    if (step == 1 && (DRAW || top_p < 1)) {  // the sum of what top-k keeps
      if (!filled) fill(in, weights, scale, end.key, 0, 1);
      end.upto = weights.reach(1).all;
    }
    if (step == 1 && !(top_p < 1) || step == 2 && !DRAW) continue;
    if (step > 0) {
      need = step == 1 ? needed(top_p, end.upto) : high_product(random, end.upto) + 1;
      const auto place = weights.reach(need);
      bin = place.bin, before = place.before;
      low = key_of(measure.rank_below(float(bin - 1) / OCTAVE), 0);
      high = key_of(measure.rank_below(float(bin + 2) / OCTAVE), ~0u);
    }
    end = in.search(measure, low, high, bin, before, need);
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
  static_assert(sizeof(SampleMemory) == 59440, "MEMORY of kernel.py");
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
  if (part && !(all && (DRAW || top_p < 1))) return;
  unsigned long long random = 0;
  if constexpr (DRAW)  // a seed for each row is a stream for each row
    random = random_bits(seed[seeds > 1 ? r : 0], offset[offsets > 1 ? r : 0], seeds > 1 ? 0 : r);

  wait_for_groups();
  Searcher<T> in(row, (const unsigned *)groups + r * row.groups, memory.search,
                 reinterpret_cast<unsigned *>(&memory + 1));
  const Scale scale = scale_of(in.best, temperature);
  unsigned n = POOL + 1;
  const bool filled = all && (DRAW || top_p < 1);
  if (filled) {
    fill(in, memory.weights, scale, ~0ull, part, parts);
    if (parts > 1 && !gathered(memory.weights, (unsigned long long *)sums + r * WEIGHTS, (unsigned *)counters + r, parts))
      return;
  } else if (top_k <= POOL / 2) {
    const unsigned limit = columns <= FEW ? ~0u : in.limit_of((unsigned)top_k);
    if (limit != ~0u || columns <= POOL) n = in.fill_pool(limit);
  }
  Key last;
  if (n <= FEW) {  // all that can be kept lies before us
    order_few(memory.search.pool, n);
    n = min(n, (unsigned)top_k);
    const Key key = memory.search.pool[min(threadIdx.x, n - 1)];
    const Measure measure{scale, false};
    const unsigned long long weight = threadIdx.x < n ? measure.weight(value_of(rank_in(key))) : 0;
    Found end = {memory.search.pool[n - 1], sum_before(weight).all};
    if (top_p < 1) end = in.reach(key, weight, 0, needed(top_p, end.upto));
    if (DRAW) end = in.reach(key, weight, 0, high_product(random, end.upto) + 1);
    last = end.key;
  } else {
    in.pooled = n <= POOL ? n : 0;
    last = last_of<DRAW>(in, memory.weights, filled, scale, (unsigned)top_k, top_p, random);
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
