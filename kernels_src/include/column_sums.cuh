// Private. Rows that are reduced and written, and summed over as well: the backward of norms, whose weights are shared
// by all rows. What is computed is an Op of rows.cuh for which also
//
//   SUMS                how many sums over all rows there are for each column; 0 for none
//   sum(r, v, sums)     adds to sums[SUMS][V] what a row with the elements v[INPUTS][V] contributes
//   kept(row)           of the Row of that row what `sum` needs, which `row` has stored
//   Held, hold(column)  as in rows.cuh, for columns beyond the row too; if not is_inside, `add` gets zeros
//
// A block adds its rows in registers and writes its sums once; a second kernel adds those of all blocks. The
// order depends on the grid alone, so results are the same from run to run.
#pragma once
#include "async_copy.cuh"
#include "dependent_launch.cuh"
#include "rows.cuh"

namespace jitkern {

// Read from shared memory each time: the row would not fit into registers.
__device__ __forceinline__ uint4 load_again(const uint4 *shared) {
  uint4 v;
  asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"((unsigned)__cvta_generic_to_shared(shared)));
  return v;
}

// The State of LANES neighbouring threads of a block, more than a warp: the very same in all of them.
// turn: another number modulo 2 at each call, so that one barrier is enough.
template <int LANES, int THREADS, class Op>
__device__ __forceinline__ typename Op::State merged_group(const Op &op, typename Op::State s, int turn) {
  constexpr int WARPS = LANES / 32;
  __shared__ typename Op::State states[2][THREADS / 32];
  const int lane = threadIdx.x % 32, group = threadIdx.x / LANES;
  s = merged_lanes<32>(op, s);
  if (lane == 0) states[turn % 2][threadIdx.x / 32] = s;
  asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(LANES) : "memory");
  return merged_lanes<WARPS>(op, states[turn % 2][group * WARPS + lane % WARPS]);
}

// Rows of up to LANES * VPT vectors, each for LANES threads, a power of two from 4 on. The block, one on each
// multiprocessor, walks over the rows; copies of the next STAGES - 1 rows are under way meanwhile. Rows begin
// and end at multiples of 16 bytes. Shared memory: STAGES * Op::INPUTS * VPT * THREADS * 16 bytes.
// partial: [grid, SUMS, cols].
template <int LANES, int THREADS, int VPT, int STAGES, class Op>
__device__ __forceinline__ void rows_and_sums(const Op &op, widened<typename Op::T> *partial, long long rows, int cols) {
  using T = typename Op::T;
  using A = widened<T>;
  constexpr int V = vector_size<T>, INPUTS = Op::INPUTS, GROUPS = THREADS / LANES, SUMS = Op::SUMS;
  static_assert(LANES <= 32 || GROUPS <= 15, "a block has 16 barriers");
  extern __shared__ uint4 staged[];
  const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES, vectors = cols / V;
  const long long begin = (long long)blockIdx.x * GROUPS, step = (long long)gridDim.x * GROUPS, stride = step * cols;

  typename Op::Held held[VPT];
  A sums[VPT][SUMS ? SUMS : 1][V];
#pragma unroll
  for (int j = 0; j < VPT; j++) {
    held[j] = op.hold((lane + j * LANES) * V);
#pragma unroll
    for (int s = 0; s < SUMS; s++)
#pragma unroll
      for (int i = 0; i < V; i++) sums[j][s][i] = 0;
  }

  const auto slot = [&](int stage, int i, int j) -> uint4 & {
    return staged[((stage * INPUTS + i) * VPT + j) * THREADS + threadIdx.x];
  };
  const long long start = (begin + group) * cols + lane * V;
  long long ahead = begin + group;  // the next row to copy
  const T *from[INPUTS];
#pragma unroll
  for (int i = 0; i < INPUTS; i++) from[i] = op.in[i] + start;
  const auto copy_next = [&](int stage) {
#pragma unroll
    for (int j = 0; j < VPT; j++) {
      const int bytes = ahead < rows && lane + j * LANES < vectors ? 16 : 0;
#pragma unroll
      for (int i = 0; i < INPUTS; i++) copy_async(&slot(stage, i, j), from[i] + j * LANES * V, bytes);
    }
    commit_copies();
    ahead += step;
#pragma unroll
    for (int i = 0; i < INPUTS; i++) from[i] += stride;
  };
  const auto elements = [&](int stage, int j, A (&v)[INPUTS][V]) {
#pragma unroll
    for (int i = 0; i < INPUTS; i++) widen<T>(load_again(&slot(stage, i, j)), v[i]);
  };

#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) copy_next(s);
  T *to = Op::OUTPUTS ? op.out[0] + start : nullptr;
  int stage = 0, turn = 0;
  for (long long first = begin; first < rows; first += step) {  // as often in all threads
    copy_next(stage == 0 ? STAGES - 1 : stage - 1);
    wait_for_copies<STAGES - 1>();
    typename Op::State state = op.none();
#pragma unroll
    for (int j = 0; j < VPT; j++) {
      A v[INPUTS][V];
      elements(stage, j, v);
      state = op.add(state, v, held[j], (lane + j * LANES) * V, lane + j * LANES < vectors);
    }
    if constexpr (LANES <= 32)
      state = merged_lanes<LANES>(op, state);
    else
      state = merged_group<LANES, THREADS>(op, state, turn++);
    if (first + group < rows) {
      const typename Op::Row found = op.row(state, first + group, lane == 0);
#pragma unroll
      for (int j = 0; j < VPT; j++) {
        A v[INPUTS][V], y[Op::OUTPUTS ? Op::OUTPUTS : 1][V];
        elements(stage, j, v);
        if constexpr (SUMS > 0) op.sum(found, v, sums[j]);
        if constexpr (Op::OUTPUTS > 0) {
          op.results(found, v, held[j], (lane + j * LANES) * V, y);
          if (lane + j * LANES < vectors) store_once(to + j * LANES * V, narrow<T>(y[0]));
        }
      }
    }
    to += stride;
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }

  if constexpr (SUMS > 0) {
    wait_for_copies<0>();
    A *all = (A *)staged;  // [GROUPS, cols], for one sum after the other; no more than a stage
#pragma unroll
    for (int s = 0; s < SUMS; s++) {
      __syncthreads();
#pragma unroll
      for (int j = 0; j < VPT; j++)
        if (lane + j * LANES < vectors)
#pragma unroll
          for (int i = 0; i < V; i++) all[group * cols + (lane + j * LANES) * V + i] = sums[j][s][i];
      __syncthreads();
      for (int column = threadIdx.x; column < cols; column += THREADS) {
        A total = 0;
        for (int g = 0; g < GROUPS; g++) total += all[g * cols + column];
        partial[((long long)blockIdx.x * SUMS + s) * cols + column] = total;
      }
    }
  }
}

// The same sums for rows of any length, after `row` was called for each: a thread for V columns, or for one of
// rows with EDGES. Grid: [column blocks, slices of the rows]; partial: [slices, SUMS, cols].
template <int THREADS, bool EDGES, class Op>
__device__ __forceinline__ void column_sums(const Op &op, widened<typename Op::T> *partial, long long rows, int cols) {
  using T = typename Op::T;
  using A = widened<T>;
  constexpr int V = EDGES ? 1 : vector_size<T>;
  const long long column = ((long long)blockIdx.x * THREADS + threadIdx.x) * V;
  const long long slice = (rows + gridDim.y - 1) / gridDim.y, begin = blockIdx.y * slice;
  const long long end = begin + slice < rows ? begin + slice : rows;
  if (column >= cols) return;
  A sums[Op::SUMS][V] = {};
#pragma unroll 4
  for (long long row = begin; row < end; row++) {
    A v[Op::INPUTS][V];
#pragma unroll
    for (int i = 0; i < Op::INPUTS; i++)
      if constexpr (EDGES)
        v[i][0] = A(op.in[i][row * cols + column]);
      else
        widen<T>(load_once(op.in[i] + row * cols + column), v[i]);
    op.sum(op.kept(row), v, sums);
  }
#pragma unroll
  for (int s = 0; s < Op::SUMS; s++)
#pragma unroll
    for (int i = 0; i < V; i++) partial[((long long)blockIdx.y * Op::SUMS + s) * cols + column + i] = sums[s][i];
}

// What two results have in each column: the sums of partial[count, SUMS, cols]. A result may be null.
// Grid: [cols / 32, rounded up, SUMS]; blocks of 32 x DEPTH threads; pdl, since a block waits for the partial sums.
template <int DEPTH, typename W, typename A>
__device__ __forceinline__ void add_partials(W *first, W *second, const A *partial, int count, int cols) {
  __shared__ A sums[DEPTH][32];
  const int depth = threadIdx.x / 32, column = blockIdx.x * 32 + threadIdx.x % 32;
  W *out = blockIdx.y ? second : first;
  wait_for_inputs();
  if (!out) return;
  A sum = 0;
  if (column < cols)
#pragma unroll 4
    for (int b = depth; b < count; b += DEPTH) sum += partial[((long long)b * gridDim.y + blockIdx.y) * cols + column];
  sums[depth][threadIdx.x % 32] = sum;
  __syncthreads();
  if (depth || column >= cols) return;
#pragma unroll
  for (int d = 1; d < DEPTH; d++) sum += sums[d][threadIdx.x];
  out[column] = W(sum);
}

// What all rows share, as a weight: of T, or of a wider type, `missing` where there is none. `added` is added to it.
template <typename T, typename W, bool EDGES> struct Factors {
  static constexpr int V = vector_size<T>, EACH = vector_size<W>, WORDS = V / EACH;
  using A = widened<T>;
  struct Held { uint4 raw[WORDS]; };
  const W *p;
  int cols;
  widened<W> missing;
  A added;

  __device__ Factors(const W *p, int cols, int missing, double added = 0)
      : p(p), cols(cols), missing(missing), added(p ? A(added) : A(0)) {}

  // The V elements from `column` on, through L1; p is a multiple of 16 bytes. `missing` beyond the row.
  __device__ __forceinline__ Held hold(int column) const {
    Held held;
    widened<W> none[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) none[i] = missing;
#pragma unroll
    for (int j = 0; j < WORDS; j++)
      held.raw[j] = p && column < cols ? __ldg((const uint4 *)(p + column) + j) : narrow<W>(none);
    return held;
  }
  __device__ __forceinline__ void load(const Held &held, A (&a)[V]) const {
#pragma unroll
    for (int j = 0; j < WORDS; j++) {
      widened<W> part[EACH];
      widen<W>(held.raw[j], part);
#pragma unroll
      for (int i = 0; i < EACH; i++) a[j * EACH + i] = part[i] + added;
    }
  }
  __device__ __forceinline__ void load(int column, A (&a)[V]) const {
    if (!EDGES || !p || (column >= 0 && column <= cols - V && (unsigned long long)(p + column) % 16 == 0))
      return load(hold(column), a);
#pragma unroll
    for (int i = 0; i < V; i++) a[i] = (unsigned)(column + i) < (unsigned)cols ? A(p[column + i]) + added : A(missing);
  }
};

}  // namespace jitkern
