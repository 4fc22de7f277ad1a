// Cross-entropy of rows of logits; see kernel.py for the formula. Every kernel reads a logit once, but for
// the one by blocks, whose second read the L2 cache answers.
#include "rows.cuh"
#include "types.cuh"

namespace cross_entropy_detail {

using namespace jitkern;

template <typename A> struct Settings {  // what all rows share; capped: the cap and its inverse
  A smoothing, z_loss, cap, per_cap;
  long long ignored;
};

__device__ __forceinline__ float hyperbolic_tangent(float x) { return tanhf(x); }
__device__ __forceinline__ double hyperbolic_tangent(double x) { return tanh(x); }
// v[place]; not by an index, which would put v into memory.
template <typename A, int V> __device__ __forceinline__ A picked(const A (&v)[V], int place) {
  if constexpr (V == 1) {
    return v[0];
  } else {
    A half[V / 2];
#pragma unroll
    for (int i = 0; i < V / 2; i++) half[i] = place & V / 2 ? v[i + V / 2] : v[i];
    return picked(half, place & (V / 2 - 1));
  }
}

__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }

// An Op as rows.cuh describes it. T: of the logits; I: of the targets. SMOOTH: label smoothing is not 0;
// CAP: softcap is not 0.
template <typename T_, typename I, bool SMOOTH, bool CAP> struct Loss {
  using T = T_;
  using A = widened<T>;
  static constexpr int INPUTS = 1, OUTPUTS = 1;
  static constexpr A log2e = A(1.4426950408889634);

  const T *in[1];
  T *out[1];
  A *losses;
  const I *targets;
  const A *scales;
  long long scale_stride;
  int cols;
  Settings<A> s;
  int target;  // of the row, or -1 where there is no such column; set by begin()
  bool ignored;

  struct Plain {
    Exponentials<A> e;
    A at;  // the logit of the target, in the part that has it
  };
  struct Smoothed {
    Exponentials<A> e;
    A at, below, count;  // below: the sum of the logits, each less the base of e; count: of logits
  };
  using State = either<SMOOTH, Smoothed, Plain>;
  struct Row {
    A base, by, less, hot;  // d/dx = by * e^(x - base) - less, and - hot at the target
  };

  __device__ __forceinline__ void begin(long long row) {
    const long long given = targets[row];
    ignored = given == s.ignored;
    target = given >= 0 && given < cols ? (int)given : -1;
  }
  __device__ __forceinline__ State none() const {
    State state{};
    state.e = Exponentials<A>::none();
    return state;
  }
  __device__ __forceinline__ A padding() const { return -infinity<A>(); }
  __device__ __forceinline__ bool is_column(int i) const { return i >= 0 && i < cols; }  // or beyond the row
  __device__ __forceinline__ A capped(A x) const { return CAP ? s.cap * hyperbolic_tangent(x * s.per_cap) : x; }

  // N vectors, each `step` columns after the one before: fewer maxima to rebase the sum to than one by one.
  template <int N, int V>
  __device__ __forceinline__ State add_vectors(State state, const A (&x)[N][1][V], int column, int step) const {
    A v[N * V];
#pragma unroll
    for (int i = 0; i < N * V; i++) {
      v[i] = capped(x[i / V][0][i % V]);
      if (CAP && !is_column(column + i / V * step + i % V)) v[i] = padding();  // of which the cap is finite
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
      const int place = target - (column + n * step);
      if (place >= 0 && place < V) {
        A part[V];
#pragma unroll
        for (int i = 0; i < V; i++) part[i] = v[n * V + i];
        state.at = picked(part, place);
      }
    }
    const A base = state.e.base();
    state.e = state.e.add(v, log2e);
    if constexpr (SMOOTH) {
      const A now = state.e.base();
      state.below += state.count * (base - now);
#pragma unroll
      for (int i = 0; i < N * V; i++) {
        if (is_column(column + i / V * step + i % V)) state.below += v[i] - now, state.count += 1;
      }
    }
    return state;
  }
  template <int V> __device__ __forceinline__ State add(State state, const A (&x)[1][V], int column) const {
    return add_vectors(state, reinterpret_cast<const A (&)[1][1][V]>(x), column, 0);
  }
  __device__ __forceinline__ State merge(const State &a, const State &b) const {
    State state;
    state.e = Exponentials<A>::merged(a.e, b.e, log2e);
    state.at = a.at + b.at;
    if constexpr (SMOOTH) {
      const A base = state.e.base();
      state.below = (a.below + a.count * (a.e.base() - base)) + (b.below + b.count * (b.e.base() - base));
      state.count = a.count + b.count;
    }
    return state;
  }

  __device__ __forceinline__ Row row(const State &state, long long row, bool first) const {
    const A base = state.e.base(), log_sum = logarithm(state.e.sum), lse = base + log_sum;
    if (first) {
      A loss = base - state.at;  // before log_sum, which may be far smaller than either
      if constexpr (SMOOTH) loss = (1 - s.smoothing) * loss - s.smoothing / cols * state.below;
      loss += log_sum + s.z_loss * lse * lse;
      losses[row] = ignored ? A(0) : target >= 0 ? loss : NAN;
    }
    const A scale = target >= 0 ? (scales ? scales[row * scale_stride] : A(1)) : NAN;
    const A by = scale * (1 + 2 * s.z_loss * lse) / state.e.sum;
    return {base, by, scale * s.smoothing / cols, scale * (1 - s.smoothing)};
  }
  template <int V>
  __device__ __forceinline__ void results(const Row &r, const A (&x)[1][V], int column, A (&y)[1][V]) const {
#pragma unroll
    for (int i = 0; i < V; i++) {
      const A v = capped(x[0][i]);
      y[0][i] = power_of_2((v - r.base) * log2e) * r.by;
      if (SMOOTH) y[0][i] -= r.less;
      if (CAP) y[0][i] *= 1 - v * s.per_cap * (v * s.per_cap);
    }
    const int place = target - column;
    if (place >= 0 && place < V) {
#pragma unroll
      for (int i = 0; i < V; i++) {
        const A hot = i == place ? r.hot : A(0), v = CAP ? capped(x[0][i]) * s.per_cap : A(0);
        y[0][i] -= CAP ? hot * (1 - v * v) : hot;
      }
    }
    if (ignored)
#pragma unroll
      for (int i = 0; i < V; i++) y[0][i] = 0;
  }
};

// The sum of `value` over the block, in double, in one order; known to thread 0.
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double sums[32];
#pragma unroll
  for (int i = 16; i; i /= 2) value += __shfl_xor_sync(~0u, value, i);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
  if (threadIdx.x == 0)
    for (int i = 0; i < blockDim.x / 32; i++) value += sums[i];
  return value;
}

}  // namespace cross_entropy_detail

#define CROSS_ENTROPY_OP \
  Loss<T, I, SMOOTH, CAP> op{{x}, {out}, losses, targets, scales, scale_stride, cols, \
                                     {A(smoothing), A(z_loss), A(cap), A(1 / cap), ignored}}

// Losses alone. A row for LANES threads: a warp, a block, or a cluster. Grid: rows * LANES / THREADS, rounded up.
template <typename T, typename I, bool SMOOTH, bool CAP, int LANES, int THREADS, int AHEAD, bool EDGES>
__global__ void __launch_bounds__(THREADS)
    cross_entropy_loss(jitkern::widened<T> *losses, const T *x, const I *targets, long long rows, int cols,
                       double smoothing, double z_loss, double cap, long long ignored) {
  using namespace cross_entropy_detail;
  using A = widened<T>;
  constexpr int V = vector_size<T>;
  T *out = nullptr;
  const A *scales = nullptr;
  const long long scale_stride = 0;
  CROSS_ENTROPY_OP;
  if constexpr (LANES > THREADS) begin_cluster();
  const long long thread = (long long)blockIdx.x * THREADS + threadIdx.x, row = thread / LANES;
  const int lane = thread % LANES;
  if (row >= rows) return;  // whole warps, of blocks that are no cluster
  op.begin(row);
  x += row * cols;
  const int before = elements_before<EDGES>(x), vectors = (cols + before + V - 1) / V;
  auto state = op.none();
  for (int at = lane; at < vectors; at += LANES * AHEAD) {
    uint4 raw[AHEAD];
    A v[AHEAD][1][V];
    if (at + (AHEAD - 1) * LANES < vectors) {
#pragma unroll
      for (int j = 0; j < AHEAD; j++) raw[j] = load_vector<EDGES>(x, (at + j * LANES) * V - before, cols, op.padding());
#pragma unroll
      for (int j = 0; j < AHEAD; j++) widen<T>(raw[j], v[j][0]);
      state = op.add_vectors(state, v, at * V - before, LANES * V);
    } else {
      for (int j = 0; at + j * LANES < vectors; j++) {
        raw[0] = load_vector<EDGES>(x, (at + j * LANES) * V - before, cols, op.padding());
        widen<T>(raw[0], v[0][0]);
        state = op.add(state, v[0], (at + j * LANES) * V - before);
      }
    }
  }
  if constexpr (LANES == 32)
    state = merged_lanes<32>(op, state);
  else if constexpr (LANES == THREADS)
    state = merged_block<THREADS>(op, state);
  else
    state = merged_cluster<THREADS, LANES / THREADS>(op, state);
  if (lane == 0) op.row(state, row, true);
}

// Losses and gradients, rows read twice. Grid: rows.
template <typename T, typename I, bool SMOOTH, bool CAP, int THREADS, bool EDGES>
__global__ void __launch_bounds__(THREADS)
    cross_entropy_rows(jitkern::widened<T> *losses, T *out, const T *x, const I *targets,
                       const jitkern::widened<T> *scales, long long scale_stride, int cols, double smoothing,
                       double z_loss, double cap, long long ignored) {
  using namespace cross_entropy_detail;
  using A = widened<T>;
  CROSS_ENTROPY_OP;
  op.begin(blockIdx.x);
  rows_read_twice<THREADS, EDGES>(op, cols);
}

// The same with each row read once, on the chip; see rows.cuh.
template <typename T, typename I, bool SMOOTH, bool CAP, int LANES, int THREADS, int VPT, int MORE, bool EDGES>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS)  // 64 registers: else few rows are under way
    cross_entropy_on_chip(jitkern::widened<T> *losses, T *out, const T *x, const I *targets,
                          const jitkern::widened<T> *scales, long long scale_stride, long long rows, int cols,
                          double smoothing, double z_loss, double cap, long long ignored) {
  using namespace cross_entropy_detail;
  using A = widened<T>;
  CROSS_ENTROPY_OP;
  const long long row = ((long long)blockIdx.x * THREADS + threadIdx.x) / LANES;
  if (row < rows) op.begin(row);
  rows_on_chip<LANES, THREADS, VPT, MORE, EDGES>(op, rows, cols);
}

// scale = grad / the number of targets that are not ignored; grad: 1 if there is none. One block.
template <typename A, typename I>
__global__ void __launch_bounds__(1024) cross_entropy_scale(A *scale, const A *grad, const I *targets, long long rows,
                                                           long long ignored) {
  double count = 0;
  for (long long i = threadIdx.x; i < rows; i += blockDim.x) count += targets[i] != ignored;
  count = cross_entropy_detail::block_sum(count);
  if (threadIdx.x == 0) *scale = A((grad ? double(*grad) : 1.) / count);
}

// The sum of the losses, or with `mean` their mean over the targets that are not ignored. One block.
template <typename A, typename I>
__global__ void __launch_bounds__(1024) cross_entropy_reduce(A *out, const A *losses, const I *targets, long long rows,
                                                            long long ignored, bool mean) {
  double sum = 0, count = 0;
  for (long long i = threadIdx.x; i < rows; i += blockDim.x) sum += losses[i], count += targets[i] != ignored;
  sum = cross_entropy_detail::block_sum(sum);
  count = cross_entropy_detail::block_sum(count);
  if (threadIdx.x == 0) *out = A(mean ? sum / count : sum);
}

// x *= by, where that is not 1; by[row * by_stride]. Grid: any number of blocks.
template <typename T>
__global__ void __launch_bounds__(512)
    cross_entropy_rescale(T *x, const jitkern::widened<T> *by, long long by_stride, long long rows, int cols) {
  using namespace jitkern;
  constexpr int V = vector_size<T>;
  if (by_stride == 0 && *by == 1) return;
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const widened<T> factor = by[row * by_stride];
    if (factor == 1) continue;
    T *const start = x + row * cols;
    const int before = elements_before<true>(start);
    for (int column = threadIdx.x * V - before; column < cols; column += blockDim.x * V) {
      widened<T> a[V];
      widen<T>(load_vector<true>(start, column, cols, widened<T>(0)), a);
#pragma unroll
      for (int i = 0; i < V; i++) a[i] *= factor;
      store_vector<true>(start, column, cols, a);
    }
  }
}
