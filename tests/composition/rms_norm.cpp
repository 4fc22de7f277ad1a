#include <cmath>
#include <type_traits>
#include "epilogue.h"
#include "float16.h"
#include "prologue.h"

template <typename T>
void rms_norm(T* out, const T* x, const T* weight, double eps, long rows, long n PROLOGUE_PARAMETERS EPILOGUE_PARAMETERS) {
  using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
  for (long row = 0; row < rows; row++, x += n, out += n) {
    A sum = 0;
    for (long i = 0; i < n; i++) {
      const A value = PROLOGUE(A(x[i]), row, i);
      sum += value * value;
    }
    const A scale = 1 / std::sqrt(sum / n + A(eps));
    for (long i = 0; i < n; i++) {
      const A value = PROLOGUE(A(x[i]), row, i);
      out[i] = T(EPILOGUE(value * scale * A(weight[i]), row, i));
    }
  }
}
