// flag |= code if a value is infinite or NaN: its exponent is all ones.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "float16.h"
#include "light.h"

using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
static constexpr Bits mask = ((Bits(1) << EXPONENT) - 1) << (8 * sizeof(T) - 1 - EXPONENT);
static constexpr int64_t part = 4096;  // values after which a search may end

static bool any_nonfinite(const T* x, int64_t n) {
  for (int64_t begin = 0; begin < n; begin += part) {
    const int64_t end = light::min(n, begin + part);
    Bits bad = 0;
    for (int64_t i = begin; i < end; i++) {
      Bits bits;
      std::memcpy(&bits, x + i, sizeof bits);
      bad |= (bits & mask) == mask;
    }
    if (bad) return true;
  }
  return false;
}

static bool is_set(const int32_t* flag, int64_t code) { return (*flag & code) == code; }

extern "C" void nonfinite_flag_tensor(int32_t* flag, const T* x, int64_t n, int64_t code) {
  if (!is_set(flag, code) && any_nonfinite(x, n)) *flag |= int32_t(code);
}

extern "C" void nonfinite_flag(int32_t* flag, T* const* data, const long* numel, long count, int64_t code) {
  for (long i = 0; i < count && !is_set(flag, code); i++)
    if (any_nonfinite(data[i], numel[i])) *flag |= int32_t(code);
}
