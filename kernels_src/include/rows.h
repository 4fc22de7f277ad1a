// Rows on the CPU, a row a thread: what kernels over the last dimension share. Compile with openmp=True; loops
// over 16-bit numbers vectorize best with native=True.
//
//   for_rows(rows, cols, [=](int64_t r) {
//     accumulator<T>* v = scratch<accumulator<T>>(cols);             // of this thread
//     widen(v, x + r * cols, cols);
//     const auto total = sum<accumulator<T>>(cols, [=](int64_t i, auto n) { return load<accumulator<T>>(v + i, n); });
//     …
//     narrow(out + r * cols, v, cols);
//   });
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "light.h"
#include "vectors.h"

static constexpr int64_t parallel_from = 1 << 15;  // the work below which starting threads costs more

// Call row(r) for each row, on several threads if there is enough work. work: of a row, in numbers that are read and
// written; twice that where an exponential function is computed of each.
template <typename Row> static void for_rows(int64_t rows, int64_t work, Row row) {
  if (rows == 1 || rows * work < parallel_from) {  // not an `if` clause: that costs as much as a small kernel
    for (int64_t r = 0; r < rows; r++) row(r);
    return;
  }
#pragma omp parallel for
  for (int64_t r = 0; r < rows; r++) row(r);
}

// Memory for `count` numbers that belongs to this thread until it asks again; `slot`s lie apart.
template <typename A, int slot = 0> static A* scratch(int64_t count) {
  static thread_local light::Array<A> memory;
  memory.reserve(count);
  return memory.get();
}

// to[i] = from[i], rounded to nearest even where `to` is the narrower type.
template <typename A, typename T> static void widen(A* to, const T* from, int64_t n) {
  each_vector<A>(n, [=](int64_t i, auto m) { store(to + i, load<A>(from + i, m), m); });
}
template <typename T, typename A> static void narrow(T* to, const A* from, int64_t n) {
  each_vector<A>(n, [=](int64_t i, auto m) { store(to + i, load<A>(from + i, m), m); });
}

// Call row(r, sums) for each row, which adds to sums[width], and return these sums. The rows are shared out in parts,
// whose sums are added in order: the result does not depend on the number of threads.
template <typename A, typename Row>
static light::Array<A> sums_over_rows(int64_t rows, int64_t cols, int64_t width, Row row) {
  const int64_t parts = light::min<int64_t>(64, light::max<int64_t>(1, rows / 16));
  light::Array<A> memory(parts * width);
  A* sums = memory.get();
  for_rows(parts, (rows + parts - 1) / parts * 2 * cols, [=](int64_t part) {
    A* own = sums + part * width;
    light::fill(own, own + width, A(0));
    for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; r++) row(r, own);
  });
  for (int64_t part = 1; part < parts; part++)
#pragma omp simd
    for (int64_t i = 0; i < width; i++) sums[i] += sums[part * width + i];
  return memory;
}
