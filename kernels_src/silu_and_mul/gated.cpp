// out = f(gate) * up, where a row has all numbers of gate, then all of up.
#include <cmath>

#include "exponential.h"
#include "rows.h"

enum { SILU, GELU, GELU_TANH, RELU2 };

// The sigmoid of z and its derivative, from e^-|z|, which neither overflows nor cancels.
template <typename A> static inline void sigmoid(A z, A& s, A& slope) {
  const A e = exponential(-std::fabs(z)), r = 1 / (1 + e);
  s = z < 0 ? e * r : r;
  slope = e * r * r;
}

// The distribution function of the normal distribution, erfc(-x / sqrt(2)) / 2, without a branch:
// erfc as a Chebyshev fit of Numerical Recipes (Press et al. 1992, section 6.2), within 1.2e-7 of it.
static inline float normal(float x) {
  const float t = std::fabs(x) * 0.70710678f, u = 1 / (1 + 0.5f * t);
  float p = 0.17087277f * u - 0.82215223f;
  p = p * u + 1.48851587f;
  p = p * u - 1.13520398f;
  p = p * u + 0.27886807f;
  p = p * u - 0.18628806f;
  p = p * u + 0.09678418f;
  p = p * u + 0.37409196f;
  p = p * u + 1.00002368f;
  p = p * u - 1.26551223f;
  const float tail = 0.5f * u * exponential(p - t * t);
  return tail + float(x >= 0) * (1 - 2 * tail);
}
static inline double normal(double x) { return 0.5 * std::erfc(x * -0.70710678118654752); }

// f(x) and f'(x)
template <int KIND, typename A> static inline void activation(A x, A& f, A& slope) {
  if constexpr (KIND == RELU2) {
    const A r = x < 0 ? 0 : x;
    f = r * r, slope = 2 * r;
  } else if constexpr (KIND == GELU) {
    const A p = normal(x);
    f = x * p, slope = p + x * A(0.3989422804014327) * exponential(A(-0.5) * x * x);
  } else {  // x sigmoid(z); for GELU_TANH, (1 + tanh(z / 2)) / 2 is sigmoid(z)
    constexpr A a = A(1.5957691216057308), b = A(0.044715);
    A s, ds;
    sigmoid(KIND == SILU ? x : a * (x + b * x * x * x), s, ds);
    f = x * s, slope = s + x * ds * (KIND == SILU ? 1 : a * (1 + 3 * b * x * x));
  }
}

static constexpr int64_t piece = 512;  // numbers that are computed while they are in the first cache

template <typename T, int KIND> void gated(T* out, const T* gate_up, int64_t rows, int64_t width, int64_t step) {
  for_rows(rows, width, [=](int64_t r) {
    accumulator<T> gate[piece], up[piece];
    for (int64_t begin = 0; begin < width; begin += piece) {
      const int64_t n = std::min(piece, width - begin);
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
  for_rows(rows, 2 * width, [=](int64_t r) {
    accumulator<T> gate[piece], up[piece], dy[piece];
    for (int64_t begin = 0; begin < width; begin += piece) {
      const int64_t n = std::min(piece, width - begin);
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
