// Keys and values of new tokens into the slots of a paged cache, a token a row: see kernel.py.
#include "rows.h"

template <typename C, typename T> static void store(C *to, const T *from, int64_t d, float scale) {
  if constexpr (std::is_same_v<C, T>) {
    std::memcpy(to, from, d * sizeof(T));
  } else {
    float *x = scratch<float>(d);
    widen(x, from, d);
    for (int64_t i = 0; i < d; i++) {
      const float y = x[i] / scale;
      x[i] = y < -448 ? -448 : y > 448 ? 448 : y;  // NaN passes
    }
    narrow(to, x, d);
  }
}

// Strides are in elements; each scale has a step of 0 or 1 from head to head.
template <typename T, typename C, typename S>
void kv_cache_append(C *k_cache, C *v_cache, const T *k, const T *v, const S *slots, const float *k_scale,
                     const float *v_scale, int64_t k_step, int64_t v_step, int64_t tokens, int64_t heads, int64_t d,
                     int64_t most, int64_t page_size, int64_t k_token, int64_t k_head, int64_t v_token, int64_t v_head,
                     int64_t kc_page, int64_t kc_slot, int64_t kc_head, int64_t vc_page, int64_t vc_slot,
                     int64_t vc_head) {
  for_rows(tokens, 2 * heads * d, [=](int64_t token) {
    const int64_t slot = slots[token];
    if (slot < 0 || slot >= most) return;
    const int64_t page = slot / page_size, at = slot % page_size;
    for (int64_t h = 0; h < heads; h++) {
      store(k_cache + page * kc_page + at * kc_slot + h * kc_head, k + token * k_token + h * k_head, d,
            k_scale ? k_scale[h * k_step] : 1);
      store(v_cache + page * vc_page + at * vc_slot + h * vc_head, v + token * v_token + h * v_head, d,
            v_scale ? v_scale[h * v_step] : 1);
    }
  });
}
