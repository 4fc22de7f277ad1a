// One token of each row of logits, or the row without what is dropped. The rule is in rule.h.
#include "largest.h"
#include "rule.h"

using namespace jitkern;

static constexpr int octave = 32;                  // bins for a factor of two

struct Filters {
  float temperature;
  int64_t top_k;
  float top_p;
  const float *by_row_temperature;  // null, or a number for each row in place of the one for all
  const int64_t *by_row_top_k;
  const float *by_row_top_p;
};

// The search of one row; its memory serves the next rows of the thread.
template <typename T> struct Search {
  Largest<T> largest;
  std::vector<Key> &keys = largest.keys;
  std::vector<float> value, exponent, power;
  uint64_t bins[octave * int(-LEAST) + 1];
  Scale scale;

  uint64_t weight(Key key) const {
    return weight_of(exponent_of(value_of(rank_in(key)), scale));
  }
  // The first of the keys with which the sum, `upto` before them, reaches what is needed.
  Key reach(uint64_t &upto, uint64_t need) const {
    for (size_t i = 0;; i++)
      if ((upto += weight(keys[i])) >= need || i + 1 == keys.size()) return keys[i];
  }
  // Sum the weights by exponent; return the sum of all.
  uint64_t fill() {
    const int64_t n = value.size();
    const Scale s = scale;  // what loops write cannot be this
    exponent.resize(n), power.resize(n);
    for (int64_t i = 0; i < n; i++) {
      const float t = exponent_of(value[i], s);
      exponent[i] = t >= LEAST ? t : 1;
      power[i] = power_of(exponent[i]);
    }
    uint64_t all = 0;
    std::fill(std::begin(bins), std::end(bins), 0);
    for (int64_t i = 0; i < n; i++)
      if (exponent[i] <= 0) {
        const uint64_t w = uint64_t(int64_t(power[i]));
        bins[int(exponent[i] * -octave)] += w, all += w;
      }
    return all;
  }
  // The same as `reach` among all elements.
  Key reach_among_all(uint64_t &upto, uint64_t need) {
    int bin = 0;
    for (upto = 0; upto + bins[bin] < need; bin++) upto += bins[bin];
    keys.clear();
    for (size_t i = 0; i < value.size(); i++)
      if (exponent[i] <= 0 && int(exponent[i] * -octave) == bin)
        keys.push_back(key_of(rank_of(value[i]), unsigned(i)));
    std::sort(keys.begin(), keys.end());
    return reach(upto, need);
  }

  // The last element that is kept, or the one that is drawn.
  Key last(const T *logits, int64_t columns, const Filters &f, int64_t row, const uint64_t *random) {
    const float temperature = f.by_row_temperature ? f.by_row_temperature[row] : f.temperature;
    const float top_p = f.by_row_top_p ? f.by_row_top_p[row] : f.top_p;
    int64_t top_k = f.by_row_top_k ? f.by_row_top_k[row] : f.top_k;
    if (!(temperature > 0)) top_k = 1;
    if (top_k <= 0 || top_k > columns) top_k = columns;
    if (!random && top_k == columns && !drops(top_p)) return ~Key(0);

    const bool few = top_k < columns;
    unsigned best = ~0u;
    if (few) {
      largest.find(logits, columns, top_k);
      best = rank_in(keys[0]);
    } else {
      value.resize(columns);
      widen(value.data(), logits, columns);
      for (int64_t i = 0; i < columns; i++) best = std::min(best, rank_of(value[i]));
    }
    scale = scale_of(best, temperature);
    uint64_t upto = 0;
    if (few)
      for (Key key : keys) upto += weight(key);
    else
      upto = fill();
    Key end = few ? keys.back() : ~Key(0);
    const auto find = [&](uint64_t need) {
      upto = 0;
      return few ? reach(upto, need) : reach_among_all(upto, need);
    };
    if (drops(top_p)) end = find(needed(top_p, upto));
    if (random) end = find(high_product(*random, upto) + 1);
    return end;
  }
};

template <typename T>
void sample(int64_t *out, const T *logits, int64_t rows, int64_t stride, int64_t columns,
                       float temperature, int64_t top_k, float top_p, const float *by_row_temperature,
                       const int64_t *by_row_top_k, const float *by_row_top_p, const int64_t *seed, int64_t seeds,
                       const int64_t *offset, int64_t offsets) {
  const Filters filters{temperature, top_k, top_p, by_row_temperature, by_row_top_k, by_row_top_p};
  for_rows(rows, columns, [=](int64_t r) {
    static thread_local Search<T> search;
    // A seed for each row is a stream for each row.
    const uint64_t random =
        random_bits(seed[seeds > 1 ? r : 0], offset[offsets > 1 ? r : 0], seeds > 1 ? 0 : r);
    out[r] = column_in(search.last(logits + r * stride, columns, filters, r, &random));
  });
}

template <typename T>
void sample_filter(T *out, const T *logits, int64_t rows, int64_t stride, int64_t columns,
                              float temperature, int64_t top_k, float top_p, const float *by_row_temperature,
                              const int64_t *by_row_top_k, const float *by_row_top_p) {
  const Filters filters{temperature, top_k, top_p, by_row_temperature, by_row_top_k, by_row_top_p};
  for_rows(rows, columns, [=](int64_t r) {
    static thread_local Search<T> search;
    const T *const x = logits + r * stride;
    const Key last = search.last(x, columns, filters, r, nullptr);
    T *const to = out + r * columns;
    const int64_t column = column_in(last);
    if (column >= columns) {
      std::copy(x, x + columns, to);
      return;
    }
    // As integers, which compilers vectorize. Of equals, those up to the last column are kept.
    const T dropped(-std::numeric_limits<float>::infinity());
    const Bits<T> bound = at(x + column) == -1 ? 0 : at(x + column);
    const auto copy = [=](int64_t begin, int64_t end, auto is_kept) {
      Bits<T> none;
      std::memcpy(&none, &dropped, sizeof none);
      for (int64_t i = begin; i < end; i++) {
        Bits<T> bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits = is_kept(sortable<T>(bits)) ? bits : none;
        std::memcpy(to + i, &bits, sizeof bits);
      }
    };
    copy(0, column + 1, [=](Bits<T> order) { return order >= with_both_zeros(bound); });
    copy(column + 1, columns, [=](Bits<T> order) { return order > bound; });
  });
}
