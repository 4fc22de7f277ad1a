// Weights of 4 bits in the layout of kernels_src/int4.py: values of a tile of 16 rows, and products with rows of x.
#include "rows.h"

static constexpr int64_t R = 16, PIECE = 64;  // rows of a tile, and numbers of each that are decoded at once

// w[k][r] of one piece of a tile.
template <typename T, typename Z>
static void decode(float (&w)[PIECE][R], const int32_t* words, const T* scale, const Z* zero, int64_t first, int64_t rows) {
  float s[R], whole[R], added[R];
  for (int64_t r = 0; r < R; r++) {
    const int64_t row = light::min(first + r, rows - 1);
    s[r] = float(scale[row]), whole[r] = 8, added[r] = 0;
    if constexpr (std::is_same_v<Z, uint8_t>) {
      whole[r] = zero[row];
    } else {
      if (zero) added[r] = float(zero[row]);
    }
  }
  for (int64_t i = 0; i < 2; i++)
    for (int64_t t = 0; t < 4; t++) {
      uint32_t word[R];
      for (int64_t r = 0; r < R; r++) word[r] = uint32_t(words[(r / 2 * 4 + t) * 4 + i * 2 + r % 2]);
      for (int64_t k = 0; k < 8; k++)
        for (int64_t r = 0; r < R; r++) {
          const int32_t q = word[r] >> (k / 2 + k % 2 * 4) * 4 & 15;
          w[i * 32 + t * 8 + k][r] = (float(q) - whole[r]) * s[r] + added[r];
        }
    }
}

template <typename T, typename Z>
void w4a16_linear(T* y, const T* x, const T* bias, const int32_t* q, const T* scale, const Z* zero, int64_t group, int64_t rows,
                  int64_t columns, int64_t tokens) {
  const light::Array<float> memory(tokens * columns);
  float* wide = memory.get();
  widen(wide, x, tokens * columns);
  for_rows((rows + R - 1) / R, R * columns * tokens, [=](int64_t tile) {
    float w[PIECE][R];
    float* sums = scratch<float>(tokens * R);
    light::fill(sums, sums + tokens * R, 0.f);
    for (int64_t k = 0; k < columns; k += PIECE) {
      const int64_t of = k / group * rows;
      decode(w, q + (tile * columns + k) * 2, scale + of, zero ? zero + of : nullptr, tile * R, rows);
      for (int64_t m = 0; m < tokens; m++) {
        float own[R] = {};  // of the piece, so that long rows lose little
        for (int64_t j = 0; j < PIECE; j++)
          for (int64_t r = 0; r < R; r++) own[r] += wide[m * columns + k + j] * w[j][r];
        for (int64_t r = 0; r < R; r++) sums[m * R + r] += own[r];
      }
    }
    for (int64_t m = 0; m < tokens; m++)
      for (int64_t r = 0; r < light::min(R, rows - tile * R); r++)
        y[m * rows + tile * R + r] = T(sums[m * R + r] + (bias ? float(bias[tile * R + r]) : 0.f));
  });
}

template <typename T, typename Z>
void dequantize_int4(T* to, const int32_t* q, const T* scale, const Z* zero, int64_t group, int64_t rows, int64_t columns) {
  static constexpr uint32_t places[8] = {0, 16, 4, 20, 8, 24, 12, 28};
  for_rows(rows, columns, [=](int64_t n) {
    float* w = scratch<float>(columns);
    const uint32_t* words = (const uint32_t*)q + n / R * columns * 2 + n % R / 2 * 16 + n % 2;
    for (int64_t k = 0; k < columns; k += 8) {  // in steps of one word, of four lanes and two words of each
      const uint32_t word = words[k / PIECE * 128 + k / 8 % 4 * 4 + k / 32 % 2 * 2];
      const int64_t of = k / group * rows + n;
      const float s = float(scale[of]);
      float whole = 8, added = 0;
      if constexpr (std::is_same_v<Z, uint8_t>) {
        whole = zero[of];
      } else {
        if (zero) added = float(zero[of]);
      }
      for (int64_t j = 0; j < 8; j++) w[k + j] = (float(int32_t(word >> places[j] & 15)) - whole) * s + added;
    }
    narrow(to + n * columns, w, columns);
  });
}
