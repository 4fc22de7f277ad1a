// float16, bfloat16 and float8_e4m3fn for kernels on the CPU: small storage, arithmetic in float.
// Conversions round to nearest even, as Torch's do, and loops over them vectorize.
#pragma once
#include <cstdint>
#include <cstring>

#ifndef JITKERN_TORCH  // the version to convert like: 2013 for Torch 2.13
#ifdef TORCH_VERSION_MAJOR
#define JITKERN_TORCH (1000 * TORCH_VERSION_MAJOR + TORCH_VERSION_MINOR)
#else
#define JITKERN_TORCH 2013
#endif
#endif

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
    float magnitude;  // of a subnormal: adding 0.5 leaves its multiple of 2^-24 in the low bits, rounded
    std::memcpy(&magnitude, &u, 4);
    magnitude += 0.5f;
    uint32_t small;
    std::memcpy(&small, &magnitude, 4);
    const uint32_t normal = (u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13;
    // Masks, not branches, which would keep compilers from vectorizing loops over this.
    const uint32_t is_small = -uint32_t(u < 0x38800000), is_large = -uint32_t(u >= 0x477ff000);
    const uint32_t finite = ((small - 0x3f000000) & is_small) | (normal & ~is_small);
    const uint32_t large = u > 0x7f800000 ? 0x7e00 : 0x7c00;  // NaN, or rounds to infinity
    bits = uint16_t(sign | (finite & ~is_large) | (large & is_large));
  }
  operator float() const {
    const uint32_t magnitude = bits & 0x7fff;
    float value = float(int32_t(magnitude)) * 0x1p-24f;  // right for zero and subnormals
    uint32_t small;
    std::memcpy(&small, &value, 4);
    // Infinity and NaN keep a full exponent.
    const uint32_t normal = (magnitude << 13) + 0x38000000 + uint32_t(magnitude >= 0x7c00) * 0x38000000;
    const uint32_t is_small = -uint32_t(magnitude < 0x400);
    const uint32_t u = uint32_t(bits & 0x8000) << 16 | (small & is_small) | (normal & ~is_small);
    std::memcpy(&value, &u, 4);
    return value;
  }
};

struct float8_e4m3fn {  // no infinity: what is larger than 464 is the largest, 448, and before Torch 2.13 NaN
  static constexpr uint32_t too_large = JITKERN_TORCH < 2013 ? 0x7f : 0x7e;
  uint8_t bits;
  float8_e4m3fn() = default;
  float8_e4m3fn(float value) {
    uint32_t u;
    std::memcpy(&u, &value, 4);
    const uint32_t sign = u >> 24 & 0x80;
    u &= 0x7fffffff;
    float magnitude;  // of a subnormal, as above: multiples of 2^-9
    std::memcpy(&magnitude, &u, 4);
    magnitude += 0x1p14f;
    uint32_t small;
    std::memcpy(&small, &magnitude, 4);
    const uint32_t normal = (u - 0x3c000000 + 0x7ffff + (u >> 20 & 1)) >> 20;
    const uint32_t is_small = -uint32_t(u < 0x3c800000), is_large = -uint32_t(u > 0x43e80000);
    const uint32_t finite = ((small - 0x46800000) & is_small) | (normal & ~is_small);
    const uint32_t large = u > 0x7f800000 ? 0x7f : too_large;
    bits = uint8_t(sign | (finite & ~is_large) | (large & is_large));
  }
  operator float() const {
    const uint32_t magnitude = bits & 0x7f;
    float value = float(int32_t(magnitude)) * 0x1p-9f;
    uint32_t small;
    std::memcpy(&small, &value, 4);
    const uint32_t normal = (magnitude << 20) + 0x3c000000;
    const uint32_t is_small = -uint32_t(magnitude < 8), is_nan = -uint32_t(magnitude == 0x7f);
    const uint32_t finite = (small & is_small) | (normal & ~is_small);
    const uint32_t u = uint32_t(bits & 0x80) << 24 | finite | (0x7f800000 & is_nan);
    std::memcpy(&value, &u, 4);
    return value;
  }
};
