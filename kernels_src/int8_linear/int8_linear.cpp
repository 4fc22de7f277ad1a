// Products of rows of x, as numbers of 8 bits, with rows of weights of 8 bits.
#include "quantized_rows.h"

template <typename T> void quantize(int8_t* out, float* units, const T* x, int64_t rows, int64_t cols) {
  for_rows(rows, cols, [=](int64_t r) {
    float* v = scratch<float>(cols);
    widen(v, x + r * cols, cols);
    units[r] = quantized(out + r * cols, v, cols);
  });
}

template <typename T, typename S>
static T scaled(int32_t product, const float* units, const S* scale, const T* bias, int64_t m, int64_t n) {
  return T(float(product) * float(scale[n]) * units[m] + (bias ? float(bias[n]) : 0.f));
}

template <typename T, typename S>
void int8_linear(T* y, const int8_t* x, const float* units, const int8_t* q, const S* scale, const T* bias, int64_t tokens, int64_t rows,
                 int64_t columns) {
  for_rows(rows, columns * tokens, [=](int64_t n) {
    for (int64_t m = 0; m < tokens; m++) {
      int32_t product = 0;
      for (int64_t k = 0; k < columns; k++) product += int32_t(x[m * columns + k]) * int32_t(q[n * columns + k]);
      y[m * rows + n] = scaled(product, units, scale, bias, m, n);
    }
  });
}

template <typename T, typename S>
void scale_products(T* y, const int32_t* products, const float* units, const S* scale, const T* bias, int64_t tokens, int64_t rows) {
  for_rows(tokens, rows, [=](int64_t m) {
    for (int64_t n = 0; n < rows; n++) y[m * rows + n] = scaled(products[m * rows + n], units, scale, bias, m, n);
  });
}
