// Products of rows of x with rows of weights of 8 bits, and the values of weights as a matrix.
#include "rows.h"

template <typename T, typename S>
void w8a16_linear(T* y, const T* x, const int8_t* q, const S* scale, const T* bias, int64_t rows, int64_t columns, int64_t tokens) {
  const light::Array<float> memory(tokens * columns);
  float* wide = memory.get();
  widen(wide, x, tokens * columns);
  for_rows(rows, columns * tokens, [=](int64_t n) {
    float* w = scratch<float>(columns);
    widen(w, q + n * columns, columns);
    for (int64_t m = 0; m < tokens; m++) {
      const float* v = wide + m * columns;
      const float total = sum<float>(columns, [=](int64_t k, auto n) { return load<float>(v + k, n) * load<float>(w + k, n); });
      y[m * rows + n] = T(total * float(scale[n]) + (bias ? float(bias[n]) : 0.f));
    }
  });
}

template <typename T, typename S>
void dequantize_int8(T* to, const int8_t* q, const S* scale, int64_t rows, int64_t columns) {
  for_rows(rows, columns, [=](int64_t n) {
    float* w = scratch<float>(columns);
    const float s = float(scale[n]);
    for (int64_t k = 0; k < columns; k++) w[k] = float(q[n * columns + k]) * s;
    narrow(to + n * columns, w, columns);
  });
}
