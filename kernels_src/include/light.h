// What kernels for the CPU use of <algorithm>, <cmath> and <memory>: those take longer to compile than a kernel does.
// No name here is one that a launch may define as a macro, such as T.
#pragma once
#include <cstdint>

namespace light {

template <typename Number> constexpr Number min(Number a, Number b) { return b < a ? b : a; }
template <typename Number> constexpr Number max(Number a, Number b) { return a < b ? b : a; }

template <typename Number> inline void fill(Number* first, const Number* end, Number value) {
  for (; first != end; first++) *first = value;
}

// The functions of the C library, for float and double.
#define LIGHT_FUNCTION(name) \
  inline float name(float x) { return __builtin_##name##f(x); } \
  inline double name(double x) { return __builtin_##name(x); }
LIGHT_FUNCTION(erfc)
LIGHT_FUNCTION(fabs)
LIGHT_FUNCTION(log)
LIGHT_FUNCTION(nearbyint)
LIGHT_FUNCTION(sqrt)
LIGHT_FUNCTION(tanh)
#undef LIGHT_FUNCTION

// An array of `count` numbers that are not set, freed with its owner; it only grows.
template <typename Number> class Array {
 public:
  Array() = default;
  explicit Array(int64_t count) { reserve(count); }
  Array(Array&& other) : begin(other.begin), size(other.size) { other.begin = nullptr; }
  ~Array() { delete[] begin; }

  void reserve(int64_t count) {
    if (count <= size) return;
    delete[] begin;
    begin = nullptr, size = 0;  // if there is not enough memory
    begin = new Number[count], size = count;
  }
  Number* get() const { return begin; }
  Number& operator[](int64_t i) const { return begin[i]; }

 private:
  Number* begin = nullptr;
  int64_t size = 0;
};

}  // namespace light
