// out = f(gate) * up, where a row has all numbers of gate, then all of up.

#include "exponential.h"
#include "rows.h"

enum { SILU, GELU, GELU_TANH, RELU2 };

// The sigmoid of z and its derivative, from e^-|z|, which neither overflows nor cancels.
template <typename A> static inline void sigmoid(A z, A& s, A& slope) {
  const A e = exponential(-light::fabs(z)), r = 1 / (1 + e);
  s = z < 0 ? e * r : r;
  slope = e * r * r;
}

// Density and distribution function of the normal distribution. In float, the latter from its ratio to
// the density, a polynomial of 1 / (1 + 0.4 |x|) fitted by least squares, within 1.2e-7 and without a branch.
template <typename A> static inline void normal(A x, A& density, A& distribution) {
  density = A(0.3989422804014327) * exponential(A(-0.5) * x * x);
  if constexpr (sizeof(A) == 4) {
    const A t = 1 / (1 + 0.4f * light::fabs(x));
    A p = -0.0228356831f * t + 0.246146809f;
    p = p * t - 0.836733717f;
    p = p * t + 1.0494441f;
    p = p * t - 0.076783319f;
    p = p * t + 0.505139557f;
    p = p * t + 0.388936414f;
    const A tail = density * (p * t);
    distribution = tail + A(x >= 0) * (1 - 2 * tail);
  } else {
    distribution = 0.5 * light::erfc(x * -0.70710678118654752);
  }
}

// f(x) and f'(x)
template <int KIND, typename A> static inline void activation(A x, A& f, A& slope) {
  if constexpr (KIND == RELU2) {
    const A r = x < 0 ? 0 : x;
    f = r * r, slope = 2 * r;
  } else if constexpr (KIND == GELU) {
    A density, p;
    normal(x, density, p);
    f = x * p, slope = p + x * density;
  } else {  // x sigmoid(z); for GELU_TANH, (1 + tanh(z / 2)) / 2 is sigmoid(z)
    constexpr A a = A(1.5957691216057308), b = A(0.044715);
    A s, ds;
    sigmoid(KIND == SILU ? x : a * (x + b * x * x * x), s, ds);
    f = x * s, slope = s + x * ds * (KIND == SILU ? 1 : a * (1 + 3 * b * x * x));
  }
}

static constexpr int64_t piece = 512;  // numbers that are computed while they are in the first cache

template <typename T, int KIND> void gated(T* out, const T* gate_up, int64_t rows, int64_t width, int64_t step) {
  for_rows(rows, 2 * width, [=](int64_t r) {
    accumulator<T> gate[piece], up[piece];
    for (int64_t begin = 0; begin < width; begin += piece) {
      const int64_t n = light::min(piece, width - begin);
      widen(gate, gate_up + r * step + begin, n);
      widen(up, gate_up + r * step + width + begin, n);
#pragma omp simd
      for (int64_t i = 0; i < n; i++) {
        accumulator<T> f, slope;
        activation<KIND>(gate[i], f, slope);
        up[i] *= f;
      }
      narrow(out + r * width + begin, up, n);
    }
  });
}

template <typename T, int KIND>
void gated_backward(T* out, const T* grad, const T* gate_up, int64_t rows, int64_t width, int64_t step,
                    int64_t grad_step) {
  for_rows(rows, 4 * width, [=](int64_t r) {
    accumulator<T> gate[piece], up[piece], dy[piece];
    for (int64_t begin = 0; begin < width; begin += piece) {
      const int64_t n = light::min(piece, width - begin);
      widen(gate, gate_up + r * step + begin, n);
      widen(up, gate_up + r * step + width + begin, n);
      widen(dy, grad + r * grad_step + begin, n);
#pragma omp simd
      for (int64_t i = 0; i < n; i++) {
        accumulator<T> f, slope;
        activation<KIND>(gate[i], f, slope);
        gate[i] = dy[i] * up[i] * slope;
        up[i] = dy[i] * f;
      }
      narrow(out + 2 * r * width + begin, gate, n);
      narrow(out + (2 * r + 1) * width + begin, up, n);
    }
  });
}
