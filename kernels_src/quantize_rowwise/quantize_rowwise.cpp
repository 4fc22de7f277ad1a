// Rows as numbers of 8 bits.
#include "quantized_rows.h"

template <typename T, typename Q> void quantize_rowwise(Q* out, float* units, const T* x, int64_t rows, int64_t cols) {
  for_rows(rows, cols, [=](int64_t r) {
    using A = accumulator<T>;
    A* v = scratch<A>(cols);
    widen(v, x + r * cols, cols);
    units[r] = quantized(out + r * cols, v, cols);
  });
}
