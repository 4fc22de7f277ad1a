// Attention of a few new tokens of each sequence over a paged cache, a key head of a sequence a row: see kernel.py.
#include <limits>

#include "exponential.h"
#include "rows.h"

static constexpr int64_t BLOCK = 64;  // tokens between two looks at the largest score

// Strides are in elements, those of the caches the same for both.
template <typename T, typename C, int D>
void paged_decode(T *out, float *lse, const T *q, const C *kc, const C *vc, const int32_t *block_table,
                  const int32_t *seq_lens, const float *slopes, const float *k_scale, const float *v_scale, int64_t k_step,
                  int64_t v_step, int64_t kv_heads, int64_t group, int64_t q_len, int64_t width, int64_t page_size,
                  int64_t table_stride, int64_t page_stride, int64_t token_stride, int64_t head_stride, int64_t q_batch,
                  int64_t q_token, int64_t q_head, double scale, double softcap, int64_t window, int64_t pages,
                  int64_t batch) {
  const int64_t longest = width * page_size;
  for_rows(batch * kv_heads, longest * D, [=](int64_t task) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const int64_t seq = task / kv_heads, head = task % kv_heads, rows = q_len * group;
    const int64_t len = light::min<int64_t>(seq_lens[seq], longest), end = len;  // of the last new token
    const int64_t first = len - q_len + 1;                                    // the end of the first one
    const float by = float(scale) * (k_scale ? k_scale[head * k_step] : 1), cap = float(softcap);
    float *x = scratch<float>(rows * (2 * D + BLOCK + 2) + D);
    float *o = x + rows * D, *s = o + rows * D, *most = s + rows * BLOCK, *sum = most + rows, *number = sum + rows;
    for (int64_t r = 0; r < rows; r++)
      widen(x + r * D, q + seq * q_batch + r / group * q_token + (head * group + r % group) * q_head, D);
    light::fill(o, o + rows * D, 0.f);
    light::fill(most, most + rows, -infinity);
    light::fill(sum, sum + rows, 0.f);
    const auto read = [=](const C *cache, int64_t at) {  // NaN of a page that there is not
      const int64_t page = block_table[seq * table_stride + at / page_size];
      if (page < 0 || page >= pages)
        light::fill(number, number + D, std::numeric_limits<float>::quiet_NaN());
      else
        widen(number, cache + page * page_stride + at % page_size * token_stride + head * head_stride, D);
    };
    for (int64_t begin = window > 0 ? light::max<int64_t>(first - window, 0) : 0; begin < end; begin += BLOCK) {
      const int64_t tokens = light::min(BLOCK, end - begin);
      for (int64_t t = 0; t < tokens; t++) {
        const int64_t at = begin + t;
        read(kc, at);
        for (int64_t r = 0; r < rows; r++) {
          const int64_t until = first + r / group;
          if (at >= until || (window > 0 && at < until - window)) {
            s[r * BLOCK + t] = -infinity;
            continue;
          }
          const float *row = x + r * D;
          float product = 0;
#pragma omp simd reduction(+ : product)
          for (int64_t i = 0; i < D; i++) product += row[i] * number[i];
          product *= by;
          if (cap > 0) product = cap * light::tanh(product / cap);
          if (slopes) product += slopes[head * group + r % group] * float(at - until + 1);
          s[r * BLOCK + t] = product;
        }
      }
      for (int64_t r = 0; r < rows; r++) {
        float *p = s + r * BLOCK, top = most[r];
        for (int64_t t = 0; t < tokens; t++) top = p[t] > top ? p[t] : top;
        const float base = top == -infinity ? 0 : top, before = most[r] == -infinity ? 0 : exponential(most[r] - base);
        float all = 0;
#pragma omp simd reduction(+ : all)
        for (int64_t t = 0; t < tokens; t++) all += p[t] = exponential(p[t] - base);
        sum[r] = sum[r] * before + all, most[r] = top;
        if (before != 1)
          for (int64_t i = 0; i < D; i++) o[r * D + i] *= before;
      }
      for (int64_t t = 0; t < tokens; t++) {
        read(vc, begin + t);
        for (int64_t r = 0; r < rows; r++) {
          const float p = s[r * BLOCK + t];
          if (p == 0) continue;
          float *row = o + r * D;
#pragma omp simd
          for (int64_t i = 0; i < D; i++) row[i] += p * number[i];
        }
      }
    }
    const float v_by = v_scale ? v_scale[head * v_step] : 1;
    for (int64_t r = 0; r < rows; r++) {
      const int64_t to = ((seq * q_len + r / group) * kv_heads + head) * group + r % group;
      const float over = sum[r] == 0 ? 0 : v_by / sum[r];
      for (int64_t i = 0; i < D; i++) o[r * D + i] *= over;
      narrow(out + to * D, o + r * D, D);
      lse[to] = sum[r] == 0 ? -infinity : most[r] + light::log(sum[r]);
    }
  });
}
