// Rows of a matrix that are reduced to a few numbers and then written: softmax, norms, losses.
//
// What is computed is an Op, a struct of device functions; how the rows are shared among threads is
// one of the forms below. An Op for elements of type T has
//
//   INPUTS, OUTPUTS          how many tensors are read and written, all of T and of one shape; OUTPUTS may be 0
//   in[INPUTS], out[OUTPUTS] where they begin; an output may be an input (in place)
//   State                    what a part of a row is reduced to, a struct of numbers
//   none()                   the State of no elements
//   add(state, v, column)    a State with the elements v[INPUTS][V] from this column on, V >= 1
//   merge(a, b)              the State of two parts of a row
//   padding()                what an element beyond the ends of a row counts as
//   Row                      what the results of a row need
//   row(state, row, first)   that, from the State of the row; first: in one of the row's threads
//   results(r, v, column, y) y[OUTPUTS][V] of the elements v[INPUTS][V] from this column on
//
// An Op may also have what all rows share, as a weight, loaded while a row is under way:
//
//   Held, hold(column)       what V columns need of it, read through L1; only for rows without EDGES
//   add(state, v, held, column, is_inside), results(r, v, held, column, y)
//                            as above, and used in their place where there are registers for it
//
// Elements are widened to A: float, or double for double. Which part of a row is added and merged in
// which order depends on the form alone, so results are the same from run to run.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "vectors.cuh"

namespace jitkern {

// Not casts, which Torch takes away from 16-bit types when it builds extensions.
__device__ __forceinline__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float wide(__half x) { return __half2float(x); }
__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ double wide(double x) { return x; }
__device__ __forceinline__ void round_to(__nv_bfloat16 &y, float x) { y = __float2bfloat16_rn(x); }
__device__ __forceinline__ void round_to(__half &y, float x) { y = __float2half_rn(x); }
__device__ __forceinline__ void round_to(float &y, float x) { y = x; }
__device__ __forceinline__ void round_to(double &y, double x) { y = x; }

// ------------------------------------------------------------------ 16 bytes

template <typename T> constexpr int vector_size = 16 / sizeof(T);

__device__ __forceinline__ void widen(unsigned word, float *a, const __nv_bfloat16 *) {
  a[0] = __uint_as_float(word << 16), a[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void widen(unsigned word, float *a, const __half *) {
  const float2 both = __half22float2(reinterpret_cast<const __half2 &>(word));
  a[0] = both.x, a[1] = both.y;
}
__device__ __forceinline__ void widen(unsigned word, float *a, const float *) { a[0] = __uint_as_float(word); }
__device__ __forceinline__ unsigned narrow(const float *a, const __nv_bfloat16 *) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(a[0], a[1]);
  return reinterpret_cast<const unsigned &>(both);
}
__device__ __forceinline__ unsigned narrow(const float *a, const __half *) {
  const __half2 both = __floats2half2_rn(a[0], a[1]);
  return reinterpret_cast<const unsigned &>(both);
}
__device__ __forceinline__ unsigned narrow(const float *a, const float *) { return __float_as_uint(a[0]); }

template <typename T> __device__ __forceinline__ void widen(const uint4 &v, float (&a)[vector_size<T>]) {
  constexpr int word = 4 / sizeof(T);
  const T *kind = nullptr;
  widen(v.x, a, kind), widen(v.y, a + word, kind), widen(v.z, a + 2 * word, kind), widen(v.w, a + 3 * word, kind);
}
template <typename T> __device__ __forceinline__ void widen(const uint4 &v, double (&a)[2]) {
  a[0] = __hiloint2double(v.y, v.x), a[1] = __hiloint2double(v.w, v.z);
}
template <typename T> __device__ __forceinline__ uint4 narrow(const float (&a)[vector_size<T>]) {
  constexpr int word = 4 / sizeof(T);
  const T *kind = nullptr;
  return make_uint4(narrow(a, kind), narrow(a + word, kind), narrow(a + 2 * word, kind), narrow(a + 3 * word, kind));
}
template <typename T> __device__ __forceinline__ uint4 narrow(const double (&a)[2]) {
  return make_uint4(__double2loint(a[0]), __double2hiint(a[0]), __double2loint(a[1]), __double2hiint(a[1]));
}

// Read once: stays out of L1. Not `.nc`, since an Op may write over its input.
__device__ __forceinline__ uint4 load_once(const void *p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_once(void *p, const uint4 &v) { __stcs((uint4 *)p, v); }

// Whether the V elements from `column` on are 16 aligned bytes of the row.
template <bool EDGES, typename T> __device__ __forceinline__ bool is_whole(const T *row, int column, int cols) {
  return !EDGES || (column >= 0 && column <= cols - vector_size<T> && (unsigned long long)(row + column) % 16 == 0);
}

// V elements of a row of `cols` from `column` on, with what lies beyond the row as `padding`. With
// EDGES the row begins and ends anywhere, else at multiples of 16 bytes.
template <bool EDGES, typename T>
__device__ __forceinline__ uint4 load_vector(const T *row, int column, int cols, widened<T> padding) {
  constexpr int V = vector_size<T>;
  if (is_whole<EDGES>(row, column, cols))
    return load_once(row + column);
  widened<T> a[V];
#pragma unroll
  for (int i = 0; i < V; i++) a[i] = (unsigned)(column + i) < (unsigned)cols ? wide(row[column + i]) : padding;
  return narrow<T>(a);
}
template <bool EDGES, typename T>
__device__ __forceinline__ void store_vector(T *row, int column, int cols, const widened<T> (&a)[vector_size<T>]) {
  constexpr int V = vector_size<T>;
  if (is_whole<EDGES>(row, column, cols))
    return store_once(row + column, narrow<T>(a));
#pragma unroll
  for (int i = 0; i < V; i++)
    if ((unsigned)(column + i) < (unsigned)cols) round_to(row[column + i], a[i]);
}
// How many elements before its first a row's first aligned vector begins.
template <bool EDGES, typename T> __device__ __forceinline__ int elements_before(const T *row) {
  return EDGES ? (int)((unsigned long long)row % 16 / sizeof(T)) : 0;
}

// ------------------------------------------------------------ merging States

template <typename State> __device__ __forceinline__ State shuffled(const State &s, int lanes, int from, bool change) {
  static_assert(sizeof(State) % 4 == 0, "a State is made of 32-bit words");
  State other;
  const unsigned *given = reinterpret_cast<const unsigned *>(&s);
  unsigned *found = reinterpret_cast<unsigned *>(&other);
#pragma unroll
  for (int i = 0; i < sizeof(State) / 4; i++)
    found[i] = change ? __shfl_xor_sync(~0u, given[i], from, lanes) : __shfl_sync(~0u, given[i], from, lanes);
  return other;
}

// The State of LANES neighbouring threads, a power of two: the very same in all of them.
template <int LANES, class Op>
__device__ __forceinline__ typename Op::State merged_lanes(const Op &op, typename Op::State s) {
#pragma unroll
  for (int i = 1; i < LANES; i *= 2) s = op.merge(s, shuffled(s, LANES, i, true));
  return LANES > 1 ? shuffled(s, LANES, 0, false) : s;
}

__host__ __device__ constexpr int power_of_two_from(int n) { return n <= 1 ? 1 : 2 * power_of_two_from((n + 1) / 2); }

// The State of a block: the very same in all threads. A second call needs a __syncthreads() before it.
template <int THREADS, class Op>
__device__ __forceinline__ typename Op::State merged_block(const Op &op, typename Op::State s) {
  constexpr int WARPS = THREADS / 32, LANES = power_of_two_from(WARPS);
  s = merged_lanes<32>(op, s);
  if (WARPS == 1) return s;
  __shared__ typename Op::State states[WARPS];
  if (threadIdx.x % 32 == 0) states[threadIdx.x / 32] = s;
  __syncthreads();
  const int warp = threadIdx.x % LANES;
  return merged_lanes<LANES>(op, warp < WARPS ? states[warp] : op.none());
}

// The State of a cluster of CLUSTER blocks, by distributed shared memory: the very same in all threads. Once
// in a kernel, after begin_cluster(). From sm_90 on; in a kernel for older GPUs it is never called.
__device__ __forceinline__ void begin_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
template <int THREADS, int CLUSTER, class Op>
__device__ __forceinline__ typename Op::State merged_cluster(const Op &op, typename Op::State s) {
#if __CUDA_ARCH__ >= 900
  using State = typename Op::State;
  constexpr int WARPS = THREADS / 32;
  static_assert(CLUSTER <= 32 && sizeof(State) % 4 == 0, "a lane stores the State of its warp in each block");
  __shared__ State states[WARPS * CLUSTER];
  const int lane = threadIdx.x % 32;
  s = merged_lanes<32>(op, s);
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // every block of the cluster runs
  if (lane < CLUSTER) {
    const unsigned here = (unsigned)__cvta_generic_to_shared(&states[blockIdx.x % CLUSTER * WARPS + threadIdx.x / 32]);
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(lane));
#pragma unroll
    for (int i = 0; i < sizeof(State) / 4; i++)
      asm volatile("st.shared::cluster.u32 [%0], %1;"
                   ::"r"(there + 4 * i), "r"(reinterpret_cast<const unsigned *>(&s)[i]) : "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  s = op.none();
#pragma unroll
  for (int i = lane; i < WARPS * CLUSTER; i += 32) s = op.merge(s, states[i]);
  s = merged_lanes<32>(op, s);
#endif
  return s;
}

// --------------------------------------------------------------------- forms

template <class Op, class = void> struct HeldBy { struct type {}; static constexpr bool any = false; };
template <class...> using void_type = void;
template <class Op> struct HeldBy<Op, void_type<typename Op::Held>> {
  using type = typename Op::Held;
  static constexpr bool any = true;
};

// 16 bytes to shared memory, while the thread goes on; wait_for_copies() waits for those of this thread.
__device__ __forceinline__ void copy_once(uint4 *to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(__cvta_generic_to_global(from)) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// For __launch_bounds__: how many blocks a multiprocessor shall hold: 1536 threads where rows are short, else 1024.
template <int THREADS, int VPT, int MORE> constexpr int blocks_of = (VPT <= 4 && MORE == 0 ? 1536 : 1024) / THREADS;

// A row on the chip: read once, written once. It lies in the registers of LANES threads, VPT vectors in each,
// and its rest in dynamic shared memory (`smem=`), MORE vectors of each thread: INPUTS * MORE * THREADS * 16
// bytes. LANES is a power of two up to 32, or THREADS, or THREADS times the blocks of a cluster.
// Grid: rows * LANES / THREADS, rounded up.
template <int LANES, int THREADS, int VPT, int MORE, bool EDGES, class Op>
__device__ __forceinline__ void rows_on_chip(const Op &op, long long rows, int cols) {
  using T = typename Op::T;
  constexpr int V = vector_size<T>;
  static_assert(LANES <= 32 || LANES % THREADS == 0, "a row has lanes of one warp, of a block or of a cluster");
  if constexpr (LANES > THREADS) begin_cluster();
  const long long thread = (long long)blockIdx.x * THREADS + threadIdx.x, row = thread / LANES;
  const int lane = thread % LANES, end = row < rows ? cols : -V;  // none of a row that is not there
  const long long start = row * cols;
  const int before = elements_before<EDGES>(op.in[0] + start);
  extern __shared__ uint4 rows_memory[];
  uint4 *const shared = rows_memory + threadIdx.x;  // each thread has its own
#pragma unroll
  for (int j = 0; j < MORE; j++) {
    const int column = (lane + (VPT + j) * LANES) * V - before;
    if (column < end)
#pragma unroll
      for (int i = 0; i < Op::INPUTS; i++) {
        uint4 *const to = shared + (j * Op::INPUTS + i) * THREADS;
        if (is_whole<EDGES>(op.in[i] + start, column, cols))
          copy_once(to, op.in[i] + start + column);
        else
          *to = load_vector<EDGES>(op.in[i] + start, column, cols, op.padding());
      }
  }
  constexpr int WORDS = VPT * (4 * Op::INPUTS + sizeof(typename HeldBy<Op>::type) / 4);
  constexpr bool HOLD = HeldBy<Op>::any && !EDGES && WORDS <= 32;  // else fewer warps would fit
  uint4 raw[VPT][Op::INPUTS];
  typename HeldBy<Op>::type held[VPT];
#pragma unroll
  for (int j = 0; j < VPT; j++) {
    const int column = (lane + j * LANES) * V - before;
    if (column < end)
#pragma unroll
      for (int i = 0; i < Op::INPUTS; i++)
        raw[j][i] = load_vector<EDGES>(op.in[i] + start, column, cols, op.padding());
  }
  if constexpr (HOLD)
#pragma unroll
    for (int j = 0; j < VPT; j++) held[j] = op.hold((lane + j * LANES) * V);
  typename Op::State state = op.none();
#pragma unroll
  for (int j = 0; j < VPT + MORE; j++) {
    const int column = (lane + j * LANES) * V - before;
    if (j == VPT) wait_for_copies();
    if (column < end) {
      widened<T> v[Op::INPUTS][V];
#pragma unroll
      for (int i = 0; i < Op::INPUTS; i++)
        widen<T>(j < VPT ? raw[j < VPT ? j : 0][i] : shared[((j - VPT) * Op::INPUTS + i) * THREADS], v[i]);
      if constexpr (HOLD)
        state = j < VPT ? op.add(state, v, held[j < VPT ? j : 0], column, true) : op.add(state, v, column);
      else
        state = op.add(state, v, column);
    }
  }
  if constexpr (LANES <= 32)
    state = merged_lanes<LANES>(op, state);
  else if constexpr (LANES == THREADS)
    state = merged_block<THREADS>(op, state);
  else
    state = merged_cluster<THREADS, LANES / THREADS>(op, state);
  if (row >= rows) return;
  const typename Op::Row found = op.row(state, row, lane == 0);
  const auto finish = [&](int j, const auto &...of_columns) {
    const int column = (lane + j * LANES) * V - before;
    if (column < end) {
      widened<T> v[Op::INPUTS][V], y[Op::OUTPUTS ? Op::OUTPUTS : 1][V];
#pragma unroll
      for (int i = 0; i < Op::INPUTS; i++)
        widen<T>(j < VPT ? raw[j < VPT ? j : 0][i] : shared[((j - VPT) * Op::INPUTS + i) * THREADS], v[i]);
      op.results(found, v, of_columns..., column, y);
#pragma unroll
      for (int i = 0; i < Op::OUTPUTS; i++) store_vector<EDGES>(op.out[i] + start, column, cols, y[i]);
    }
  };
  if constexpr (HOLD) {
    typename HeldBy<Op>::type ahead[VPT];  // for the next VPT vectors, under way before they are needed
#pragma unroll
    for (int first = 0; first < VPT + MORE; first += VPT) {
#pragma unroll
      for (int j = 0; j < VPT; j++) {
        if (first) held[j] = ahead[j];
        if (first + VPT < VPT + MORE) ahead[j] = op.hold((lane + (first + VPT + j) * LANES) * V);
      }
#pragma unroll
      for (int j = 0; j < VPT; j++)
        if (first + j < VPT + MORE) finish(first + j, held[j]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < VPT + MORE; j++) finish(j);
  }
}

// A row of any length for a block: read twice, the second time from the L2 cache. Grid: rows.
template <int THREADS, bool EDGES, class Op> __device__ __forceinline__ void rows_read_twice(const Op &op, int cols) {
  using T = typename Op::T;
  constexpr int V = vector_size<T>, AHEAD = 4 / Op::INPUTS;
  const long long row = blockIdx.x, start = row * cols;
  const int before = elements_before<EDGES>(op.in[0] + start), vectors = (cols + before + V - 1) / V;
  const auto pass = [&](const auto &each) {  // of the thread's vectors, AHEAD of them on their way at once
    for (int at = threadIdx.x; at < vectors; at += THREADS * AHEAD) {
      uint4 raw[AHEAD][Op::INPUTS];
#pragma unroll
      for (int j = 0; j < AHEAD; j++)
        if (at + j * THREADS < vectors)
#pragma unroll
          for (int i = 0; i < Op::INPUTS; i++)
            raw[j][i] = load_vector<EDGES>(op.in[i] + start, (at + j * THREADS) * V - before, cols, op.padding());
#pragma unroll
      for (int j = 0; j < AHEAD; j++)
        if (at + j * THREADS < vectors) {
          widened<T> v[Op::INPUTS][V];
#pragma unroll
          for (int i = 0; i < Op::INPUTS; i++) widen<T>(raw[j][i], v[i]);
          each(v, (at + j * THREADS) * V - before);
        }
    }
  };
  typename Op::State state = op.none();
  pass([&](const widened<T>(&v)[Op::INPUTS][V], int column) { state = op.add(state, v, column); });
  state = merged_block<THREADS>(op, state);
  const typename Op::Row found = op.row(state, row, threadIdx.x == 0);
  pass([&](const widened<T>(&v)[Op::INPUTS][V], int column) {
    widened<T> y[Op::OUTPUTS ? Op::OUTPUTS : 1][V];
    op.results(found, v, column, y);
#pragma unroll
    for (int i = 0; i < Op::OUTPUTS; i++) store_vector<EDGES>(op.out[i] + start, column, cols, y[i]);
  });
}

// Rows whose elements lie `inner` apart, as along a dimension that is not the last: 32 neighbouring rows
// for a block of 32 x DEPTH threads. The tensor is [outer, cols, inner]; grid: outer * (inner / 32, rounded up).
template <int DEPTH, class Op>
__device__ __forceinline__ void rows_strided(const Op &op, int cols, long long inner) {
  using T = typename Op::T;
  const long long blocks = (inner + 31) / 32, outer = blockIdx.x / blocks;
  const long long at = blockIdx.x % blocks * 32 + threadIdx.x % 32, start = outer * cols * inner + at;
  const int depth = threadIdx.x / 32;
  __shared__ typename Op::State states[DEPTH][32];
  typename Op::State state = op.none();
  widened<T> v[Op::INPUTS][1], y[Op::OUTPUTS ? Op::OUTPUTS : 1][1];
  for (int column = depth; at < inner && column < cols; column += DEPTH) {
#pragma unroll
    for (int i = 0; i < Op::INPUTS; i++) v[i][0] = wide(op.in[i][start + column * inner]);
    state = op.add(state, v, column);
  }
  states[depth][threadIdx.x % 32] = state;
  __syncthreads();
  if (at >= inner) return;
  state = states[0][threadIdx.x % 32];
#pragma unroll
  for (int i = 1; i < DEPTH; i++) state = op.merge(state, states[i][threadIdx.x % 32]);
  const typename Op::Row found = op.row(state, outer * inner + at, depth == 0);
  for (int column = depth; column < cols; column += DEPTH) {
#pragma unroll
    for (int i = 0; i < Op::INPUTS; i++) v[i][0] = wide(op.in[i][start + column * inner]);
    op.results(found, v, column, y);
#pragma unroll
    for (int i = 0; i < Op::OUTPUTS; i++) round_to(op.out[i][start + column * inner], y[i][0]);
  }
}

// -------------------------------------------------------------- exponentials

constexpr float log2_e = 1.4426950408889634f, ln_2 = 0.6931471805599453f;

__device__ __forceinline__ float power_of_2(float x) {  // 0 at -inf; a subnormal result is 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double power_of_2(double x) { return exp2(x); }
template <typename A> __device__ __forceinline__ A infinity();
template <> __device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
template <> __device__ __forceinline__ double infinity() { return __longlong_as_double(0x7ff0000000000000ll); }
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

// scale * (a - b), where a - b alone may be infinite.
template <typename A> __device__ __forceinline__ A scaled_difference(A a, A b, A scale) {
  return (a * A(0.5) - b * A(0.5)) * (scale + scale);
}

// The sum of 2 ** (scale * (x - max)) over elements x, and max, found together (Milakov & Gimelshein 2018).
// Nothing becomes NaN by itself: a part that is -inf throughout has the sum 0. scale >= 0.
template <typename A> struct Exponentials {
  A max, sum;

  static __device__ __forceinline__ Exponentials none() { return {-infinity<A>(), 0}; }
  // What to subtract from elements: finite where the maximum is -inf.
  __device__ __forceinline__ A base() const { return max == -infinity<A>() ? A(0) : max; }
  template <int V> __device__ __forceinline__ Exponentials add(const A (&x)[V], A scale) const {
    Exponentials n{max, 0};
#pragma unroll
    for (int i = 0; i < V; i++) n.max = larger(n.max, x[i]);
    const A base = n.base();
    n.sum = rebased(n, scale);
#pragma unroll
    for (int i = 0; i < V; i++) n.sum += power_of_2(scaled_difference(x[i], base, scale));
    return n;
  }
  // The sum, over another maximum that is not smaller.
  __device__ __forceinline__ A rebased(const Exponentials &to, A scale) const {
    return max == to.max ? sum : sum * power_of_2(scaled_difference(max, to.max, scale));
  }
  static __device__ __forceinline__ Exponentials merged(const Exponentials &a, const Exponentials &b, A scale) {
    Exponentials n{larger(a.max, b.max), 0};
    n.sum = a.rebased(n, scale) + b.rebased(n, scale);
    return n;
  }
};

}  // namespace jitkern
