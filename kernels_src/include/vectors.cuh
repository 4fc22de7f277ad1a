// Vectors of up to 16 bytes that a thread reads and writes at once, and the type that kernels compute in.
#pragma once

namespace jitkern {

// float, or double for double.
template <typename T> struct Widened { using type = float; };
template <> struct Widened<double> { using type = double; };
template <typename T> using widened = typename Widened<T>::type;

template <typename T, int V> struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Vector { T at[V]; };

template <int V, typename T> __device__ __forceinline__ Vector<T, V> load(const T* from) {
  return *reinterpret_cast<const Vector<T, V>*>(from);
}
template <int V, typename T> __device__ __forceinline__ void store(T* to, const Vector<T, V>& value) {
  *reinterpret_cast<Vector<T, V>*>(to) = value;
}

}  // namespace jitkern
