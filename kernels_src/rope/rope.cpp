// Rotary embedding of q and k, a token a row: see kernel.py.
#include <limits>

#include "rows.h"

template <bool INTERLEAVED, typename A> static void turn(A* x, const A* cos, const A* sin, int64_t half) {
  const int64_t step = INTERLEAVED ? 2 : 1, apart = INTERLEAVED ? 1 : half;
#pragma omp simd
  for (int64_t j = 0; j < half; j++) {
    const A x1 = x[j * step], x2 = x[j * step + apart];
    x[j * step] = x1 * cos[j] - x2 * sin[j];
    x[j * step + apart] = x2 * cos[j] + x1 * sin[j];
  }
}

// Strides are in elements. q_out and k_out are dense, or, IN_PLACE, q and k themselves.
template <typename T, typename C, typename P, bool INTERLEAVED, bool IN_PLACE>
void rope(T* q_out, T* k_out, const T* q, const T* k, const C* cos, const C* sin, const P* positions, bool inverse,
          int64_t batches, int64_t tokens, int64_t q_heads, int64_t k_heads, int64_t d, int64_t half, int64_t rows,
          int64_t q_batch, int64_t q_token, int64_t q_head, int64_t k_batch, int64_t k_token, int64_t k_head,
          int64_t cos_row, int64_t sin_row, int64_t batch_step, int64_t token_step) {
  using A = accumulator<T>;
  for_rows(batches * tokens, (q_heads + k_heads) * d, [=](int64_t token) {
    const int64_t batch = token / tokens, at = token - batch * tokens;
    const int64_t position = positions ? int64_t(positions[batch * batch_step + at * token_step]) : at;
    const bool inside = position >= 0 && position < rows;
    A* c = scratch<A>(d + 2 * half);  // the row of the tables, and a head
    A *s = c + half, *x = s + half;
    for (int64_t j = 0; j < half; j++) {
      c[j] = inside ? A(cos[position * cos_row + j]) : std::numeric_limits<A>::quiet_NaN();
      s[j] = inside ? A(sin[position * sin_row + j]) * (inverse ? -1 : 1) : c[j];
    }
    for (int64_t h = 0; h < q_heads + k_heads; h++) {
      const bool of_k = h >= q_heads;
      const int64_t head = of_k ? h - q_heads : h;
      const int64_t from = of_k ? batch * k_batch + at * k_token + head * k_head
                                : batch * q_batch + at * q_token + head * q_head;
      const int64_t to = IN_PLACE ? from : (token * (of_k ? k_heads : q_heads) + head) * d;
      const int64_t numbers = IN_PLACE ? 2 * half : d;
      widen(x, (of_k ? k : q) + from, numbers);
      turn<INTERLEAVED>(x, c, s, half);
      narrow((of_k ? k_out : q_out) + to, x, numbers);
    }
  });
}
