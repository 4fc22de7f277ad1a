// Private. What kernels take from <type_traits>, which NVRTC 12 does not have.
#pragma once

namespace jitkern {

template <typename A, typename B> constexpr bool is_same = false;
template <typename A> constexpr bool is_same<A, A> = true;

template <bool FIRST, typename A, typename B> struct Either { using type = A; };
template <typename A, typename B> struct Either<false, A, B> { using type = B; };
template <bool FIRST, typename A, typename B> using either = typename Either<FIRST, A, B>::type;

}  // namespace jitkern
