// Vectors of float or double on the CPU, as wide as its registers, from and to arrays of any floating-point type.
//
//   each_vector<A>(cols, [&](int64_t i, auto n) {  // n: how many numbers; all lanes of a vector but at the end
//     store(out + i, load<A>(x + i, n) * scale, n);
//   });
//   const A squares = sum<A>(cols, [&](int64_t i, auto n) {
//     const Vector<A> v = load<A>(x + i, n);  // lanes beyond n are 0
//     return v * v;
//   });
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "float16.h"
#include "light.h"

// The type that a kernel computes in: float, or double for double.
template <typename T> using accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

#if defined(__AVX512F__)
static constexpr int vector_bytes = 64;
#elif defined(__AVX__)
static constexpr int vector_bytes = 32;
#else
static constexpr int vector_bytes = 16;
#endif

template <typename A> static constexpr int lanes = vector_bytes / sizeof(A);

namespace vectors_detail {
template <typename N, int count> struct Of {
  typedef N type __attribute__((vector_size(count * sizeof(N))));
};
}  // namespace vectors_detail

template <typename A> using Vector = typename vectors_detail::Of<A, lanes<A>>::type;
// As many integers as a vector of A has lanes.
template <typename N, typename A> using Integers = typename vectors_detail::Of<N, lanes<A>>::type;
// The integer of the same size.
template <typename T>
using Bits = std::conditional_t<sizeof(T) == 2, int16_t, std::conditional_t<sizeof(T) == 4, int32_t, int64_t>>;
template <typename A> using AllLanes = std::integral_constant<int, lanes<A>>;

// The numbers of a whole vector. The instructions are those that GCC 12 does not find by itself.
template <typename A, typename T> static inline Vector<A> load(const T* from) {
  Vector<A> to;
  if constexpr (std::is_same_v<A, T>) {
    std::memcpy(&to, from, sizeof to);
    return to;
  }
#ifdef __AVX2__
  if constexpr (std::is_same_v<A, float> && sizeof(T) == 2) {
    Integers<uint16_t, A> bits;
    std::memcpy(&bits, from, sizeof bits);
    if constexpr (std::is_same_v<T, float16>) {
      asm("vcvtph2ps %1, %0" : "=v"(to) : "v"(bits));
      return to;
    }
    Integers<uint32_t, A> wide;
    asm("vpmovzxwd %1, %0" : "=v"(wide) : "v"(bits));
    return (Vector<A>)(wide << 16);
  }
#endif
  A each[lanes<A>];
  for (int j = 0; j < lanes<A>; j++) each[j] = A(from[j]);
  std::memcpy(&to, each, sizeof to);
  return to;
}

// Write a whole vector, rounded to nearest even where T is the narrower type.
template <typename T, typename A> static inline void store(T* to, const Vector<A>& v) {
  if constexpr (std::is_same_v<A, T>) {
    std::memcpy(to, &v, sizeof v);
    return;
  }
#ifdef __AVX2__
  if constexpr (std::is_same_v<A, float> && sizeof(T) == 2) {
    Integers<uint16_t, A> bits;
    if constexpr (std::is_same_v<T, float16>) {
      asm("vcvtps2ph $0, %1, %0" : "=v"(bits) : "v"(v));
    } else {
      const auto u = (Integers<uint32_t, A>)v;
      const auto rounded = v != v ? Integers<uint32_t, A>{} + 0x7fc0u : (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
#ifdef __AVX512F__
      asm("vpmovdw %1, %0" : "=v"(bits) : "v"(rounded));
#else
      bits = __builtin_convertvector(rounded, Integers<uint16_t, A>);
#endif
    }
    std::memcpy(to, &bits, sizeof bits);
    return;
  }
#endif
  A each[lanes<A>];
  std::memcpy(each, &v, sizeof v);
  for (int j = 0; j < lanes<A>; j++) to[j] = T(each[j]);
}

// A pointer to what a compiler takes for a number, so that it finds masked loads and stores.
template <typename T> static inline auto* number_at(T* p) {
  if constexpr (std::is_class_v<T>)
    return &p->bits;
  else
    return p;
}

// The first n numbers, and 0 in the lanes beyond them.
template <typename A, typename T, typename N> static inline Vector<A> load(const T* from, N n) {
  if constexpr (std::is_same_v<N, AllLanes<A>>) return load<A>(from);
  T room[lanes<A>];
  for (int j = 0; j < lanes<A>; j++) number_at(room)[j] = j < n ? number_at(from)[j] : 0;
  return load<A>(room);
}

// a > b ? a : b, which is b where one of them is NaN.
template <typename V> static inline V larger(V a, const V& b) {
#ifdef __AVX512F__  // of which GCC 12 makes two instructions
  if constexpr (std::is_same_v<V, Vector<float>>) {
    asm("vmaxps %1, %0, %0" : "+v"(a) : "v"(b));
    return a;
  }
  if constexpr (std::is_same_v<V, Vector<double>>) {
    asm("vmaxpd %1, %0, %0" : "+v"(a) : "v"(b));
    return a;
  }
#endif
  return a > b ? a : b;
}

// v with `rest` in the lanes beyond the first n.
template <typename V, typename N, typename A> static inline V with_rest(const V& v, N n, A rest) {
  if constexpr (std::is_same_v<N, AllLanes<A>>) return v;
  Integers<Bits<A>, A> lane;
  for (int j = 0; j < lanes<A>; j++) lane[j] = j;
  return lane < Bits<A>(n) ? v : V{} + rest;
}

// Write the first n numbers.
template <typename T, typename V, typename N> static inline void store(T* to, const V& v, N n) {
  using A = std::decay_t<decltype(v[0])>;
  if constexpr (std::is_same_v<N, AllLanes<A>>) {
    store<T, A>(to, v);
  } else {
    T room[lanes<A>];
    store<T, A>(room, v);
    for (int j = 0; j < lanes<A>; j++)
      if (j < n) number_at(to)[j] = number_at(room)[j];
  }
}

// Call step(i, n) for the vectors that n numbers have, from i on.
template <typename A, typename Step> static inline void each_vector(int64_t numbers, Step step) {
  int64_t i = 0;
  for (; i + lanes<A> <= numbers; i += lanes<A>) step(i, AllLanes<A>());
  if (i < numbers) step(i, int(numbers - i));
}

// One number of all lanes, by halves.
template <int count, typename A, typename Merge> static inline A merged(const A* from, Merge merge) {
  if constexpr (count == 1) {
    return *from;
  } else {
    typename vectors_detail::Of<A, count / 2>::type low, high;
    std::memcpy(&low, from, sizeof low);
    std::memcpy(&high, from + count / 2, sizeof high);
    low = merge(low, high);
    return merged<count / 2>(reinterpret_cast<const A*>(&low), merge);
  }
}

// Merge the vectors term(i, n) of so many numbers, beginning with `first`; four chains, lest each waits for the one
// before.
template <typename A, typename Term, typename Merge>
static inline A reduced(int64_t begin, int64_t end, A first, Term term, Merge merge) {
  constexpr AllLanes<A> all;
  Vector<A> a = Vector<A>{} + first, b = a, c = a, d = a;
  int64_t i = begin;
  for (; i + 4 * all <= end; i += 4 * all) {
    a = merge(a, term(i, all));
    b = merge(b, term(i + all, all));
    c = merge(c, term(i + 2 * all, all));
    d = merge(d, term(i + 3 * all, all));
  }
  for (; i + all <= end; i += all) a = merge(a, term(i, all));
  if (i < end) b = merge(b, term(i, int(end - i)));
  a = merge(merge(a, b), merge(c, d));
  return merged<lanes<A>>(reinterpret_cast<const A*>(&a), merge);
}

// The sum of term(i, n): in A within a piece, in double over the pieces, so that long rows lose nothing. The order
// of additions depends on the number of numbers alone.
template <typename A, typename Term> static inline A sum(int64_t numbers, Term term) {
  constexpr int64_t piece = 4096;
  double total = 0;
  for (int64_t begin = 0; begin < numbers; begin += piece)
    total += reduced(begin, light::min(numbers, begin + piece), A(0), term, [](auto a, auto b) { return a + b; });
  return A(total);
}

// The largest of term(i, n); NaN does not count, and lanes beyond n do.
template <typename A, typename Term> static inline A largest(int64_t numbers, Term term) {
  return reduced(int64_t(0), numbers, -std::numeric_limits<A>::infinity(), term,
                 [](auto a, auto b) { return larger(b, a); });
}
