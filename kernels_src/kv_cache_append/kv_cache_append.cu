// Keys and values of new tokens into the slots of a paged cache: see kernel.py. A thread copies V
// numbers of a key, and the same V of the value.
#include <cuda_fp8.h>

#include "types.cuh"

namespace kv_cache_append_detail {

template <typename T, int V> struct alignas(sizeof(T) * V) Vector { T at[V]; };

// x as the cache holds it.
template <typename C, typename T, int V> __device__ __forceinline__ Vector<C, V> stored(const Vector<T, V> &x, float scale) {
  if constexpr (jitkern::is_same<C, T>) {
    return x;
  } else {
    Vector<C, V> y;
#pragma unroll
    for (int i = 0; i < V; i++) y.at[i] = C(__fdiv_rn(float(x.at[i]), scale));  // bounded: see cuda_fp8.h
    return y;
  }
}

}  // namespace kv_cache_append_detail

// Threads are numbered by token, head and V numbers of the head; I: an integer for their number. Strides
// are in elements; each scale has a step of 0 or 1 from head to head.
template <typename T, typename C, typename S, typename I, int V>
__global__ void __launch_bounds__(256)
    kv_cache_append(C *k_cache, C *v_cache, const T *__restrict__ k, const T *__restrict__ v, const S *__restrict__ slots,
                    const float *__restrict__ k_scale, const float *__restrict__ v_scale, int k_step, int v_step,
                    long long tokens, int heads, int d, long long most, int page_size, long long k_token, long long k_head,
                    long long v_token, long long v_head, long long kc_page, long long kc_slot, long long kc_head,
                    long long vc_page, long long vc_slot, long long vc_head) {
  using namespace kv_cache_append_detail;
  const I thread = I(blockIdx.x) * 256 + threadIdx.x, columns = d / V;
  const I row = thread / columns;
  const long long token = row / I(heads);
  if (token >= tokens) return;
  const int column = int(thread - row * columns) * V, head = int(row - I(token) * I(heads));
  const auto key = *reinterpret_cast<const Vector<T, V> *>(k + token * k_token + head * k_head + column);
  const auto value = *reinterpret_cast<const Vector<T, V> *>(v + token * v_token + head * v_head + column);
  const long long slot = slots[token];
  if (slot < 0 || slot >= most) return;
  const bool is_small = slot < 1ll << 32;  // a division of 64 bits takes a hundred instructions
  const long long page = is_small ? unsigned(slot) / unsigned(page_size) : slot / page_size;
  const long long at = slot - page * page_size;
  const float k_by = k_scale ? k_scale[head * k_step] : 1, v_by = v_scale ? v_scale[head * v_step] : 1;
  *reinterpret_cast<Vector<C, V> *>(k_cache + page * kc_page + at * kc_slot + head * kc_head + column) = stored<C>(key, k_by);
  *reinterpret_cast<Vector<C, V> *>(v_cache + page * vc_page + at * vc_slot + head * vc_head + column) = stored<C>(value, v_by);
}
