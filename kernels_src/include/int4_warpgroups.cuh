// Private. y[m, n] = sum_k x[m, k] * w[n, k] for 9 to 64 tokens m and weights of 4 bits in groups of 128, by matrix
// instructions of warpgroups, of sm_90a alone.
//
// These have their fragments of 16 rows of weights in registers, one tile for each warp, dequantized as in low_bit.cuh,
// and x in shared memory, which four warps read once. Some warps of a block bring weights, scales and x of a stage of 256
// numbers k, DEPTH stages ahead; the others multiply.
//
// Int4 has numbers k in an order of its own within a fragment, so words of x change places on their way to shared
// memory: of the 16 bytes that lane t of four takes elsewhere, word w becomes word t of a column of 16 bytes of each
// token, column w. Two columns are the numbers k of an instruction. Each block does so on its own, or `order_tokens` once
// before, which pays where there are many blocks of many tokens: then a copy brings x of a stage as it is.
#pragma once
#include "barriers.cuh"
#include "dependent_launch.cuh"
#include "low_bit.cuh"
#include "warpgroup.cuh"

namespace jitkern::low_bit {

template <int THREADS> __device__ __forceinline__ void multiplying_warps_wait() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// Shared memory of a stage, for 8 * MT tokens.
template <typename T, int ZEROS, int MT, int WARPGROUPS, bool ORDERED> struct WideStage {
  using F = Int4<T, 128, ZEROS, false>;
  using Zero = typename F::Zero;
  static_assert(ZEROS != ADDED_ZEROS);
  static constexpr int STEPS = 2, TILES = 4 * WARPGROUPS, ROWS = 16 * TILES;
  static constexpr int TILE = STEPS * F::BYTES, SCALE = ROWS * sizeof(T), ZERO = ZEROS == SYMMETRIC ? 0 : ROWS;
  static constexpr int COLUMN = 8 * MT * 16 + (ORDERED ? 0 : 16);  // the last 16 bytes are against bank conflicts
  static constexpr int COLUMNS = 16;               // in a step
  static constexpr int SCALES = TILES * TILE, ZEROES = SCALES + STEPS * SCALE, TOKENS = ZEROES + STEPS * ZERO;  // where they begin
  static constexpr int X = STEPS * COLUMNS * COLUMN, BYTES = TOKENS + X;
};

// Writes tokens as stages have them: 16 bytes of each of 8 * MT tokens, of which those that are not there are 0, column
// after column. A thread writes 16 bytes.
template <int MT, typename T> __device__ __forceinline__ void order_tokens(uint4 *ordered, const T *x, int tokens, int K) {
  let_next_begin();
  wait_for_inputs();
  const int at = blockIdx.x * blockDim.x + threadIdx.x, token = at % (8 * MT), column = at / (8 * MT);
  if (column >= K / 8) return;
  uint4 words = make_uint4(0, 0, 0, 0);
  if (token < tokens) {
    // Column 4 * i + w is of the 32 numbers k from 32 * i on: word w of each 16 bytes.
    const unsigned *from = (const unsigned *)(x + (long long)token * K) + column / 4 * 16 + column % 4;
    words = make_uint4(from[0], from[4], from[8], from[12]);
  }
  ordered[at] = words;
}

// A block of rows has ROWS rows. The stages of all blocks of rows, one after the other, are shared out evenly over the
// grid, so what a block of the grid has may begin and end within a block of rows. Sums of such a part go to `partial`,
// which has for each block of the grid two times those of its threads: for the rows that it has the end of, and for those
// that it has the beginning of. The block that comes last adds the parts, in their order. `counters`, for each block of
// rows, are 0 before and after. A chunk of PIECES * 32 numbers k is dequantized while the one before is multiplied.
// ORDERED: x is as `order_tokens` writes it.
template <typename T, int ZEROS, int MT, int WARPGROUPS, int DEPTH, int PIECES, bool ORDERED, class Result>
__device__ __forceinline__ void wide_tokens(const Int4<T, 128, ZEROS, false> &f, const Result &result, const T *x, int K, float *partial,
                                            unsigned *counters) {
  using Stage = WideStage<T, ZEROS, MT, WARPGROUPS, ORDERED>;
  using F = typename Stage::F;
  constexpr int WARPS = 4 * WARPGROUPS, BRINGING = ORDERED ? 1 : 4, THREADS = WARPS * 32, STEPS = Stage::STEPS, COLUMN = Stage::COLUMN;
  extern __shared__ uint4 low_bit_memory[];
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const int N = result.rows, stages = K / (STEPS * F::STEP), tiles = N / 16, blocks = (N + Stage::ROWS - 1) / Stage::ROWS;
  const int each = blocks * stages / (int)gridDim.x, more = blocks * stages % (int)gridDim.x;  // the first have one stage more
  const int first = blockIdx.x * each + min((int)blockIdx.x, more), count = each + ((int)blockIdx.x < more);
  int block = first / stages, stage = first % stages, slot = 0;

  unsigned char *const memory = (unsigned char *)low_bit_memory;
  const unsigned address = shared_address(memory), full = address + DEPTH * Stage::BYTES, empty = full + 8 * DEPTH;
  int &is_last_shared = *(int *)(memory + DEPTH * Stage::BYTES + 16 * DEPTH);
  if (threadIdx.x == 0) {
    for (int i = 0; i < DEPTH; i++) {
      make_barrier(full + 8 * i, ORDERED ? 1 : BRINGING * 32 + 1);
      make_barrier(empty + 8 * i, WARPS);
    }
    barriers_are_made();
  }
  if (!ORDERED && result.tokens < 8 * MT) {  // those that are not there stay 0
    constexpr int COLUMNS = STEPS * Stage::COLUMNS;
    for (int i = threadIdx.x; i < DEPTH * COLUMNS * 8 * MT; i += THREADS + BRINGING * 32) {
      const int token = i % (8 * MT), column = i / (8 * MT) % COLUMNS, of_slot = i / (8 * MT) / COLUMNS * Stage::BYTES;
      if (token >= result.tokens) *(uint4 *)(memory + of_slot + Stage::TOKENS + column * COLUMN + token * 16) = make_uint4(0, 0, 0, 0);
    }
  }
  fence_memory();
  if (lane == 0 && warp < WARPS && block * WARPS + warp < tiles)
    prefetch(f.q + ((long long)(block * WARPS + warp) * stages + stage) * (Stage::TILE / 16), min(DEPTH, stages - stage) * Stage::TILE);
  __syncthreads();
  let_next_begin();
  wait_for_inputs();

  if (warp >= WARPS) {
    // A lane copies words of 4 bytes of tokens that are BRINGING apart.
    const int token = warp - WARPS, vector = lane / 4;
    const unsigned to = address + Stage::TOKENS + (vector / 4 * 4 + lane % 4) * COLUMN + token * 16 + vector % 4 * 4;
    const T *from = x + (long long)token * K + stage * (STEPS * F::STEP) + lane * 2;
    unsigned parity = 1;
    for (int i = 0; i < count; i++) {
      wait_for_phase(empty + 8 * slot, parity);
      const unsigned of_slot = address + slot * Stage::BYTES, barrier = full + 8 * slot;
      if (warp == WARPS) {
        const int there = min(WARPS, tiles - block * WARPS);
        const long long scale = (long long)(stage * STEPS + lane) * N + block * Stage::ROWS;
        const unsigned bytes = there * (Stage::TILE + STEPS * (Stage::SCALE + Stage::ZERO) / WARPS);
        if (lane == 0) arrive_and_expect(barrier, bytes + (ORDERED ? Stage::X : 0));
        __syncwarp();
        if (lane < there)
          copy_bytes_once(of_slot + lane * Stage::TILE, f.q + ((long long)(block * WARPS + lane) * stages + stage) * (Stage::TILE / 16),
                          Stage::TILE, barrier);
        if (lane < STEPS) {
          copy_bytes(of_slot + Stage::SCALES + lane * Stage::SCALE, f.scale + scale, there * (Stage::SCALE / WARPS), barrier);
          if (ZEROS != SYMMETRIC) copy_bytes(of_slot + Stage::ZEROES + lane * Stage::ZERO, f.zero + scale, there * (Stage::ZERO / WARPS), barrier);
        }
        if (ORDERED && lane == STEPS) copy_bytes(of_slot + Stage::TOKENS, x + (long long)stage * (Stage::X / sizeof(T)), Stage::X, barrier);
        __syncwarp();
      }
      if constexpr (!ORDERED) {
#pragma unroll
        for (int p = 0; p < 8 * MT; p += BRINGING)
          if (token + p < result.tokens)
#pragma unroll
            for (int w = 0; w < 2 * STEPS; w++)  // of 64 numbers k
              copy_4(to + slot * Stage::BYTES + w * 8 * COLUMN + p * 16, from + (long long)p * K + w * 64);
        arrive_after_copies(barrier);
      }
      from += STEPS * F::STEP;
      if (++stage == stages) stage = 0, block++, from -= K;
      if (++slot == DEPTH) slot = 0, parity ^= 1;
    }
    wait_for_copies<0>();
    return;
  }

  constexpr int CHUNKS = F::STEP / 32 / PIECES;  // of a step
  static_assert(CHUNKS % 2 == 0);
  const unsigned long long of_x = warpgroup::described(address + Stage::TOKENS, COLUMN, 128);
  const unsigned words = address + warp * Stage::TILE + lane * 16;
  const unsigned char *const scales = memory + Stage::SCALES + (warp * 16 + lane / 4 * 2) * sizeof(T);
  const unsigned char *const zeros = memory + Stage::ZEROES + warp * 16 + lane / 8 * 4;
  float sums[MT][4] = {};
  unsigned parity = 0;
  for (int left = count; left > 0;) {
    const bool is_begun = stage > 0;
    const int until = min(left, stages - stage);
    left -= until, stage += until;
    float part[MT][4] = {}, scale[2] = {};  // of the step that is being multiplied
    unsigned a[2][PIECES][2][4];
    const auto add_part = [&] {
      warpgroup::keep(part);
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int c = 0; c < 4; c++) sums[m][c] = fmaf(scale[c / 2], part[m][c], sums[m][c]);
    };
    int before = slot;
    for (int i = 0; i < until; i++) {
      wait_for_phase(full + 8 * slot, parity);
      fence_memory();
      const unsigned of_slot = slot * Stage::BYTES;
      const unsigned long long b = of_x + (of_slot >> 4);
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        typename F::Held held;
        const unsigned side[2] = {*(const unsigned *)(scales + of_slot + s * Stage::SCALE),
                                  ZEROS == SYMMETRIC ? 0 : *(const unsigned *)(zeros + of_slot + s * Stage::ZERO)};
        held.vectors = words + of_slot + s * F::BYTES;
        F::hold_sides(held, side[0], side[1], lane);
#pragma unroll
        for (int u = 0; u < CHUNKS; u++) {
          warpgroup::wait_for_products<1>();
#pragma unroll
          for (int p = 0; p < PIECES; p++) F::fragments(a[u % 2][p], held, u * PIECES + p);
          if (u == 0) {
            warpgroup::wait_for_products<0>();
            add_part();
            if (s == 0 && i > 0 && lane == 0) arrive(empty + 8 * before);
            scale[0] = held.scale[0], scale[1] = held.scale[1];
          }
          warpgroup::keep(part);
          warpgroup::fence_registers();
#pragma unroll
          for (int j = 0; j < 2 * PIECES; j++)
            warpgroup::multiply(part, a[u % 2][j / 2][j % 2], b + ((s * Stage::COLUMNS + u * PIECES * 4 + j * 2) * COLUMN >> 4),
                                u + j > 0, (const T *)nullptr);
          warpgroup::commit();
        }
      }
      before = slot;
      if (++slot == DEPTH) slot = 0, parity ^= 1;
    }
    warpgroup::wait_for_products<0>();
    if (lane == 0) arrive(empty + 8 * before);
    add_part();

    bool is_last = true;
    if (is_begun || stage < stages) {
      const auto has = [&](int stage) {  // the block of the grid that has a stage
        return stage < more * (each + 1) ? stage / (each + 1) : more + (stage - more * (each + 1)) / each;
      };
      const int begin = has(block * stages), end = has(block * stages + stages - 1);
      float4 *const all = (float4 *)partial + threadIdx.x;
#pragma unroll
      for (int m = 0; m < MT; m++)
        all[((blockIdx.x * 2ll + !is_begun) * MT + m) * THREADS] = reinterpret_cast<const float4 &>(sums[m]);
      __threadfence();
      multiplying_warps_wait<THREADS>();
      if (threadIdx.x == 0) {
        is_last_shared = atomicAdd(counters + block, 1u) == end - begin;
        if (is_last_shared) counters[block] = 0;
      }
      multiplying_warps_wait<THREADS>();
      is_last = is_last_shared;
      if (is_last) {
        __threadfence();
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
          for (int c = 0; c < 4; c++) sums[m][c] = 0;
        for (int b = begin; b <= end; b++)
#pragma unroll
          for (int m = 0; m < MT; m++) {
            const float4 its = __ldcg(all + ((b * 2ll + (b == begin)) * MT + m) * THREADS);
            sums[m][0] += its.x, sums[m][1] += its.y, sums[m][2] += its.z, sums[m][3] += its.w;
          }
      }
    }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int c = 0; c < 4; c++) {
        if (is_last)
          result.store(sums[m][c], m * 8 + lane % 4 * 2 + c % 2, (block * WARPS + warp) * 16 + lane / 4 * 2 + c / 2);
        sums[m][c] = 0;
      }
    stage = 0, block++;
  }
}

}  // namespace jitkern::low_bit
