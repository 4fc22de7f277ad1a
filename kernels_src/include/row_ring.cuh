// The form for long rows: a row lies in the shared memory of a cluster, is read once and written once, and
// the next rows arrive meanwhile. For sm_90 and later; see rows.cuh for what an Op is.
//
// A row is cut into chunks of CHUNK bytes, which the warps of all blocks of the cluster take in turn. Each
// warp has a ring of SLOTS chunks of its own and needs no other warp but for the State of the row:
//
//   1. Its lane 0 asks for chunks by bulk copies (cp.async.bulk), as many as there are slots, also of the
//      warp's next rows. A barrier (mbarrier) for each slot tells when its chunk has arrived.
//   2. The warp adds its chunks of a row as they arrive, and sends its State to all blocks of the cluster
//      (st.async to distributed shared memory).
//   3. With the States of all warps it goes over the same chunks once more, writes the results over them,
//      and has them copied to memory (cp.async.bulk, in groups). When such a copy has read its slot, the
//      slot is free for the next chunk.
//
// So memory is read and written all the time. The instructions are written as in libcu++'s <cuda/ptx>.
#pragma once
#include "rows.cuh"

namespace jitkern {
namespace ring_detail {

__device__ __forceinline__ unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void make_barrier(unsigned long long *barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(unsigned long long *barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barriers_are_made() {  // visible to other blocks, and to copies
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void arrive_expecting(unsigned long long *barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;"
               ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_for_copy(unsigned long long *barrier, unsigned phase) {
  asm volatile("{\n.reg .pred done;\n"
               "AGAIN:\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra AGAIN;\n}" ::"r"(shared_address(barrier)), "r"(phase) : "memory");
}
__device__ __forceinline__ void wait_for_blocks(unsigned long long *barrier, unsigned phase) {
  asm volatile("{\n.reg .pred done;\n"
               "AGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra AGAIN;\n}" ::"r"(shared_address(barrier)), "r"(phase) : "memory");
}
__device__ __forceinline__ void copy_in(void *to, const void *from, unsigned bytes, unsigned long long *barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
__device__ __forceinline__ void copy_out(void *to, const void *from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               ::"l"(__cvta_generic_to_global(to)), "r"(shared_address(from)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void end_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but the last N groups of copies out have read their slots.
template <int N> __device__ __forceinline__ void wait_until_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void wait_until_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// What this thread wrote to shared memory is for copies to read.
__device__ __forceinline__ void written_for_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ unsigned address_in(unsigned address, int rank) {
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void send(unsigned to, unsigned word, unsigned barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
               ::"r"(to), "r"(word), "r"(barrier) : "memory");
}
template <int CLUSTER> __device__ __forceinline__ void all_have_begun() {
  __syncwarp();
  if (CLUSTER > 1)
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  else
    __syncthreads();
}

template <class Op> __device__ __forceinline__ auto begin(Op &op, long long row, int) -> decltype(op.begin(row)) {
  return op.begin(row);
}
template <class Op> __device__ __forceinline__ void begin(Op &, long long, long) {}

}  // namespace ring_detail

// Block: 32 * WARPS. Grid: any number of clusters of CLUSTER blocks, one block for each multiprocessor. Rows
// begin at multiples of 16 bytes, end there, and have at most WARPS * CLUSTER * SLOTS chunks; with fewer,
// chunks of the next row arrive early. LAG: copies out that a warp leaves unfinished while it goes on.
// An Op that has begin(row) is told of each row before its elements are added.
// Dynamic shared memory (`smem=`): WARPS * SLOTS * (Op::INPUTS * CHUNK + 8) + 16 + 2 * WARPS * CLUSTER *
// sizeof(State) bytes.
template <int WARPS, int CHUNK, int SLOTS, int CLUSTER, int LAG, class Op>
__device__ __forceinline__ void rows_in_ring(Op op, long long rows, int cols) {
  using namespace ring_detail;
  using T = typename Op::T;
  using State = typename Op::State;
  static_assert(Op::OUTPUTS <= Op::INPUTS, "results are written over what was read");
  static_assert(CHUNK % 512 == 0 && sizeof(State) % 4 == 0 && LAG < SLOTS, "16 bytes for each lane");
  constexpr int V = vector_size<T>, VECTORS = CHUNK / 16, WORKERS = WARPS * CLUSTER;
  constexpr int WORDS = sizeof(State) / 4, SLOT = Op::INPUTS * CHUNK;
  extern __shared__ __align__(128) unsigned char ring_memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % CLUSTER;
  unsigned char *const slots = ring_memory + warp * SLOTS * SLOT;
  unsigned long long *const barriers = reinterpret_cast<unsigned long long *>(ring_memory + WARPS * SLOTS * SLOT);
  unsigned long long *const arrived = barriers + warp * SLOTS, *const exchanged = barriers + WARPS * SLOTS;
  State *const states = reinterpret_cast<State *>(exchanged + 2);  // [2][WORKERS]: of this row and the next

  const int vectors = cols / V, chunks = (vectors + VECTORS - 1) / VECTORS;
  const int worker = warp * CLUSTER + rank, mine = (chunks - worker + WORKERS - 1) / WORKERS;
  const long long first_row = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;

  if (lane == 0) {
    for (int s = 0; s < SLOTS; s++) make_barrier(arrived + s, 1);
    if (warp == 0)
      for (int i = 0; i < 2; i++) make_barrier(exchanged + i, CLUSTER > 1 ? 1 : WARPS);
    barriers_are_made();
    if (CLUSTER > 1 && warp == 0)
      for (int i = 0; i < 2; i++) arrive_expecting(exchanged + i, WORKERS * sizeof(State));
  }
  all_have_begun<CLUSTER>();

  // Lane 0 alone: ask for the next chunk of the warp, of whatever row.
  long long next_row = first_row;
  int next_chunk = 0, next_slot = 0, used = 0;  // used: slots whose copies out may be unfinished
  auto ask = [&] {
    if (next_row >= rows) return;
    const int first = (worker + next_chunk * WORKERS) * VECTORS, bytes = min(VECTORS, vectors - first) * 16;
    arrive_expecting(arrived + next_slot, Op::INPUTS * bytes);
#pragma unroll
    for (int i = 0; i < Op::INPUTS; i++)
      copy_in(slots + next_slot * SLOT + i * CHUNK, op.in[i] + (next_row * vectors + first) * V, bytes,
              arrived + next_slot);
    if (++next_slot == SLOTS) next_slot = 0;
    if (++next_chunk == mine) next_chunk = 0, next_row += step;
  };
  if (lane == 0 && mine > 0)
    for (int s = 0; s < SLOTS; s++) ask();

  int slot = 0, result_slot = 0, turn = 0;
  unsigned phase = 0, turn_phase = 0;
  for (long long row = first_row; row < rows; row += step) {
    begin(op, row, 0);
    State state = op.none();
    for (int j = 0; j < mine; j++) {
      const int first = (worker + j * WORKERS) * VECTORS, count = min(VECTORS, vectors - first);
      wait_for_copy(arrived + slot, phase);
      const uint4 *chunk = reinterpret_cast<const uint4 *>(slots + slot * SLOT);
      auto add = [&](int i) {
        widened<T> v[Op::INPUTS][V];
#pragma unroll
        for (int n = 0; n < Op::INPUTS; n++) widen<T>(chunk[n * VECTORS + i], v[n]);
        state = op.add(state, v, (first + i) * V);
      };
      if (count == VECTORS) {
#pragma unroll
        for (int i = 0; i < VECTORS; i += 32) add(i + lane);
      } else {
        for (int i = lane; i < count; i += 32) add(i);
      }
      if (++slot == SLOTS) slot = 0, phase ^= 1;
      if (j == 0 && lane == 0 && used) {
        wait_until_read<0>();
        for (; used; used--) ask();
      }
    }

    state = merged_lanes<32>(op, state);
    State *const all = states + turn * WORKERS;
    if constexpr (CLUSTER == 1) {  // st.async is for clusters
      if (lane == 0) {
        all[worker] = state;
        arrive(exchanged + turn);
      }
    } else if (lane < CLUSTER) {
      const unsigned to = address_in(shared_address(all + worker), lane);
      const unsigned barrier = address_in(shared_address(exchanged + turn), lane);
      const unsigned *words = reinterpret_cast<const unsigned *>(&state);
#pragma unroll
      for (int i = 0; i < WORDS; i++) send(to + 4 * i, words[i], barrier);
    }
    wait_for_blocks(exchanged + turn, turn_phase);
    // For the row after the next. Nobody sends to it before this warp has sent the State of the next row.
    if (CLUSTER > 1 && threadIdx.x == 0) arrive_expecting(exchanged + turn, WORKERS * sizeof(State));
    state = lane < WORKERS ? all[lane] : op.none();
    for (int i = lane + 32; i < WORKERS; i += 32) state = op.merge(state, all[i]);
    state = merged_lanes<32>(op, state);
    if (turn ^= 1; turn == 0) turn_phase ^= 1;

    const typename Op::Row found = op.row(state, row, rank == 0 && threadIdx.x == 0);
    for (int j = 0; j < mine; j++) {
      const int first = (worker + j * WORKERS) * VECTORS, count = min(VECTORS, vectors - first);
      uint4 *chunk = reinterpret_cast<uint4 *>(slots + result_slot * SLOT);
      auto replace = [&](int i) {
        widened<T> v[Op::INPUTS][V], y[Op::OUTPUTS][V];
#pragma unroll
        for (int n = 0; n < Op::INPUTS; n++) widen<T>(chunk[n * VECTORS + i], v[n]);
        op.results(found, v, (first + i) * V, y);
#pragma unroll
        for (int n = 0; n < Op::OUTPUTS; n++) chunk[n * VECTORS + i] = narrow<T>(y[n]);
      };
      if (count == VECTORS) {
#pragma unroll
        for (int i = 0; i < VECTORS; i += 32) replace(i + lane);
      } else {
        for (int i = lane; i < count; i += 32) replace(i);
      }
      written_for_copies();
      __syncwarp();
      if (lane == 0) {
#pragma unroll
        for (int n = 0; n < Op::OUTPUTS; n++)
          copy_out(op.out[n] + (row * vectors + first) * V, chunk + n * VECTORS, count * 16);
        end_group();
        if (++used > LAG) {
          wait_until_read<LAG>();
          ask();
          used--;
        }
      }
      if (++result_slot == SLOTS) result_slot = 0;
    }
  }
  // Everything that other blocks send to this one has been waited for, so it may end before them.
  if (lane == 0) wait_until_written();
}

}  // namespace jitkern
