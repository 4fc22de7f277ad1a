// Private. y[m, n] = sum_k x[m, k] * w[n, k] for few tokens m and weights of 4 or 8 bits, on tensor cores.
//
// The matrix instruction is turned round: 16 rows of weights are its M, and 8 tokens its N, so that 1 to 8
// tokens cost the same. Each weight is read once, by one lane, and dequantized once. A Format says what a
// warp reads of 16 rows (a tile) in a step of STEP numbers k, and makes matrix fragments of it:
//
//   X, A, STEP            types of x and of sums, and numbers k of a step
//   VECTORS, SIDES        16-byte and 4-byte pieces that a lane has of a tile in a step
//   ROW_SKIP              bytes between rows of x in shared memory, against bank conflicts
//   GROUPED, ADDED        whether sums of a step are scaled, and have a multiple of the sum of x added
//   warm(...)             asks L2 for the first steps of a tile
//   Place, place(...)     where a lane reads next, for the first tile of a warp; ahead(...) goes on by some steps
//   fetch(...)            begins to copy a lane's pieces of a step of the warp's tile n to its own places in shared
//                         memory, which are `vectors` and 512 bytes on, `sides` and 128 bytes on. Beyond the last row
//                         it copies the last ones instead: they reach no result
//   fetch_sides(...)      the same of 4-byte pieces alone, where a tile's 16-byte pieces lie one behind the other, from
//                         the `q` of lane 0's Place on, and come by bulk copies
//   Held, hold(...)       these pieces in registers, from the same places
//   k_of(piece, t)        the k from which on lane t of four has 16 bytes of x, of 64 bytes of a row of x
//   fragments(...)        a[2][4] of these, for the two instructions that take 16 bytes of x
//
// Lane (g, t) = (lane / 4, lane % 4) has rows 2g and 2g + 1 of a tile, and tokens 2t and 2t + 1 of the sums.
// A warp reads weights in shared memory that it copied itself, so warps stream them without waiting for each other.
// Sums are added in an order that depends on the shape and the GPU alone.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "async_copy.cuh"
#include "barriers.cuh"
#include "dependent_launch.cuh"
#include "rows.cuh"

namespace jitkern::low_bit {

// ------------------------------------------------------------------ instructions

__device__ __forceinline__ unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy_16(unsigned to, const void *from) {  // not through L1
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_4(unsigned to, const void *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const __nv_bfloat16 *) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const __half *) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const signed char *) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// (a & mask) | b, of which the compiler makes two instructions where it knows mask and b.
template <unsigned MASK> __device__ __forceinline__ unsigned masked_or(unsigned a, unsigned b) {
  unsigned d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "n"(MASK), "r"(b));
  return d;
}

__device__ __forceinline__ uint4 shared_16(unsigned from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ unsigned shared_4(unsigned from) {
  unsigned v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
// A load that begins here, neither earlier nor later.
__device__ __forceinline__ void load_16(uint4 &v, const void *from) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
}
// A number that stays in its register: the compiler would rather compute it anew at each use.
template <typename I> __device__ __forceinline__ I kept(I number) {
  if constexpr (sizeof(I) == 8)
    asm volatile("" : "+l"(number));
  else
    asm volatile("" : "+r"(number));
  return number;
}

// The lower (0) or the upper (1) 16 bits, in both halves.
__device__ __forceinline__ unsigned twice(unsigned a, int half) { return __byte_perm(a, 0, half ? 0x3232 : 0x1010); }
// Two 16-bit numbers: a * b + c, and constants of both types.
__device__ __forceinline__ unsigned fused(unsigned a, unsigned b, unsigned c, const __nv_bfloat16 *) {
  unsigned d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ unsigned fused(unsigned a, unsigned b, unsigned c, const __half *) {
  unsigned d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
template <typename T> struct Bits;
template <> struct Bits<__nv_bfloat16> {  // 0x4300 is 128: or-ing a number of 7 bits in adds it
  static constexpr unsigned one = 0x3f803f80u, minus_one = 0xbf80bf80u, base = 0x43004300u;
  // -(128 + whole) and 1 for a whole number up to 255. An odd sum above 256 is no bfloat16: there the next even one stands
  // with 1 + 2^-7, which adds 1 + q / 128 to 128 + q, for q up to 15, and so the sum rounds to q - whole, which is exact.
  static __device__ __forceinline__ unsigned minus(unsigned whole) { return 0xc300u + min(whole, 64 + (whole + 1) / 2); }
  static __device__ __forceinline__ unsigned factor(unsigned whole) { return 0x3f80u + (whole >> 7 & whole); }
};
template <> struct Bits<__half> {  // 0x6400 is 1024: or-ing a number of 10 bits in adds it
  static constexpr unsigned one = 0x3c003c00u, minus_one = 0xbc00bc00u, base = 0x64006400u;
  static __device__ __forceinline__ unsigned minus(unsigned whole) { return 0xe400u + whole; }
  static __device__ __forceinline__ unsigned factor(unsigned) { return 0x3c00u; }
};

// ------------------------------------------------------------------ formats

enum { SYMMETRIC, WHOLE_ZEROS, ADDED_ZEROS };  // w = (q - 8) * s, (q - zero) * s, (q - 8) * s + zero

template <typename T, int ZEROS> struct ZeroOf { using type = T; };
template <typename T> struct ZeroOf<T, WHOLE_ZEROS> { using type = unsigned char; };

// Weights of 4 bits in the layout of kernels_src/int4.py: [tiles][K / 64][lane] uint4, whose word 2i + h has of row
// 2g + h the numbers k = 32i + 8t + 0 2 4 6 1 3 5 7, from the lowest bits on. Scales and zeros: [K / GROUP][N].
template <typename T, int GROUP, int ZEROS, bool EDGES> struct Int4 {
  using X = T;
  using A = float;
  using Zero = typename ZeroOf<T, ZEROS>::type;
  static constexpr int STEP = GROUP, VECTORS = GROUP / 64, SIDES = EDGES ? 0 : ZEROS == SYMMETRIC ? 1 : 2, ROW_SKIP = 64;
  static constexpr bool GROUPED = true, ADDED = ZEROS == ADDED_ZEROS;
  static constexpr unsigned BYTES = 8 * STEP;  // of a tile in a step
  const uint4 *q;
  const T *scale;
  const Zero *zero;
  int N, groups;  // of a row

  __device__ __forceinline__ void warm(int tile, int steps, int lane) const {
    if (lane == 0) prefetch(q + (long long)tile * groups * (BYTES / 16), steps * BYTES);
  }
  struct Place {
    const uint4 *q;
    const T *scale;
    const Zero *zero;
    long long next;  // pieces to the next tile; 0 if there is none
  };
  __device__ __forceinline__ Place place(int tile, int step, int lane) const {
    const int last = (N - 1) / 16;
    tile = min(tile, last);
    // Of zeros of one byte, a lane has the four with its two among them.
    const int row = lane / 4 * 2, row_of_zeros = sizeof(Zero) == 1 ? lane / 8 * 4 : row;
    const long long of_step = (long long)step * N;
    return {q + ((long long)tile * groups + step) * (BYTES / 16) + lane, scale + of_step + (tile * 16 + row),
            zero + of_step + (tile * 16 + row_of_zeros), tile < last ? groups * (BYTES / 16ll) : 0};
  }
  __device__ __forceinline__ void ahead(Place &place, int steps) const {
    place.q += steps * (BYTES / 16);
    place.scale += (long long)steps * N;
    place.zero += (long long)steps * N;
  }
  __device__ __forceinline__ void fetch(unsigned vectors, unsigned sides, const Place &place, int n) const {
    const uint4 *from = place.q + n * place.next;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) copy_16(vectors + v * 512, from + v * 32);
    fetch_sides(sides, place, n && place.next ? n : 0);
  }
  static __device__ __forceinline__ void fetch_sides(unsigned sides, const Place &place, int n) {
    if (SIDES > 0) copy_4(sides, place.scale + n * 16);
    if (SIDES > 1) copy_4(sides + 128, place.zero + n * 16);
  }
  static __device__ __forceinline__ int k_of(int piece, int t) { return piece * 32 + t * 8; }

  // What two rows of a tile have in a step.
  struct Held {
    unsigned vectors;  // read as they are needed, since registers are short
    unsigned word[4], minus[2], factor;  // the last has 16 bits for each row
    float scale[2], added[2];  // the latter where zeros are added
  };
  __device__ __forceinline__ void hold(Held &held, unsigned vectors, unsigned sides, int tile, int step, int lane) const {
    held.vectors = vectors;
    if constexpr (EDGES) {
      unsigned whole[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = tile * 16 + lane / 4 * 2 + h;
        const long long at = (long long)step * N + row;
        const bool is_there = row < N;
        held.scale[h] = is_there ? wide(scale[at]) : 0.f;
        whole[h] = 8;
        if constexpr (ZEROS == WHOLE_ZEROS) whole[h] = is_there ? zero[at] : 0;
        if constexpr (ZEROS == ADDED_ZEROS) held.added[h] = is_there ? wide(zero[at]) : 0.f;
      }
      hold_whole(held, whole[0], whole[1]);
    } else {
      hold_sides(held, shared_4(sides), SIDES > 1 ? shared_4(sides + 128) : 0, lane);
    }
  }
  static __device__ __forceinline__ void hold_whole(Held &held, unsigned first, unsigned second) {
    held.factor = Bits<T>::factor(first) | Bits<T>::factor(second) << 16;
    held.minus[0] = Bits<T>::minus(first) * 0x10001u, held.minus[1] = Bits<T>::minus(second) * 0x10001u;
  }
  // Scales of two rows are in a word, and their zeros in another, as `place` says.
  static __device__ __forceinline__ void hold_sides(Held &held, unsigned scales, unsigned zeros, int lane) {
    widen(scales, held.scale, (const T *)nullptr);
    if constexpr (ZEROS == ADDED_ZEROS) widen(zeros, held.added, (const T *)nullptr);
    const unsigned both = zeros >> (lane / 4 % 2 * 16);
    if constexpr (ZEROS == WHOLE_ZEROS)
      hold_whole(held, both & 0xff, both >> 8 & 0xff);
    else
      hold_whole(held, 8, 8);
  }
  static __device__ __forceinline__ void fragments(unsigned (&a)[2][4], Held &held, int piece) {
    if (piece % 2 == 0) {
      const uint4 word = shared_16(held.vectors + piece / 2 * 512);
      held.word[0] = word.x, held.word[1] = word.y, held.word[2] = word.z, held.word[3] = word.w;
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const unsigned number = masked_or<0x000f000fu>(held.word[piece % 2 * 2 + h] >> 4 * i, Bits<T>::base);
        a[i / 2][h + i % 2 * 2] = fused(number, twice(held.factor, h), held.minus[h], (const T *)nullptr);
      }
  }
};

// Weights [N, K] of 8 bits as they are, and a scale for each row, for x of 16 bits.
template <typename T> struct Int8 {
  using X = T;
  using A = float;
  static constexpr int STEP = 64, VECTORS = 2, SIDES = 0, ROW_SKIP = 16;
  static constexpr bool GROUPED = false, ADDED = false;
  const signed char *q;
  int N, K;

  struct Held { uint4 row[2]; };
  __device__ __forceinline__ void warm(int tile, int steps, int lane) const {
    if (lane < 16 && tile * 16 + lane < N) prefetch(q + (tile * 16ll + lane) * K, steps * STEP);
  }
  struct Place {
    const signed char *q;
    int more;  // rows behind the lane's first one
  };
  __device__ __forceinline__ Place place(int tile, int step, int lane) const {
    const int row = min(tile * 16 + lane / 4 * 2, N - 1);
    return {q + (long long)row * K + step * STEP + lane % 4 * 16, N - 1 - row};
  }
  __device__ __forceinline__ void ahead(Place &place, int steps) const { place.q += steps * STEP; }
  __device__ __forceinline__ void fetch(unsigned vectors, unsigned, const Place &place, int n) const {
#pragma unroll
    for (int h = 0; h < 2; h++)
      copy_16(vectors + h * 512, place.q + (long long)min(n * 16 + h, place.more) * K);
  }
  __device__ __forceinline__ void hold(Held &held, unsigned vectors, unsigned, int, int, int) const {
    held.row[0] = shared_16(vectors), held.row[1] = shared_16(vectors + 512);
  }
  static __device__ __forceinline__ int k_of(int piece, int t) { return t * 16 + piece * 8; }
  static __device__ __forceinline__ void fragments(unsigned (&a)[2][4], const Held &held, int piece) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const unsigned word[2] = {piece ? held.row[h].z : held.row[h].x, piece ? held.row[h].w : held.row[h].y};
#pragma unroll
      for (int i = 0; i < 4; i++)
        a[i / 2][h + i % 2 * 2] = widened_bytes(__byte_perm(word[i / 2], 0, i % 2 ? 0x4342 : 0x4140), (const T *)nullptr);
    }
  }
  // Two signed bytes, each in the lower half of 16 bits.
  static __device__ __forceinline__ unsigned widened_bytes(unsigned both, const __half *kind) {
    return fused((both ^ 0x00800080u) | Bits<T>::base, Bits<T>::one, 0xe480e480u, kind);  // 1024 + (b + 128) - 1152
  }
  static __device__ __forceinline__ unsigned widened_bytes(unsigned both, const __nv_bfloat16 *kind) {
    const unsigned low = masked_or<0x007f007fu>(both, Bits<T>::base);
    const unsigned sign = masked_or<0x00800080u>(both, Bits<T>::base);  // 256 or 128
    return fused(sign, Bits<T>::minus_one, low, kind);
  }
};

// The same weights for x of 8 bits, with a scale for each row of both.
struct Int8Both {
  using X = signed char;
  using A = int;
  static constexpr int STEP = 64, VECTORS = 2, SIDES = 0, ROW_SKIP = 0;
  static constexpr bool GROUPED = false, ADDED = false;
  Int8<__half> rows;

  using Held = Int8<__half>::Held;
  __device__ __forceinline__ void warm(int tile, int steps, int lane) const { rows.warm(tile, steps, lane); }
  using Place = Int8<__half>::Place;
  __device__ __forceinline__ Place place(int tile, int step, int lane) const { return rows.place(tile, step, lane); }
  __device__ __forceinline__ void ahead(Place &place, int steps) const { rows.ahead(place, steps); }
  __device__ __forceinline__ void fetch(unsigned vectors, unsigned sides, const Place &place, int n) const {
    rows.fetch(vectors, sides, place, n);
  }
  __device__ __forceinline__ void hold(Held &held, unsigned vectors, unsigned sides, int tile, int step, int lane) const {
    rows.hold(held, vectors, sides, tile, step, lane);
  }
  static __device__ __forceinline__ int k_of(int, int t) { return t * 16; }
  static __device__ __forceinline__ void fragments(unsigned (&a)[2][4], const Held &held, int) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      a[0][h] = held.row[h].x, a[0][h + 2] = held.row[h].y;
      a[1][h] = held.row[h].z, a[1][h + 2] = held.row[h].w;
    }
  }
};

// What becomes of a sum: scales of rows and tokens and a bias may be null.
template <typename T, typename S> struct Result {
  T *y;
  const S *of_row;
  const float *of_token;
  const T *bias;
  int tokens, rows;

  // What is read for a result, which may be long before its sum is known.
  struct Read { float of_row, of_token, bias; };
  __device__ __forceinline__ Read read(int token, int row) const {
    Read read = {};
    if (token >= tokens || row >= rows) return read;
    if (of_row) read.of_row = wide(of_row[row]);
    if (of_token) read.of_token = of_token[token];
    if (bias) read.bias = wide(bias[row]);
    return read;
  }
  template <typename A> __device__ __forceinline__ void store(A sum, const Read &read, int token, int row) const {
    if (token >= tokens || row >= rows) return;
    float value = float(sum);
    if (of_row) value *= read.of_row;
    if (of_token) value *= read.of_token;
    if (bias) value += read.bias;
    round_to(y[token * (long long)rows + row], value);
  }
  template <typename A> __device__ __forceinline__ void store(A sum, int token, int row) const {
    store(sum, read(token, row), token, row);
  }
};

// ------------------------------------------------------------------ a step

template <class F> constexpr int PIECES_OF = F::STEP * sizeof(typename F::X) / 64;

// A tile of ones gives each lane the sums of its own tokens.
template <class F> __device__ __forceinline__ void add_tokens(typename F::A (&of_x)[4], const uint4 &x) {
  constexpr unsigned one = Bits<typename F::X>::one;
  const unsigned ones[4] = {one, one, one, one};
  multiply(of_x, ones, x.x, x.y, (const typename F::X *)nullptr);
  multiply(of_x, ones, x.z, x.w, (const typename F::X *)nullptr);
}
template <class F>
__device__ __forceinline__ void add_scaled(typename F::A (&sums)[4], const typename F::Held &held, const typename F::A (&part)[4],
                                           const typename F::A (&of_x)[4]) {
#pragma unroll
  for (int c = 0; c < 4; c++) {
    sums[c] = fmaf(held.scale[c / 2], part[c], sums[c]);
    if constexpr (F::ADDED) sums[c] = fmaf(held.added[c / 2], of_x[c % 2], sums[c]);
  }
}

// A step of NT tiles. tokens(piece, m): 16 bytes of x for this lane, of token 8m + lane / 4. used(piece): these are not
// needed any more.
template <class F, int NT, int MT, class Tokens, class Used>
__device__ __forceinline__ void add_step(typename F::A (&sums)[NT][MT][4], typename F::Held (&held)[NT], Tokens tokens, Used used) {
  using A = typename F::A;
  const typename F::X *kind = nullptr;
  A part[NT][MT][4], of_x[MT][4];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int c = 0; c < 4; c++) {
      of_x[m][c] = 0;
#pragma unroll
      for (int n = 0; n < NT; n++) part[n][m][c] = F::GROUPED ? A(0) : sums[n][m][c];
    }
#pragma unroll
  for (int piece = 0; piece < PIECES_OF<F>; piece++) {
    uint4 b[MT];
#pragma unroll
    for (int m = 0; m < MT; m++) b[m] = tokens(piece, m);
    if constexpr (F::ADDED)
#pragma unroll
      for (int m = 0; m < MT; m++) add_tokens<F>(of_x[m], b[m]);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      unsigned a[2][4];
      F::fragments(a, held[n], piece);
#pragma unroll
      for (int m = 0; m < MT; m++) multiply(part[n][m], a[0], b[m].x, b[m].y, kind);
#pragma unroll
      for (int m = 0; m < MT; m++) multiply(part[n][m], a[1], b[m].z, b[m].w, kind);
    }
    used(piece);
  }
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int m = 0; m < MT; m++)
      if constexpr (F::GROUPED)
        add_scaled<F>(sums[n][m], held[n], part[n][m], of_x[m]);
      else
#pragma unroll
        for (int c = 0; c < 4; c++) sums[n][m][c] = part[n][m][c];
}

// STEPS steps of a tile, for up to 8 tokens. Their products alternate, since those of one step wait for each other.
// tokens(piece, s): 16 bytes of x for this lane in the s-th of them.
template <class F, int STEPS, class Tokens>
__device__ __forceinline__ void add_steps(typename F::A (&sums)[4], typename F::Held (&held)[STEPS], Tokens tokens) {
  static_assert(F::GROUPED);
  const typename F::X *kind = nullptr;
  typename F::A part[STEPS][4] = {}, of_x[STEPS][4] = {};
#pragma unroll
  for (int piece = 0; piece < PIECES_OF<F>; piece++) {
    unsigned a[STEPS][2][4];
    uint4 b[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      b[s] = tokens(piece, s);
      F::fragments(a[s], held[s], piece);
    }
#pragma unroll
    for (int s = 0; s < STEPS; s++) multiply(part[s], a[s][0], b[s].x, b[s].y, kind);
#pragma unroll
    for (int s = 0; s < STEPS; s++) multiply(part[s], a[s][1], b[s].z, b[s].w, kind);
    if constexpr (F::ADDED)
#pragma unroll
      for (int s = 0; s < STEPS; s++) add_tokens<F>(of_x[s], b[s]);
  }
#pragma unroll
  for (int s = 0; s < STEPS; s++) add_scaled<F>(sums, held[s], part[s], of_x[s]);
}

// What a warp has of NT tiles in a step, in shared memory.
template <class F, int NT> struct Stage {
  static_assert(NT <= 2);  // a Place knows of one tile more
  static constexpr int VECTORS = F::VECTORS * 512, SIDES = F::SIDES * 128, BYTES = NT * (VECTORS + SIDES);

  unsigned vectors, sides;  // of a lane, in the first of some stages that lie one behind the other
  __device__ __forceinline__ Stage(unsigned first, int lane)
      : vectors(kept(first + lane * 16)), sides(kept(first + NT * VECTORS + lane * 4)) {}
  // In the stage that begins `at` bytes behind the first.
  __device__ __forceinline__ void fetch(const F &f, int at, const typename F::Place &place) const {
#pragma unroll
    for (int n = 0; n < NT; n++) f.fetch(vectors + at + n * VECTORS, sides + at + n * SIDES, place, n);
  }
  __device__ __forceinline__ void hold(const F &f, typename F::Held (&held)[NT], int at, int tile, int step, int lane) const {
#pragma unroll
    for (int n = 0; n < NT; n++) f.hold(held[n], vectors + at + n * VECTORS, sides + at + n * SIDES, tile + n, step, lane);
  }
};

// ------------------------------------------------------------------ the kernels

// How many blocks of `many_tokens` a multiprocessor has at least: 16 warps, or 8 with more sums.
template <class F> constexpr int blocks_of(int nt, int mt, int warps) { return (nt * mt + (F::ADDED ? 1 : 0) <= 8 ? 16 : 8) / warps; }

// Up to 8 tokens. A block has NT tiles, whose steps its warps share out; x comes through L1. DEPTH - 1 steps of a
// warp are on their way at once. For small weights it is instructions that take the time, not memory: hence few of them.
template <class F, int NT, int WARPS, int DEPTH, class Result>
__device__ __forceinline__ void few_tokens(const F &f, const Result &result, const typename F::X *x, int K) {
  using X = typename F::X;
  using A = typename F::A;
  using Stage = low_bit::Stage<F, NT>;
  constexpr int PIECES = PIECES_OF<F>, OF_WARP = DEPTH * Stage::BYTES, SUMS = NT * 512;
  static_assert(SUMS <= OF_WARP && NT * 16 * 8 <= WARPS * 32);
  extern __shared__ uint4 low_bit_memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int steps = K / F::STEP, tile0 = blockIdx.x * NT;
  if (warp < NT && tile0 + warp < (result.rows + 15) / 16) f.warm(tile0 + warp, min(steps, WARPS * (DEPTH - 1)), lane);
  let_next_begin();
  const unsigned memory = shared_address(low_bit_memory);
  const Stage stage(memory + warp * OF_WARP, lane);
  const int count = kept(steps > warp ? (steps - warp + WARPS - 1) / WARPS : 0);  // of this warp
  const bool has_token = g < result.tokens;
  const int of_x = kept(has_token ? count : 0);  // steps for which this lane has a token
  const X *from = kept(x + (long long)(has_token ? g : 0) * K + (warp * F::STEP + F::k_of(0, t)));
  typename F::Place place = f.place(tile0, warp, lane);
  wait_for_inputs();

#pragma unroll
  for (int i = 0; i < DEPTH - 1; i++) {
    if (i < count) stage.fetch(f, i * Stage::BYTES, place);
    f.ahead(place, WARPS);
    commit_copies();
  }
  uint4 own_x[PIECES] = {};  // no __ldg: a load of constants may be moved before `wait_for_inputs`
  if (of_x > 0)
#pragma unroll
    for (int p = 0; p < PIECES; p++) load_16(own_x[p], from + F::k_of(p, 0));
  const unsigned token = threadIdx.x / (NT * 16), row = threadIdx.x % (NT * 16);  // of the sum that this thread adds up
  const typename Result::Read read = result.read(token, tile0 * 16 + row);
  A sums[NT][1][4] = {};
  for (int i = 0; i < count;) {
#pragma unroll
    for (int slot = 0; slot < DEPTH; slot++) {
      if (i >= count) break;
      wait_for_copies<DEPTH - 2>();
      if (i + DEPTH - 1 < count) stage.fetch(f, (slot + DEPTH - 1) % DEPTH * Stage::BYTES, place);
      f.ahead(place, WARPS);
      commit_copies();
      from += WARPS * F::STEP;
      typename F::Held held[NT];
      stage.hold(f, held, slot * Stage::BYTES, tile0, warp + i * WARPS, lane);
      i++;
      add_step<F, NT, 1>(
          sums, held, [&](int piece, int) { return own_x[piece]; },
          [&](int piece) {
            if (i < of_x) load_16(own_x[piece], from + F::k_of(piece, 0));
          });
    }
  }

  // The sums of a warp come where its steps were.
#pragma unroll
  for (int n = 0; n < NT; n++)
    ((uint4 *)low_bit_memory)[(warp * OF_WARP + n * 512) / 16 + lane] = reinterpret_cast<const uint4 &>(sums[n][0]);
  __syncthreads();
  if (token >= result.tokens) return;
  const unsigned of = row % 16 / 2 * 4 + token / 2, c = row % 2 * 2 + token % 2;
  const A *const first = (const A *)low_bit_memory + row / 16 * 128 + of * 4 + c;
  A sum = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += first[w * (OF_WARP / 4)];
  result.store(sum, read, token, tile0 * 16 + row);
}

// A sum that another block takes over, in a word that is 0 before and after.
__device__ __forceinline__ void hand_over(unsigned long long *word, float sum) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(word), "l"(1ull << 32 | __float_as_uint(sum)) : "memory");
}
__device__ __forceinline__ float taken_over(unsigned long long *word) {
  unsigned long long found;
  do asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(found) : "l"(word) : "memory");
  while (found == 0);
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(word), "l"(0ull) : "memory");
  return __uint_as_float((unsigned)found);
}

// The same for weights of which each multiprocessor reads much, where the steps of a tile lie one behind the other. Blocks
// have equal shares, to a chunk, of the chunks of all tiles, which have CHUNK steps each. Chunk i of a block is that of warp
// i % WARPS, from tile to tile, so that copies for the next tile are on their way before a tile is done. DEPTH - 1 chunks of a
// warp are on their way at once. x is in shared memory. K is a multiple of a chunk, and a tile has a chunk for each warp at
// least. There must be a tile for each block at least: then a tile belongs to two blocks at most. The block that has its end
// comes to it first, and hands its sums over to the block that has its beginning, by handed[share][token][row]. Shares are
// numbered from the last block on, so that a block waits only for one that was begun before it.
template <class F, int WARPS, int CHUNK, int DEPTH, class Result>
__device__ __forceinline__ void few_tokens_streamed(const F &f, const Result &result, const typename F::X *x, int K,
                                                    unsigned long long *handed) {
  using X = typename F::X;
  using A = typename F::A;
  struct alignas(8) Pair { A tokens[2]; };
  constexpr int VECTORS = F::VECTORS * 512, SIDES = F::SIDES * 128, BYTES = CHUNK * (VECTORS + SIDES);  // of a chunk: VECTORS come first
  constexpr int BUFFERS = 2;  // for sums of tiles that are not yet added
  constexpr int TURNS = 4;    // steps that are multiplied at once
  constexpr int TILE = 16 * 8, OF_LANE = TILE / 32;
  static_assert(CHUNK % TURNS == 0);
  extern __shared__ uint4 low_bit_memory[];
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), g = lane / 4, t = lane % 4;
  const int chunks = K / (F::STEP * CHUNK);  // of a tile
  const int share = gridDim.x - 1 - blockIdx.x;
  const long long all = (result.rows + 15ll) / 16 * chunks, begin = all * share / gridDim.x;
  const int count = all * (share + 1) / gridDim.x - begin;
  const int tile0 = begin / chunks, skipped = begin % chunks, tiles = (skipped + count + chunks - 1) / chunks;
  const bool has_end = (skipped + count) % chunks == 0;  // of the last tile
  // In shared memory: chunks of the warps, barriers, sums [BUFFERS][WARPS][16 rows][width], and x, at a multiple of 16 bytes.
  constexpr int BARRIERS = (WARPS * DEPTH + 2 * BUFFERS + 1 + 1) / 2 * 2;
  const int width = result.tokens + result.tokens % 2, row_of_x = K * sizeof(X) + F::ROW_SKIP;
  unsigned char *const barriers = (unsigned char *)low_bit_memory + WARPS * DEPTH * BYTES;
  A *const of_warps = (A *)(barriers + BARRIERS * 8);
  unsigned char *const near_x = (unsigned char *)(of_warps + BUFFERS * WARPS * 16 * width);
  const unsigned address = shared_address(low_bit_memory) + warp * DEPTH * BYTES, copied = shared_address(barriers) + warp * DEPTH * 8;
  const unsigned full = shared_address(barriers) + WARPS * DEPTH * 8, empty = full + BUFFERS * 8, has_x = empty + BUFFERS * 8;

  // The chunks of the warp are every WARPS-th of the block's, from `warp` on.
  struct Turn {
    int tile, chunk, left;  // how many there are from here on
    __device__ __forceinline__ bool next(int chunks) {  // whether it is in another tile
      left--, chunk += WARPS;
      const bool is_other = chunk >= chunks;
      if (is_other) chunk -= chunks, tile++;
      return is_other;
    }
  };
  Turn now = {0, skipped + warp - WARPS, (count - warp + WARPS - 1) / WARPS + 1};
  now.next(chunks);
  Turn ahead = now;
  typename F::Place place = f.place(tile0 + ahead.tile, ahead.chunk * CHUNK, lane);
  if (threadIdx.x == 0) prefetch(place.q, min(count, WARPS) * CHUNK * VECTORS);
  if (lane < DEPTH) make_barrier(copied + lane * 8, 33);  // a bulk copy, and copies of 32 lanes
  if (threadIdx.x < 2 * BUFFERS) make_barrier(full + threadIdx.x * 8, threadIdx.x < BUFFERS ? WARPS : 1);
  if (threadIdx.x == 0) make_barrier(has_x, 1);
  barriers_are_made();
  fence_memory();
  __syncthreads();
  let_next_begin();
  wait_for_inputs();

  if (threadIdx.x == 0) {
    arrive_and_expect(has_x, result.tokens * K * sizeof(X));
    for (int token = 0; token < result.tokens; token++)
      copy_bytes(shared_address(near_x + token * row_of_x), x + (long long)token * K, K * sizeof(X), has_x);
  }
  __syncwarp();
  const auto fetch = [&](int slot) {
    if (ahead.left <= 0) return;
    const unsigned to = address + slot * BYTES, barrier = copied + slot * 8;
    if (lane == 0) {
      arrive_and_expect(barrier, CHUNK * VECTORS);
      copy_bytes_once(to, place.q, CHUNK * VECTORS, barrier);
    }
#pragma unroll
    for (int s = 0; s < CHUNK; s++) {
      f.fetch_sides(to + CHUNK * VECTORS + s * SIDES + lane * 4, place, 0);
      f.ahead(place, 1);
    }
    arrive_after_copies(barrier);
    if (ahead.next(chunks))
      place = f.place(tile0 + ahead.tile, ahead.chunk * CHUNK, lane);
    else
      f.ahead(place, (WARPS - 1) * CHUNK);
  };
#pragma unroll
  for (int i = 0; i < DEPTH - 1; i++) fetch(i);

  // Adds what warps have of a tile, in their order, and what the block with its end has.
  const auto add = [&](int tile) {
    const int buffer = tile % BUFFERS;
    const bool goes_on = tile == tiles - 1 && !has_end;
    float of_next[OF_LANE] = {};
    if (goes_on)
#pragma unroll
      for (int j = 0; j < OF_LANE; j++)
        if (lane + j * 32 < 16 * result.tokens) of_next[j] = taken_over(handed + (share + 1) * TILE + lane + j * 32);
    wait_for_phase(full + buffer * 8, tile / BUFFERS & 1);
#pragma unroll
    for (int j = 0; j < OF_LANE; j++) {
      const int i = lane + j * 32;
      if (i >= 16 * result.tokens) break;
      const A *const of = of_warps + (buffer * WARPS * 16 + i % 16) * width + i / 16;
      A sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum += of[w * 16 * width];
      if (tile == 0 && skipped)
        hand_over(handed + share * TILE + i, sum);
      else
        result.store(sum + of_next[j], i / 16, (tile0 + tile) * 16 + i % 16);
    }
    __syncwarp();
    if (lane == 0) arrive(empty + buffer * 8);
  };
  A sums[4] = {};
  int tile = 0, to_add = warp;  // the tile of the sums, and the next one that is the warp's to add
  const auto go_on = [&] {      // to the next tile; the warp may have nothing of the first and the last one
    for (; to_add < tile; to_add += WARPS) add(to_add);
    const int buffer = tile % BUFFERS;
    if (tile >= BUFFERS) wait_for_phase(empty + buffer * 8, tile / BUFFERS - 1 & 1);
    A *const to = of_warps + ((buffer * WARPS + warp) * 16 + 2 * g) * width + 2 * t;
    if (2 * t < result.tokens) *(Pair *)to = {sums[0], sums[1]}, *(Pair *)(to + width) = {sums[2], sums[3]};
    sums[0] = sums[1] = sums[2] = sums[3] = 0;
    __syncwarp();
    if (lane == 0) arrive(full + buffer * 8);
    tile++;
  };
  const bool has_token = g < result.tokens;
  const X *const own_x = (const X *)(near_x + (has_token ? g : 0) * row_of_x);
  uint4 of_x[TURNS] = {};  // stays 0 where there is no token
  int slot = 0, last = DEPTH - 1;
  unsigned parity = 0;
  wait_for_phase(has_x, 0);
#pragma unroll 1
  while (now.left > 0) {
    if (tile < now.tile) go_on();
    __syncwarp();  // all lanes have read what was at `last`
    fetch(last);
    wait_for_phase(copied + slot * 8, parity);
    const unsigned from = address + slot * BYTES + lane * 16, sides = address + slot * BYTES + CHUNK * VECTORS + lane * 4;
#pragma unroll
    for (int s = 0; s < CHUNK; s += TURNS) {
      const int step = now.chunk * CHUNK + s;
      typename F::Held held[TURNS];
#pragma unroll
      for (int i = 0; i < TURNS; i++)
        f.hold(held[i], from + (s + i) * VECTORS, sides + (s + i) * SIDES, tile0 + tile, step + i, lane);
      add_steps<F, TURNS>(sums, held, [&](int piece, int i) {
        if (has_token) of_x[i] = *(const uint4 *)(own_x + (step + i) * F::STEP + F::k_of(piece, t));
        return of_x[i];
      });
    }
    last = slot++;
    if (slot == DEPTH) slot = 0, parity ^= 1;
    now.next(chunks);
  }
  while (tile < tiles) go_on();
  for (; to_add < tiles; to_add += WARPS) add(to_add);
}

// Up to 8 * MT tokens. A block has WARPS * NT tiles, NT for each warp, and the steps of its part of K (grid.y);
// x comes through shared memory. The block that comes last adds the parts, in their order: partial has for each
// of grid.x and grid.y [tokens][WARPS * NT * 16] sums, and `counters`, for each of grid.x, are 0 before and after.
template <class F, int NT, int MT, int WARPS, int DEPTH, class Result>
__device__ __forceinline__ void many_tokens(const F &f, const Result &result, const typename F::X *x, int K,
                                            typename F::A *partial, unsigned *counters) {
  using X = typename F::X;
  using A = typename F::A;
  using Stage = low_bit::Stage<F, NT>;
  constexpr int ROW = F::STEP * sizeof(X), SKIP = ROW + F::ROW_SKIP, WIDTH = WARPS * NT * 16, THREADS = WARPS * 32;
  constexpr int VECTORS = ROW / 16, AT_ONCE = THREADS / VECTORS;  // of a row of x; rows that the block copies at once
  constexpr int TOKENS = 8 * MT, BYTES = TOKENS * SKIP;           // of x in a step
  extern __shared__ uint4 low_bit_memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int steps = K / F::STEP, parts = gridDim.y;
  const int begin = (long long)steps * blockIdx.y / parts, count = (long long)steps * (blockIdx.y + 1) / parts - begin;
  const int tile0 = (blockIdx.x * WARPS + warp) * NT;
  unsigned char *const of_tokens = (unsigned char *)low_bit_memory + WARPS * DEPTH * Stage::BYTES;
  const Stage stage(shared_address(low_bit_memory) + warp * DEPTH * Stage::BYTES, lane);
  // A thread copies the same 16 bytes of rows of x, AT_ONCE apart. Tokens that are not there stay 0.
  const int token0 = threadIdx.x / VECTORS;
  const unsigned to = shared_address(of_tokens + token0 * SKIP + threadIdx.x % VECTORS * 16);
  const X *from = x + (long long)token0 * K + (long long)begin * F::STEP + threadIdx.x % VECTORS * (16 / sizeof(X));
#pragma unroll
  for (int p = 0; p < TOKENS; p += AT_ONCE)
    if (token0 + p >= result.tokens && token0 + p < TOKENS)
      for (int i = 0; i < DEPTH; i++)
        *(uint4 *)(of_tokens + i * BYTES + (token0 + p) * SKIP + threadIdx.x % VECTORS * 16) = make_uint4(0, 0, 0, 0);
  let_next_begin();
  wait_for_inputs();

  typename F::Place place = f.place(tile0, begin, lane);
  const auto fetch = [&](int slot, bool is_there) {
    if (is_there) {
      stage.fetch(f, slot * Stage::BYTES, place);
#pragma unroll
      for (int p = 0; p < TOKENS; p += AT_ONCE)
        if (token0 + p < result.tokens) copy_16(to + slot * BYTES + p * SKIP, from + (long long)p * K);
    }
    f.ahead(place, 1);
    from += F::STEP;
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < DEPTH - 1; i++) fetch(i, i < count);
  A sums[NT][MT][4] = {};
  int slot = 0, last = DEPTH - 1;
  for (int i = 0; i < count; i++) {
    wait_for_copies<DEPTH - 2>();
    __syncthreads();  // all have step i, and none still reads the place of step i - 1
    fetch(last, i + DEPTH - 1 < count);
    typename F::Held held[NT];
    stage.hold(f, held, slot * Stage::BYTES, tile0, begin + i, lane);
    const unsigned char *const mine = of_tokens + slot * BYTES + g * SKIP;
    add_step<F, NT, MT>(
        sums, held, [&](int piece, int m) { return *(const uint4 *)(mine + m * 8 * SKIP + F::k_of(piece, t) * sizeof(X)); },
        [](int) {});
    last = slot;
    slot = slot + 1 == DEPTH ? 0 : slot + 1;
  }
  wait_for_copies<0>();

  struct alignas(8) Pair { A rows[2]; };
  struct alignas(16) Four { A rows[4]; };
  A *const own = partial + ((long long)blockIdx.x * parts + blockIdx.y) * result.tokens * WIDTH;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int token = m * 8 + 2 * t + c, row = (warp * NT + n) * 16 + 2 * g;
        if (parts == 1) {
          result.store(sums[n][m][c], token, blockIdx.x * WIDTH + row);
          result.store(sums[n][m][c + 2], token, blockIdx.x * WIDTH + row + 1);
        } else if (token < result.tokens) {
          *(Pair *)(own + (long long)token * WIDTH + row) = {sums[n][m][c], sums[n][m][c + 2]};
        }
      }
  if (parts == 1) return;
  __threadfence();
  __syncthreads();
  int &is_last = *(int *)low_bit_memory;
  if (threadIdx.x == 0) {
    is_last = atomicAdd(counters + blockIdx.x, 1u) == parts - 1;
    if (is_last) counters[blockIdx.x] = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const A *const all = partial + (long long)blockIdx.x * parts * result.tokens * WIDTH;
#pragma unroll 2
  for (int i = threadIdx.x * 4; i < result.tokens * WIDTH; i += THREADS * 4) {
    Four sum = {};
#pragma unroll 4
    for (int p = 0; p < parts; p++) {
      const uint4 bits = __ldcg((const uint4 *)(all + (long long)p * result.tokens * WIDTH + i));
      const Four part = reinterpret_cast<const Four &>(bits);
#pragma unroll
      for (int j = 0; j < 4; j++) sum.rows[j] += part.rows[j];
    }
#pragma unroll
    for (int j = 0; j < 4; j++) result.store(sum.rows[j], i / WIDTH, blockIdx.x * WIDTH + i % WIDTH + j);
  }
}

}  // namespace jitkern::low_bit
