// The arithmetic of sampling: bit for bit that of the reference, so that GPUs and CPUs draw the same token.
//
// An element of a row whose largest value is m has the weight floor(2^40 * 2^t), t = (v - m) * log2(e) / T,
// where t >= -40, else 0: an integer, so that sums do not depend on their order. 2^t is a polynomial
// in float32 (relative error below 2^-22). Elements that equal m have 2^40, also where m is infinite or NaN.
#pragma once
#include "ranked.h"

namespace jitkern {
ON_GPU float multiplied(float a, float b) { return __fmul_rn(a, b); }
ON_GPU float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
ON_GPU unsigned long long high_product(unsigned long long a, unsigned long long b) { return __umul64hi(a, b); }

struct Scale {
  float most;     // the largest value of the row
  unsigned rank;  // and its rank
  bool finite;    // whether it is
  float factor;   // log2(e) / temperature, finite
};
ON_GPU Scale scale_of(unsigned rank, float temperature) {
  const float most = value_of(rank), factor = 1.44269504f / temperature, large = 3e38f;
  return {most, rank, most - most == 0, temperature > 0 && factor < large ? factor : large};
}

constexpr float LEAST = -40;  // the exponent of a weight of 1

// The exponent t of an element; below LEAST, or NaN, where it has no weight.
ON_GPU float exponent_of(float v, const Scale &s) {
  return s.finite ? multiplied(v - s.most, s.factor) : rank_of(v) == s.rank ? 0.f : LEAST - 1;
}
// 2^(t + 40), for t from LEAST to 0.
ON_GPU float power_of(float t) {
  const float shifted = t + 12582912.f;  // 1.5 * 2^23: the last bits are t, rounded to an integer
  const float f = t - (shifted - 12582912.f);
  float y = 0x1.5bbap-10f;
  y = fused(y, f, 0x1.3cea88p-7f);
  y = fused(y, f, 0x1.c6b754p-5f);
  y = fused(y, f, 0x1.ebf9bcp-3f);
  y = fused(y, f, 0x1.62e42ap-1f);
  y = fused(y, f, 1.f);
  return float_of(bits_of(y) + ((bits_of(shifted) - 0x4b400000u + 40) << 23));
}
// The number of octaves of `per` to an octave that an element lies below the largest, rounded.
ON_GPU int octaves_of(float t, float per) { return int(bits_of(fused(t, -per, 12582912.f)) - 0x4b400000u); }
ON_GPU unsigned long long weight_of(float t) { return t >= LEAST ? (unsigned long long)power_of(t) : 0; }

// Whether top-p may drop anything. A NaN counts as 0, which keeps the largest alone.
ON_GPU bool drops(float p) { return !(p >= 1); }
// The least sum of weights that reaches the share p of all: that of the smallest prefix to keep.
ON_GPU unsigned long long needed(float p, unsigned long long all) {
  const double least = ceil(double(p) * double(all));
  const unsigned long long sum = least >= 1 ? (unsigned long long)least : 1;
  return sum < all ? sum : all;
}

// 64 random bits: Philox 4x32-10 (Salmon et al. 2011) of one counter, for each row a subsequence.
ON_GPU unsigned long long random_bits(unsigned long long seed, unsigned long long offset, unsigned long long row) {
  unsigned a = unsigned(offset), b = unsigned(offset >> 32), c = unsigned(row), d = unsigned(row >> 32);
  unsigned k = unsigned(seed), l = unsigned(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const unsigned long long p = 0xD2511F53ull * a, q = 0xCD9E8D57ull * c;
    a = unsigned(q >> 32) ^ b ^ k, b = unsigned(q);
    c = unsigned(p >> 32) ^ d ^ l, d = unsigned(p);
    k += 0x9E3779B9u, l += 0xBB67AE85u;
  }
  return (unsigned long long)b << 32 | a;
}

}  // namespace jitkern
