// Private. The order of top-k and of sampling, that of their references: descending values, the smaller
// column first among equals; NaN before infinity, and -0 equal to 0.
#pragma once
#define ON_GPU __device__ __forceinline__
namespace jitkern {
ON_GPU unsigned bits_of(float v) { return __float_as_uint(v); }
ON_GPU float float_of(unsigned bits) { return __uint_as_float(bits); }

// Of two values, the larger one has the smaller rank; every NaN has one rank. The bits that a
// 16-bit type leaves 0 are 1 in the ranks of positive numbers.
ON_GPU unsigned rank_of(float v) {
  if (v != v) return 0xffffu;
  const unsigned bits = v == 0 ? 0 : bits_of(v);
  return bits >> 31 ? bits : bits ^ 0x7fffffffu;
}
ON_GPU float value_of(unsigned rank) { return float_of(rank >> 31 ? rank : rank ^ 0x7fffffffu); }

// An element of a row: less is earlier in the order.
using Key = unsigned long long;
ON_GPU Key key_of(unsigned rank, unsigned column) { return Key(rank) << 32 | column; }
ON_GPU unsigned rank_in(Key key) { return unsigned(key >> 32); }
ON_GPU unsigned column_in(Key key) { return unsigned(key); }

}  // namespace jitkern
