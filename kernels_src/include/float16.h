// float16 and bfloat16 for kernels on the CPU: 16-bit storage, arithmetic in float.
// Conversions round to nearest even, as Torch's do.
#pragma once
#include <cstdint>
#include <cstring>

struct bfloat16 {
  uint16_t bits;
  bfloat16() = default;
  bfloat16(float value) {
    uint32_t u;
    std::memcpy(&u, &value, 4);
    bits = value != value ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
  }
  operator float() const {
    uint32_t u = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &u, 4);
    return value;
  }
};

struct float16 {
  uint16_t bits;
  float16() = default;
  float16(float value) {
    uint32_t u;
    std::memcpy(&u, &value, 4);
    const uint32_t sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000) {
      bits = sign | 0x7e00;  // NaN
    } else if (u >= 0x477ff000) {
      bits = sign | 0x7c00;  // rounds to infinity
    } else if (u < 0x38800000) {
      float magnitude;  // subnormal: adding 0.5 leaves its multiple of 2^-24 in the low bits, rounded
      std::memcpy(&magnitude, &u, 4);
      magnitude += 0.5f;
      std::memcpy(&u, &magnitude, 4);
      bits = sign | (u - 0x3f000000);
    } else {
      bits = sign | ((u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13);
    }
  }
  operator float() const {
    uint32_t u = uint32_t(bits & 0x7fff) << 13;
    float value;
    if (u < 0x00800000) {
      value = float(bits & 0x7fff) * 0x1p-24f;  // zero and subnormals
      std::memcpy(&u, &value, 4);
    } else {
      u += u >= 0x0f800000 ? 0x70000000 : 0x38000000;  // infinity and NaN keep a full exponent
    }
    u |= uint32_t(bits & 0x8000) << 16;
    std::memcpy(&value, &u, 4);
    return value;
  }
};
