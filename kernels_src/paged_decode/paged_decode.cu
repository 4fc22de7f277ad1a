// Attention of a few new tokens of each sequence over a paged cache: see kernel.py. It is bound by the reading of
// the cache, and made to keep that going.
//
// All query heads of a key head, and all new tokens, are rows that share what is read: 8 * NT of them in a block.
// A warp takes every (splits * WARPS)-th tile of 16 tokens, whatever the length, so page numbers are looked up
// before the length is known. Tiles come by cp.async into a ring of STAGES of the warp: K and V of the next ones
// are on their way while one is computed. Warps do not wait for each other until all is read.
//   S^T[16 tokens, 8 rows] = K[16, D] Q^T      K is the A operand of mma.m16n8k16; the order of d is free, so that
//                                              16 bytes of a lane are fragments of consecutive steps
//   O^T[D, 8 rows] += V^T[D, 16] P^T           tokens of V are paired by PRMT; P^T is S^T transposed by movmatrix
// A softmax of each warp is merged in shared memory, and those of splits by a second kernel.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "async_copy.cuh"
#include "dependent_launch.cuh"
#include "types.cuh"

namespace jitkern::decode {

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr int TILE = 16, MERGE_THREADS = 128;  // tokens of a tile; most splits, too

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 2^(x - most), 0 for x = -inf, even where most is -inf as well.
__device__ __forceinline__ float weight(float x, float most) {
  return power_of_two(x - (most == minus_infinity() ? 0.f : most));
}

// ------------------------------------------------------------------ pairs of 16-bit numbers

__device__ __forceinline__ unsigned packed(float low, float high, const __nv_bfloat16 *) {
  unsigned d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ unsigned packed(float low, float high, const __half *) {
  unsigned d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ void multiply(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                         unsigned b1, const __nv_bfloat16 *) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                         unsigned b1, const __half *) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ unsigned transposed(unsigned v) {  // of 8x8 numbers
  unsigned d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(v));
  return d;
}
// Numbers of the cache as pairs of T. From float8 it is exact in both types.
template <typename T, typename C, int N> struct Pairs {
  alignas(16) unsigned at[N];
  __device__ __forceinline__ void load(const unsigned char *shared) {  // N pairs, at a multiple of their size up to 16
    if constexpr (sizeof(C) == 2) {
#pragma unroll
      for (int i = 0; i < N; i += 4) *(uint4 *)(at + i) = *(const uint4 *)(shared + 4 * i);
    } else {
      alignas(16) unsigned bytes[N / 2];
      if constexpr (N == 4)
        *(uint2 *)bytes = *(const uint2 *)shared;
      else
        *(uint4 *)bytes = *(const uint4 *)shared;
#pragma unroll
      for (int i = 0; i < N; i++) {
        const __half2_raw pair =
            __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(bytes[i / 2] >> 16 * (i % 2)), __NV_E4M3);
        if constexpr (is_same<T, __half>) {
          at[i] = pair.x | (unsigned)pair.y << 16;
        } else {
          const float2 both = __half22float2(__half2(pair));
          at[i] = packed(both.x, both.y, (const T *)nullptr);
        }
      }
    }
  }
};

// Where the pieces of 16 bytes of a token lie in shared memory: permuted, so that fragments meet no bank twice. What
// is permuted depends on single bits of the token, so places of other tokens are `place ^ 16 * permuted + 512 * …`.
__device__ __forceinline__ constexpr int of_keys(int token, int pieces) { return (token & 1) << 2 & (pieces - 1); }
__device__ __forceinline__ constexpr int of_values(int token, int pieces) { return token & 6 & (pieces - 1); }
template <int PIECES> __device__ __forceinline__ int place(int token, int piece, int permuted) {
  return (token * PIECES + (piece ^ permuted)) * 16;
}

}  // namespace jitkern::decode

// grid (kv_heads * chunks, splits, sequences): a block has the rows from chunk * 8 * NT on; row r is head r % group
// of the key head, and new token r / group. Strides are in elements, those of the caches the same for both.
// part [rows of out, splits, D] and part_lse, to base 2, if there are splits. Shared memory: WARPS * STAGES tiles of K
// and V, and from 512 / D eights of rows on q; at least WARPS * 8 * NT * (D + 4) floats.
template <typename T, typename C, int D, int NT, int WARPS, int STAGES>
__global__ void __launch_bounds__(WARPS * 32, 2)
    paged_decode(T *out, float *lse, float *part, float *part_lse, const T *q, const C *kc, const C *vc,
                 const int *block_table, const int *seq_lens, const float *slopes, const float *k_scale,
                 const float *v_scale, int k_step, int v_step, int kv_heads, int group, int q_len, int width,
                 int page_size, long long table_stride, long long page_stride, long long token_stride,
                 long long head_stride, long long q_batch, long long q_token, long long q_head, float scale,
                 float softcap, int window, int pages) {
  using namespace jitkern;
  using namespace jitkern::decode;
  constexpr int ROWS = 8 * NT, PIECES = D * (int)sizeof(C) / 16, UNIT = TILE * PIECES * 16, STAGE = 2 * UNIT;
  constexpr int IN_PIECE = 16 / (int)sizeof(C), CHUNKS = PIECES / 4, WORDS = IN_PIECE / 2;
  const T *const type = nullptr;
  extern __shared__ __align__(16) unsigned char staged[];
  __shared__ float most_of[WARPS][ROWS], sum_of[WARPS][ROWS];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int head = blockIdx.x % kv_heads, chunk = blockIdx.x / kv_heads, split = blockIdx.y, splits = gridDim.y;
  const long long seq = blockIdx.z;
  const int first_row = chunk * ROWS, rows = min(ROWS, group * q_len - first_row);

  // ---- what to read: page numbers first, since the length is another wait for memory
  const int per_page = page_size / TILE, step = splits * WARPS;
  const int *table = block_table + seq * table_stride;
  int tile0 = split * WARPS + warp;
  const auto page_of = [&](int k) {  // of the tile that this lane looks up, among 32 tiles from the k-th on
    const int column = (tile0 + (k + lane) * step) / per_page;
    return column < width ? table[column] : 0;
  };
#if __CUDA_ARCH__ >= 900
  // A hint alone, since a kernel before this one may still write the table and the lengths. They are read past L1, so that
  // the reads after the wait find them as they are then.
  if (window <= 0 && tile0 / per_page < width) {
    const int hint = __ldcg(table + tile0 / per_page), tokens = __ldcg(seq_lens + seq);
    const int token = tile0 % per_page * TILE + lane % TILE;
    const C *const from = (lane < TILE ? kc : vc) + hint * page_stride + token * token_stride + head * head_stride;
    if (unsigned(hint) < pages && tile0 * TILE < tokens)
#pragma unroll
      for (int i = 0; i < D; i += 128 / sizeof(C)) prefetch_line(from + i);
  }
#endif
  wait_for_inputs();
  int page = page_of(0);
  const int len = min(seq_lens[seq], width * page_size);

  // Row g of each eight, the numbers that this lane has of keys: in registers, or where they are too few, in
  // shared memory behind the rings.
  constexpr bool IN_REGISTERS = NT * D < 512;
  uint4 qf[IN_REGISTERS ? NT : 1][CHUNKS][WORDS / 4];
  uint4 *const q_shared = (uint4 *)(staged + WARPS * STAGES * STAGE) + lane;
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
    if (!IN_REGISTERS && nt % WARPS != warp) continue;
    const int row = nt * 8 + g, i = (first_row + row) / group, j = first_row + row - i * group;
    const T *from = q + seq * q_batch + i * q_token + (head * (long long)group + j) * q_head;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int w = 0; w < WORDS / 4; w++) {
        const uint4 x = row < rows ? *((const uint4 *)(from + (4 * c + t) * IN_PIECE) + w) : make_uint4(0, 0, 0, 0);
        if constexpr (IN_REGISTERS)
          qf[nt][c][w] = x;
        else
          q_shared[((nt * CHUNKS + c) * (WORDS / 4) + w) * 32] = x;
      }
  }
  if (!IN_REGISTERS) __syncthreads();
  // Row r sees the tokens below until[r], of which the window holds the last.
  int until[NT][2];
#pragma unroll
  for (int nt = 0; nt < NT; nt++)
#pragma unroll
    for (int e = 0; e < 2; e++)
      until[nt][e] = len - q_len + 1 + (first_row + min(nt * 8 + 2 * t + e, rows - 1)) / group;
  const int least = len - q_len + 1 + first_row / group;               // of `until`
  const int end = len - q_len + 1 + (first_row + rows - 1) / group;    // the largest
  const int begin = window > 0 ? max(least - window, 0) : 0;           // what no row sees is not read
  const int whole_from = window > 0 ? max(end - window, 0) : 0;        // from here on each row sees all below `least`
  const int tiles = (max(end, 0) + TILE - 1) / TILE;
  if (begin / TILE > tile0) {
    tile0 += (begin / TILE - tile0 + step - 1) / step * step;
    page = page_of(0);
  }
  const int count = tile0 < tiles ? (tiles - tile0 + step - 1) / step : 0;

  // ---- reading
  constexpr int TOKENS = 32 / PIECES;  // that a warp copies at once: the next ones are 512 bytes behind
  const int token = lane / PIECES;     // of these, and the piece of this lane
  const int k_place = place<PIECES>(token, lane % PIECES, of_keys(token, PIECES));
  const int v_place = place<PIECES>(token, lane % PIECES, of_values(token, PIECES));
  const long long of_lane = token * token_stride + lane % PIECES * IN_PIECE, more = TOKENS * token_stride;
  const long long of_head = head * head_stride;
  const auto offset_of = [&](int k, int page) {  // of this lane's tile, see page_of
    const int tile = tile0 + (k + lane) * step;
    return page * page_stride + (long long)(tile % per_page * TILE) * token_stride + of_head;
  };
  long long offset = offset_of(0, page);
  int next_page = count > 32 ? page_of(32) : 0;
  unsigned char *const ring = staged + warp * (STAGES * STAGE);
  const auto fetch = [&](int k, int stage) {  // the k-th tile of this warp
    if (k < count) {
      if (k % 32 == 0 && k > 0) {
        offset = offset_of(k, next_page);
        next_page = page_of(k + 32);
      }
      const long long from = __shfl_sync(~0u, offset, k % 32) + of_lane;
      const int first = (tile0 + k * step) * TILE;
      unsigned char *const to = ring + stage * STAGE;
      const bool whole = first >= begin && first + TILE <= end;
#pragma unroll
      for (int i = 0; i < PIECES / 2; i++) {
        const int at = first + token + i * TOKENS;
        const int bytes = whole || (at >= begin && at < end) ? 16 : 0;  // there may be NaN in the rest of a page
        copy_async(to + (k_place ^ of_keys(i * TOKENS, PIECES) * 16) + i * 512, kc + from + i * more, bytes);
        copy_async(to + UNIT + (v_place ^ of_values(i * TOKENS, PIECES) * 16) + i * 512, vc + from + i * more, bytes);
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int k = 0; k < STAGES; k++) fetch(k, k);

  // ---- computing
  constexpr int VALUES = D / 8;                                                         // of d, that a lane has of V
  constexpr int V_BYTES = VALUES * (int)sizeof(C) < 16 ? VALUES * (int)sizeof(C) : 16;  // which it reads at once
  constexpr int V_PIECES = VALUES * (int)sizeof(C) / V_BYTES, V_WORDS = V_BYTES / (int)sizeof(C) / 2;
  constexpr int HALVES = V_PIECES > 1 ? 2 : 1, J = HALVES == 2 ? 2 * V_WORDS : V_WORDS;  // mmas of a pair of pieces
  float o[NT][VALUES / 2][4] = {}, most[NT][2], sum[NT][2] = {};
#pragma unroll
  for (int nt = 0; nt < NT; nt++) most[nt][0] = most[nt][1] = minus_infinity();
  const int k_read = place<PIECES>(g, t, of_keys(g, PIECES));
  const int v_read = place<PIECES>(2 * t, g * V_BYTES / 16, of_values(2 * t, PIECES)) + g * V_BYTES % 16;
  const float by = scale * (k_scale ? k_scale[head * k_step] : 1.f), factor = by * LOG2E;

  int stage = 0;
  for (int k = 0; k < count; k++) {
    const int tile = tile0 + k * step;
    const unsigned char *const keys = ring + stage * STAGE, *const values = keys + UNIT;
    wait_for_copies<STAGES - 1>();
    __syncwarp();

    float s[NT][4] = {}, s2[4] = {};  // two sums where there is one chain
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      Pairs<T, C, WORDS> low, high;
      low.load(keys + (k_read ^ c * 64));
      high.load(keys + (k_read ^ c * 64) + UNIT / 2);
#pragma unroll
      for (int w = 0; w < WORDS; w += 4)
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
          const uint4 b = IN_REGISTERS ? qf[IN_REGISTERS ? nt : 0][c][w / 4]
                                       : q_shared[((nt * CHUNKS + c) * (WORDS / 4) + w / 4) * 32];
          multiply(s[nt], low.at[w], high.at[w], low.at[w + 1], high.at[w + 1], b.x, b.y, type);
          multiply(NT == 1 ? s2 : s[nt], low.at[w + 2], high.at[w + 2], low.at[w + 3], high.at[w + 3], b.z, b.w, type);
        }
    }
    if (NT == 1)
#pragma unroll
      for (int e = 0; e < 4; e++) s[0][e] += s2[e];
    // s: token g and rows 2t and 2t + 1, then token g + 8 and the same rows
    const bool whole = tile * TILE + TILE <= least && tile * TILE >= whole_from;
    if (whole && softcap <= 0 && !slopes) {
#pragma unroll
      for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[nt][e] *= factor;
    } else {
#pragma unroll
      for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int at = tile * TILE + g + e / 2 * 8, beyond = until[nt][e % 2];
          float x = s[nt][e] * by;
          if (softcap > 0) x = softcap * tanhf(x / softcap);
          if (slopes) {
            const int row = first_row + min(nt * 8 + 2 * t + e % 2, rows - 1);
            x += slopes[head * group + row % group] * (at - beyond + 1);
          }
          const bool seen = at < beyond && (window <= 0 || at >= beyond - window);
          s[nt][e] = seen ? x * LOG2E : minus_infinity();
        }
    }
    unsigned p[NT][2];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      float top[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        top[e] = fmaxf(most[nt][e], fmaxf(s[nt][e], s[nt][e + 2]));
#pragma unroll
        for (int i = 4; i < 32; i *= 2) top[e] = fmaxf(top[e], __shfl_xor_sync(~0u, top[e], i));
      }
      if (__any_sync(~0u, top[0] > most[nt][0] || top[1] > most[nt][1])) {
        const float a0 = weight(most[nt][0], top[0]), a1 = weight(most[nt][1], top[1]);
        sum[nt][0] *= a0, sum[nt][1] *= a1, most[nt][0] = top[0], most[nt][1] = top[1];
#pragma unroll
        for (int j = 0; j < VALUES / 2; j++)
          o[nt][j][0] *= a0, o[nt][j][1] *= a1, o[nt][j][2] *= a0, o[nt][j][3] *= a1;
      }
      float e[4];
#pragma unroll
      for (int i = 0; i < 4; i++) e[i] = weight(s[nt][i], most[nt][i % 2]);
      sum[nt][0] += e[0] + e[2], sum[nt][1] += e[1] + e[3];
      p[nt][0] = transposed(packed(e[0], e[1], type)), p[nt][1] = transposed(packed(e[2], e[3], type));
    }
    // Lane (g, t) has the values of tokens 2t, 2t + 1, 2t + 8 and 2t + 9; row g of the A operand is its j-th number, and
    // row g + 8 the one that lies half of its numbers behind.
#pragma unroll
    for (int h = 0; h < V_PIECES / HALVES; h++) {
      Pairs<T, C, V_WORDS> v[4][HALVES];
#pragma unroll
      for (int r = 0; r < 4; r++)
#pragma unroll
        for (int half = 0; half < HALVES; half++)
          v[r][half].load(values + v_read + (r % 2 + r / 2 * 8) * (PIECES * 16) + (h + half * (V_PIECES / 2)) * (8 * V_BYTES));
#pragma unroll
      for (int j = 0; j < J; j++) {
        const unsigned how = j % 2 ? 0x7632 : 0x5410;
        unsigned a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int r = i / 2 * 2, half = HALVES == 2 ? i % 2 : 0, word = j / 2 + (HALVES == 2 ? 0 : i % 2 * (V_WORDS / 2));
          a[i] = __byte_perm(v[r][half].at[word], v[r + 1][half].at[word], how);
        }
#pragma unroll
        for (int nt = 0; nt < NT; nt++) multiply(o[nt][h * J + j], a[0], a[1], a[2], a[3], p[nt][0], p[nt][1], type);
      }
    }
    __syncwarp();  // all lanes have read the stage
    fetch(k + STAGES, stage);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  let_next_begin();

  // ---- the warps together
  wait_for_copies<0>();  // of no tile: the ring becomes the sums of the warps
#pragma unroll
  for (int nt = 0; nt < NT; nt++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
      for (int i = 4; i < 32; i *= 2) sum[nt][e] += __shfl_xor_sync(~0u, sum[nt][e], i);
      if (g == 0) most_of[warp][nt * 8 + 2 * t + e] = most[nt][e], sum_of[warp][nt * 8 + 2 * t + e] = sum[nt][e];
    }
  __syncthreads();
  float(*const sums)[ROWS][D + 4] = reinterpret_cast<float(*)[ROWS][D + 4]>(staged);
  constexpr int V_NUMBERS = 2 * V_WORDS;  // in a piece
#pragma unroll
  for (int nt = 0; nt < NT; nt++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int row = nt * 8 + 2 * t + e;
      float top = minus_infinity();
#pragma unroll
      for (int w = 0; w < WARPS; w++) top = fmaxf(top, most_of[w][row]);
      const float a = weight(most[nt][e], top);
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < VALUES / 2; j += 4) {
          const int number = j + half * (VALUES / 2), d = (number / V_NUMBERS * 8 + g) * V_NUMBERS + number % V_NUMBERS;
          *(float4 *)&sums[warp][row][d] =
              make_float4(o[nt][j][2 * half + e] * a, o[nt][j + 1][2 * half + e] * a, o[nt][j + 2][2 * half + e] * a,
                          o[nt][j + 3][2 * half + e] * a);
        }
    }
  __syncthreads();
  const float v_by = v_scale ? v_scale[head * v_step] : 1.f;
  for (int i = threadIdx.x; i < rows * (D / 4); i += WARPS * 32) {
    const int row = i / (D / 4), d = i % (D / 4) * 4;
    float top = minus_infinity(), all = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, most_of[w][row]);
    float4 value = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      all += sum_of[w][row] * weight(most_of[w][row], top);
      const float4 x = *(const float4 *)&sums[w][row][d];
      value.x += x.x, value.y += x.y, value.z += x.z, value.w += x.w;
    }
    const float over = all == 0 ? 0.f : v_by / all;  // 0 where nothing is seen
    value.x *= over, value.y *= over, value.z *= over, value.w *= over;
    const int token = (first_row + row) / group, j = first_row + row - token * group;
    const long long to = ((seq * q_len + token) * kv_heads + head) * group + j;
    const float log_all = top == minus_infinity() && all == 0 ? top : top + log2f(all);
    if (splits == 1) {
      *(uint2 *)(out + to * D + d) = make_uint2(packed(value.x, value.y, type), packed(value.z, value.w, type));
      if (d == 0) lse[to] = log_all * LN2;
    } else {
      *(float4 *)(part + (to * splits + split) * D + d) = value;
      if (d == 0) part_lse[to * splits + split] = log_all;
    }
  }
}

// The splits of a row: grid [rows of out].
template <typename T, int D>
__global__ void __launch_bounds__(jitkern::decode::MERGE_THREADS)
    paged_decode_merge(T *out, float *lse, const float *part, const float *part_lse, int splits) {
  using namespace jitkern;
  using namespace jitkern::decode;
  constexpr int LANES = D / 4, GROUPS = MERGE_THREADS / LANES, WARPS = MERGE_THREADS / 32;
  __shared__ float weights[MERGE_THREADS], of_warps[2][WARPS];
  __shared__ float4 sums[GROUPS][LANES];
  const long long row = blockIdx.x;
  const int thread = threadIdx.x, lane = thread % LANES, group = thread / LANES;
  let_next_begin();
  wait_for_inputs();
  const float mine = thread < splits ? part_lse[row * splits + thread] : minus_infinity();
  float top = mine;
#pragma unroll
  for (int i = 16; i; i /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
  if (thread % 32 == 0) of_warps[0][thread / 32] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; w++) top = fmaxf(top, of_warps[0][w]);
  float all = weights[thread] = weight(mine, top);
#pragma unroll
  for (int i = 16; i; i /= 2) all += __shfl_xor_sync(~0u, all, i);
  if (thread % 32 == 0) of_warps[1][thread / 32] = all;
  __syncthreads();
  all = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) all += of_warps[1][w];
  float4 value = make_float4(0, 0, 0, 0);
#pragma unroll 4
  for (int s = group; s < splits; s += GROUPS) {
    const float a = weights[s];
    const float4 x = *((const float4 *)(part + (row * splits + s) * D) + lane);
    value.x = fmaf(a, x.x, value.x), value.y = fmaf(a, x.y, value.y), value.z = fmaf(a, x.z, value.z),
    value.w = fmaf(a, x.w, value.w);
  }
  sums[group][lane] = value;
  __syncthreads();
  if (group) return;
#pragma unroll
  for (int i = 1; i < GROUPS; i++) {
    const float4 x = sums[i][lane];
    value.x += x.x, value.y += x.y, value.z += x.z, value.w += x.w;
  }
  const float over = all == 0 ? 0.f : 1 / all;
  const T *const type = nullptr;
  *((uint2 *)(out + row * D) + lane) =
      make_uint2(packed(value.x * over, value.y * over, type), packed(value.z * over, value.w * over, type));
  if (thread == 0) lse[row] = all == 0 ? minus_infinity() : (top + log2f(all)) * LN2;
}

// The same in float32, without matrix units: a warp a row.
template <typename C, int D>
__global__ void __launch_bounds__(128)
    paged_decode_of_floats(float *out, float *lse, const float *__restrict__ q, const C *__restrict__ kc,
                           const C *__restrict__ vc, const int *__restrict__ block_table, const int *__restrict__ seq_lens,
                           const float *__restrict__ slopes, const float *__restrict__ k_scale,
                           const float *__restrict__ v_scale, int k_step, int v_step, int kv_heads, int group, int q_len,
                           int width, int page_size, long long table_stride, long long page_stride, long long token_stride,
                           long long head_stride, long long q_batch, long long q_token, long long q_head, float scale,
                           float softcap, int window, long long rows) {
  using namespace jitkern::decode;
  constexpr int EACH = D / 32;
  const int lane = threadIdx.x % 32, heads = kv_heads * group;
  const long long row = blockIdx.x * 4ll + threadIdx.x / 32;
  if (row >= rows) return;
  const int head = int(row % heads), token = int(row / heads % q_len), kv_head = head / group;
  const long long seq = row / heads / q_len;
  const int len = min(seq_lens[seq], width * page_size), end = len - q_len + 1 + token;
  const float by = scale * (k_scale ? k_scale[kv_head * k_step] : 1.f);
  float x[EACH], o[EACH] = {}, most = minus_infinity(), sum = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) x[i] = q[seq * q_batch + token * q_token + head * q_head + i * 32 + lane];
  for (int at = window > 0 ? max(end - window, 0) : 0; at < end; at++) {
    const int page = at / page_size;
    const long long from = block_table[seq * table_stride + page] * page_stride +
                           (long long)(at - page * page_size) * token_stride + kv_head * head_stride + lane;
    float s = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) s = fmaf(x[i], float(kc[from + i * 32]), s);
#pragma unroll
    for (int i = 16; i; i /= 2) s += __shfl_xor_sync(~0u, s, i);
    s *= by;
    if (softcap > 0) s = softcap * tanhf(s / softcap);
    if (slopes) s += slopes[head] * (at - end + 1);
    const float top = fmaxf(most, s), base = top == minus_infinity() ? 0.f : top;
    const float a = expf(most - base), p = expf(s - base);
    sum = sum * a + p, most = top;
#pragma unroll
    for (int i = 0; i < EACH; i++) o[i] = o[i] * a + p * float(vc[from + i * 32]);
  }
  const float over = sum == 0 ? 0.f : (v_scale ? v_scale[kv_head * v_step] : 1.f) / sum;
#pragma unroll
  for (int i = 0; i < EACH; i++) out[row * D + i * 32 + lane] = o[i] * over;
  if (lane == 0) lse[row] = sum == 0 ? minus_infinity() : most + logf(sum);
}
