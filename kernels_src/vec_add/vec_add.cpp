// out[i] = x[i] + y[i]
#include <cstdint>

#include "float16.h"

extern "C" void vec_add(T* out, const T* x, const T* y, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = x[i] + y[i];
}
