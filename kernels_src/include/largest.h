// The k first elements of a row in the order of ranked.h, on the CPU.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "ranked.h"
#include "rows.h"

namespace jitkern {

// The same order for double, whose keys have 128 bits.
using WideKey = unsigned __int128;
static inline uint64_t rank_of(double v) {
  if (v != v) return 0;
  uint64_t bits = 0;
  if (v != 0) std::memcpy(&bits, &v, 8);
  return bits >> 63 ? bits : bits ^ 0x7fffffffffffffffull;
}
static inline double value_of(uint64_t rank) {
  const uint64_t bits = rank >> 63 ? rank : rank ^ 0x7fffffffffffffffull;
  double v;
  std::memcpy(&v, &bits, 8);
  return v;
}
static inline WideKey key_of(uint64_t rank, unsigned column) { return WideKey(rank) << 32 | column; }
static inline uint64_t rank_in(WideKey key) { return uint64_t(key >> 32); }
static inline unsigned column_in(WideKey key) { return unsigned(key); }

template <typename A> using key_type = decltype(key_of(rank_of(A()), 0u));

// Integers in the order of the numbers with these bits, or vectors of them; NaN is last, and -0 just before 0.
template <typename T, typename B> static B sortable(B bits) {
  constexpr auto most = std::numeric_limits<Bits<T>>::max();
  constexpr int exponent = std::is_same_v<T, float16> ? 5 : std::is_same_v<T, double> ? 11 : 8;
  constexpr Bits<T> infinity = most - (Bits<T>(1) << (8 * sizeof(T) - 1 - exponent)) + 1;
  const B all = B{} + most;
  const B order = bits < 0 ? bits ^ all : bits;
  return (bits & all) > infinity ? all : order;
}

template <typename T> static Bits<T> at(const T *x) {
  Bits<T> bits;
  std::memcpy(&bits, x, sizeof bits);
  return sortable<T>(bits);
}
template <typename B> static B with_both_zeros(B bound) { return bound == 0 ? -1 : bound; }

// The search of one row; its memory serves the next ones.
template <typename T> struct Largest {
  using Key = key_type<accumulator<T>>;
  std::vector<Key> keys;

  // Put the keys of the k first of n elements into `keys`, in order. 1 <= k <= n.
  void find(const T *x, int64_t n, int64_t k) {
    keys.clear();
    if (n >= 64 * 4 * k)
      push_by_maxima<64>(x, n, k);
    else if (n >= 16 * 2 * k && k > 1)
      push_by_maxima<16>(x, n, k);
    else
      push_by_bits(x, n, k);
    if (int64_t(keys.size()) > few) {
      std::nth_element(keys.begin(), keys.begin() + (k - 1), keys.end());
      keys.resize(k);
    }
    sort();
    keys.resize(k);
  }

  // Sort the keys. The place of one of a few is the number of keys before it: no branch to predict.
  void sort() {
    const int64_t n = keys.size();
    if (n > few) return std::sort(keys.begin(), keys.end());
    constexpr int block = 32;
    Key unsorted[few];
    std::copy(keys.begin(), keys.end(), unsorted);
    std::fill(unsorted + n, unsorted + (n + block - 1) / block * block, ~Key(0));
    for (int64_t begin = 0; begin < n; begin += block) {
      Key own[block], places[block] = {};
      std::copy(unsorted + begin, unsorted + begin + block, own);
      for (int64_t j = 0; j < n; j++)
        for (int i = 0; i < block; i++) places[i] += unsorted[j] < own[i];
      for (int i = 0; i < block && begin + i < n; i++) keys[int64_t(places[i])] = own[i];
    }
  }

 private:
  static constexpr int64_t few = sizeof(Key) == 8 ? 4 * vector_bytes : 32;
  std::vector<Bits<T>> maxima, sorted, orders;
  std::vector<unsigned> columns;
  std::vector<accumulator<T>> values;
  typedef Bits<T> Lanes __attribute__((vector_size(16 * sizeof(T))));

  static Lanes lanes_at(const T *x) {
    Lanes bits;
    std::memcpy(&bits, x, sizeof bits);
    return sortable<T>(bits);
  }
  void push_from(const T *x, int64_t begin, int64_t end, Bits<T> bound) {
    for (int64_t i = begin; i < end; i++)
      if (at(x + i) >= bound) keys.push_back(key_of(rank_of(accumulator<T>(x[i])), unsigned(i)));
  }

  // The k-th largest maximum of parts of the row is no larger than the k-th largest element.
  template <int PART> void push_by_maxima(const T *x, int64_t n, int64_t k) {
    const int64_t parts = n / PART;
    maxima.resize(parts);
    for (int64_t p = 0; p < parts; p++) {
      Lanes most = lanes_at(x + p * PART);
      for (int i = 16; i < PART; i += 16) {
        const Lanes next = lanes_at(x + p * PART + i);
        most = next > most ? next : most;
      }
      Bits<T> largest = most[0];
      for (int i = 1; i < 16; i++) largest = most[i] > largest ? most[i] : largest;
      maxima[p] = largest;
    }
    sorted = maxima;
    std::nth_element(sorted.begin(), sorted.begin() + (k - 1), sorted.end(), [](auto a, auto b) { return a > b; });
    const Bits<T> bound = with_both_zeros(sorted[k - 1]);
    for (int64_t p = 0; p < parts; p++)
      if (maxima[p] >= bound) push_from(x, p * PART, (p + 1) * PART, bound);
    push_from(x, parts * PART, n, bound);
  }

  // The bits of a bound, one after the other, that at least k elements reach, until few more than k do.
  void push_by_bits(const T *x, int64_t n, int64_t k) {
    using Unsigned = std::make_unsigned_t<Bits<T>>;
    orders.resize(n), columns.resize(n), values.resize(n);
    widen(values.data(), x, n);
    for (int64_t i = 0; i < n; i++) orders[i] = at(x + i);
    Bits<T> bound = std::numeric_limits<Bits<T>>::min();
    int64_t found = n;
    if (k == 1) {
      for (int64_t i = 0; i < n; i++) bound = std::max(bound, orders[i]);
      found = 1;
    }
    for (int bit = 8 * sizeof(T) - 1; bit >= 0 && found > k + 16; bit--) {
      const Bits<T> higher = Unsigned(Unsigned(bound) + (Unsigned(1) << bit));
      const int64_t reached = count(higher);
      if (reached >= k) bound = higher, found = reached;
    }
    bound = with_both_zeros(bound);
    int64_t m = 0;
    for (int64_t i = 0; i < n; i++) columns[m] = unsigned(i), m += orders[i] >= bound;
    keys.resize(m);
    for (int64_t i = 0; i < m; i++) keys[i] = key_of(rank_of(values[columns[i]]), columns[i]);
  }
  int64_t count(Bits<T> bound) const {
    int64_t all = 0;
    for (size_t begin = 0; begin < orders.size(); begin += 16384) {
      const size_t end = std::min(orders.size(), begin + 16384);
      Bits<T> reached = 0;
      for (size_t i = begin; i < end; i++) reached += orders[i] >= bound;
      all += reached;
    }
    return all;
  }
};

}  // namespace jitkern
