// Rotary embedding of q and k in one launch. A thread turns V pairs of one head: two vectors of up to
// 16 bytes, which lie side by side (interleaved) or half of the rotary dimension apart. Behind the
// rotary dimension, a thread copies two vectors.

#include "vectors.cuh"

// Threads are numbered by token, head (those of q, then those of k) and V pairs of the head; I: an
// integer for all of these numbers. Strides are in elements. q_out and k_out are dense, or, IN_PLACE,
// q and k themselves: no thread reads what another one writes.
template <typename T, typename C, typename P, typename I, int V, bool INTERLEAVED, bool IN_PLACE>
__global__ void __launch_bounds__(128)
    rope(T* q_out, T* k_out, const T* q, const T* k, const C* __restrict__ cos, const C* __restrict__ sin,
         const P* __restrict__ positions, bool inverse, long long batches, long long tokens, int q_heads,
         int k_heads, int d, int half, long long rows, long long q_batch, long long q_token, long long q_head,
         long long k_batch, long long k_token, long long k_head, long long cos_row, long long sin_row,
         long long batch_step, long long token_step) {
  using namespace jitkern;
  using A = widened<T>;
  using i64 = long long;
  const int turned = half / V, copied = (d - 2 * half + 2 * V - 1) / (2 * V);
  const I columns = turned + copied, heads = q_heads + k_heads;
  const I i = I(blockIdx.x) * 128 + threadIdx.x, row = i / columns, token = row / heads;
  if (token >= I(batches) * I(tokens)) return;
  const int column = int(i - row * columns);
  int head = int(row - token * heads);
  const I batch = batches == 1 ? 0 : token / I(tokens), at = token - batch * I(tokens);

  const bool of_k = head >= q_heads;
  if (of_k) head -= q_heads;
  const i64 from = of_k ? batch * k_batch + at * k_token + head * k_head
                        : batch * q_batch + at * q_token + head * q_head;
  const i64 to = IN_PLACE ? from : (i64(token) * (of_k ? k_heads : q_heads) + head) * d;
  const T* x = (of_k ? k : q) + from;
  T* out = (of_k ? k_out : q_out) + to;

  if (column >= turned) {
    if (IN_PLACE) return;
    const int first = 2 * half + (column - turned) * 2 * V, second = first + V;
    const Vector<T, V> a = load<V>(x + first);
    if (second < d) {
      const Vector<T, V> b = load<V>(x + second);
      store<V>(out + second, b);
    }
    store<V>(out + first, a);
    return;
  }
  const int first = column * V * (INTERLEAVED ? 2 : 1), second = first + (INTERLEAVED ? V : half);
  T pair[2 * V];
  const Vector<T, V> a = load<V>(x + first), b = load<V>(x + second);
  const i64 position = positions ? i64(positions[batch * batch_step + at * token_step]) : i64(at);
  const bool inside = position >= 0 && position < rows;
  Vector<C, V> c, s;
  if (inside) {
    c = load<V>(cos + position * cos_row + column * V);
    s = load<V>(sin + position * sin_row + column * V);
  }
#pragma unroll
  for (int j = 0; j < V; j++) pair[j] = a.at[j], pair[V + j] = b.at[j];
#pragma unroll
  for (int j = 0; j < V; j++) {
    T& even = pair[INTERLEAVED ? 2 * j : j];
    T& odd = pair[INTERLEAVED ? 2 * j + 1 : V + j];
    const A nan = __int_as_float(0x7fc00000);
    const A cosine = inside ? A(c.at[j]) : nan, sine = inside ? (inverse ? -A(s.at[j]) : A(s.at[j])) : nan;
    const A x1 = even, x2 = odd;
    even = T(x1 * cosine - x2 * sine);
    odd = T(x2 * cosine + x1 * sine);
  }
  Vector<T, V> y, z;
#pragma unroll
  for (int j = 0; j < V; j++) y.at[j] = pair[j], z.at[j] = pair[V + j];
  store<V>(out + first, y);
  store<V>(out + second, z);
}
