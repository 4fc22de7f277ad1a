// The k largest elements of each row, in the order of ranked.h.
#include "largest.h"

template <typename T> void topk(T *values, int64_t *indices, const T *x, int64_t rows, int64_t columns, int64_t k) {
  for_rows(rows, columns, [=](int64_t r) {
    static thread_local jitkern::Largest<T> largest;
    const T *const row = x + r * columns;
    if (k) largest.find(row, columns, k);
    for (int64_t i = r * k; i < (r + 1) * k; i++) {
      const int64_t column = jitkern::column_in(largest.keys[i - r * k]);
      indices[i] = column, values[i] = row[column];
    }
  });
}
