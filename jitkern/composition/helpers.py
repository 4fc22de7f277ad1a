"""Functions in C++ that texts of the table use: those whose names end in an underscore."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ANY = """
template <typename T> DEVICE T load_(const T& x) { return x; }
DEVICE bool load_(const bool& x) { return *(const unsigned char*)&x != 0; }  // other bytes than 1
template <typename T> DEVICE T wrap_(T x) { return x; }
DEVICE unsigned wrap_(signed char x) { return x; }  // an overflow of unsigned integers is defined
DEVICE unsigned wrap_(unsigned char x) { return x; }
DEVICE unsigned wrap_(short x) { return x; }
DEVICE unsigned wrap_(unsigned short x) { return x; }
DEVICE unsigned wrap_(int x) { return x; }
DEVICE unsigned long wrap_(long x) { return x; }
DEVICE unsigned long long wrap_(long long x) { return x; }
template <typename T> DEVICE T held_(T x) { return x; }
DEVICE unsigned held_(unsigned x) {  // for ptxas, neg.s16 and abs.s16 do not wrap around
#ifdef __CUDACC__
  asm("" : "+r"(x));
#endif
  return x;
}
template <typename T> DEVICE T abs_(T x) { return x < T(0) ? T(held_(-wrap_(x))) : x; }
DEVICE float abs_(float x) { return fabsf(x); }
DEVICE double abs_(double x) { return fabs(x); }
template <typename T> DEVICE T floor_(T x) { return x; }
DEVICE float floor_(float x) { return floorf(x); }
DEVICE double floor_(double x) { return floor(x); }
template <typename T> DEVICE T ceil_(T x) { return x; }
DEVICE float ceil_(float x) { return ceilf(x); }
DEVICE double ceil_(double x) { return ceil(x); }
template <typename T> DEVICE T trunc_(T x) { return x; }
DEVICE float trunc_(float x) { return truncf(x); }
DEVICE double trunc_(double x) { return trunc(x); }
template <typename T> DEVICE T round_(T x) { return x; }  // half to even
DEVICE float round_(float x) { return rintf(x); }
DEVICE double round_(double x) { return rint(x); }
template <typename T> DEVICE T clamp_(T x, T low, T high) {  // a NaN among them is the result
  const T raised = x != x || x > low ? x : low;
  return raised != raised || raised < high ? raised : high;
}
template <typename T> DEVICE T not_(T x) { return T(~x); }
DEVICE bool not_(bool x) { return !x; }
template <typename T> DEVICE bool signbit_(T x) { return x < T(0); }
DEVICE bool signbit_(float x) { return copysignf(1.f, x) < 0; }
DEVICE bool signbit_(double x) { return copysign(1., x) < 0; }
template <typename T> DEVICE T pow_(T x, T y) {  // of integers
  T result = 1;
  if (y < T(0)) return x == T(1) ? T(1) : x == T(-1) ? T(y % 2 ? -1 : 1) : T(0);
  for (; y > T(0); y = T(y / 2), x = T(held_(wrap_(x) * wrap_(x))))
    if (y % 2) result = T(held_(wrap_(result) * wrap_(x)));
  return result;
}
DEVICE float pow_(float x, float y) { return powf(x, y); }
DEVICE double pow_(double x, double y) { return pow(x, y); }
template <typename T> DEVICE T fmod_(T x, T y) {
  return y == T(0) || (y < T(0) && y == T(-1)) ? T(0) : T(x % y);
}
DEVICE float fmod_(float x, float y) { return fmodf(x, y); }
DEVICE double fmod_(double x, double y) { return fmod(x, y); }
template <typename T> DEVICE T remainder_(T x, T y) {  // the sign of the divisor, as in Python
  const T r = fmod_(x, y);
  return r != T(0) && (r < T(0)) != (y < T(0)) ? T(r + y) : r;
}
template <typename T> DEVICE T floor_divided_(T x, T y) {
  if (y == 0) return x / y;
  const T r = fmod_(x, y);
  T q = (x - r) / y;
  if (r != 0 && (y < 0) != (r < 0)) q -= 1;
  if (q == 0) return x / y * 0;
  const T whole = floor_(q);
  return q - whole > T(0.5) ? whole + 1 : whole;
}
template <typename T> DEVICE T floor_divide_(T x, T y) {  // of integers
  if (y == T(0) || (y < T(0) && y == T(-1))) return T(held_(-(y != T(0)) * wrap_(x)));
  const T q = T(x / y);
  return x % y != T(0) && (x < T(0)) != (y < T(0)) ? T(q - 1) : q;
}
DEVICE float floor_divide_(float x, float y) { return floor_divided_(x, y); }
DEVICE double floor_divide_(double x, double y) { return floor_divided_(x, y); }
template <typename T> DEVICE T softplus_(T x) {  // log(1 + exp(x)), of any x
  return (x > 0 ? x : x != x ? x : T(0)) + log1p(exp(-abs_(x)));
}
"""
_CUDA = """
template <typename T> DEVICE T to_i32_(T x) { return x; }
template <typename T> DEVICE T to_i64_(T x) { return x; }
DEVICE int to_i32_(float x) { return int(x); }
DEVICE int to_i32_(double x) { return int(x); }
DEVICE long long to_i64_(float x) { return (long long)x; }
DEVICE long long to_i64_(double x) { return (long long)x; }
// The few ulp of float that the fast functions lose vanish where a result is rounded to 16 bits.
template <bool FAST> DEVICE float exp_(float x) { return FAST ? __expf(x) : expf(x); }
template <bool FAST> DEVICE double exp_(double x) { return exp(x); }
template <bool FAST> DEVICE float sigmoid_(float x) {
  return FAST ? __fdividef(1.f, 1.f + __expf(-x)) : 1.f / (1.f + expf(-x));
}
template <bool FAST> DEVICE double sigmoid_(double x) { return 1 / (1 + exp(-x)); }
DEVICE float tanh_(float x) { return tanhf(x); }
DEVICE double tanh_(double x) { return tanh(x); }
"""
# Polynomials of float without branches, which compilers make vectors of; about 2 ulp.
_CPP = """
// What does not fit is as on x86. No zero is -0 here: g++ takes trunc(x) for (float)(int)x.
template <typename T> DEVICE int64_t to_long_(T x) {
  const T y = x > -1 && x < 1 ? 0 : x, end = T(9223372036854775808.);
  return y >= -end && y < end ? int64_t(y) : INT64_MIN;
}
template <typename T> DEVICE T to_i32_(T x) { return x; }
template <typename T> DEVICE T to_i64_(T x) { return x; }
DEVICE int to_i32_(double x) {
  const double y = x > -1 && x < 1 ? 0 : x;
  return y > -2147483649. && y < 2147483648. ? int(y) : INT32_MIN;
}
DEVICE int to_i32_(float x) {
  const float y = x > -1 && x < 1 ? 0 : x;
  return y >= -2147483648.f && y < 2147483648.f ? int(y) : INT32_MIN;
}
DEVICE int64_t to_i64_(double x) { return to_long_(x); }
DEVICE int64_t to_i64_(float x) { return to_long_(x); }
// After Cephes' expf: 2^n e^r, where |r| <= log(2) / 2; two factors, for subnormal results.
DEVICE float exp_(float x) {
  const float near = x < -104 ? -104 : x > 89 ? 89 : x, n = rintf(near * 1.44269504f);
  const float r = fmaf(n, -1.42860677e-6f, fmaf(n, -0.693145752f, near));
  float p = fmaf(1.9875691500e-4f, r, 1.3981999507e-3f);
  p = fmaf(p, r, 8.3334519073e-3f);
  p = fmaf(p, r, 4.1665795894e-2f);
  p = fmaf(p, r, 1.6666665459e-1f);
  p = fmaf(p, r, 5.0000001201e-1f);
  p = fmaf(p, r * r, r) + 1;
  const int whole = x == x ? int(n) : 0, half = whole >> 1;
  const uint32_t one = uint32_t(half + 127) << 23, other = uint32_t(whole - half + 127) << 23;
  return p * __builtin_bit_cast(float, one) * __builtin_bit_cast(float, other);
}
DEVICE double exp_(double x) { return exp(x); }
// After Cephes' logf: of x = m 2^e, where m is between sqrt(1/2) and sqrt(2).
DEVICE float log_(float x) {
  const bool small = x < 1.17549435e-38f;
  const int32_t bits = __builtin_bit_cast(int32_t, small ? x * 8388608.f : x);
  const int32_t exponent = (bits - 0x3f3504f3) >> 23;
  const float m = __builtin_bit_cast(float, int32_t(bits - (exponent << 23))) - 1, s = m * m;
  const float e = float(exponent) - (small ? 23.f : 0.f);
  float p = fmaf(7.0376836292e-2f, m, -1.1514610310e-1f);
  p = fmaf(p, m, 1.1676998740e-1f);
  p = fmaf(p, m, -1.2420140846e-1f);
  p = fmaf(p, m, 1.4249322787e-1f);
  p = fmaf(p, m, -1.6668057665e-1f);
  p = fmaf(p, m, 2.0000714765e-1f);
  p = fmaf(p, m, -2.4999993993e-1f);
  p = fmaf(p, m, 3.3333331174e-1f);
  const float y = fmaf(-0.5f, s, fmaf(e, -2.12194440e-4f, p * m * s));
  const float value = fmaf(e, 0.693359375f, m + y);
  const float infinite = __builtin_inff(), outside = x == 0 ? -infinite : x > 0 ? x : 0 * infinite;
  return x > 0 && x < infinite ? value : outside;
}
DEVICE double log_(double x) { return log(x); }
DEVICE float tanh_(float x) {  // after Cephes' tanhf
  const float t = fabsf(x), s = x * x, outer = 1 - 2 / (exp_(2 * t) + 1);
  float p = fmaf(-5.70498872745e-3f, s, 2.06390887954e-2f);
  p = fmaf(p, s, -5.37397155531e-2f);
  p = fmaf(p, s, 1.33314422036e-1f);
  p = fmaf(p, s, -3.33332819422e-1f);
  return copysignf(t < 0.625f ? fmaf(p * s, t, t) : outer, x);
}
DEVICE double tanh_(double x) { return tanh(x); }
// Minimax polynomials of N. Juffa, for small arguments and for 1 - exp(p) of large ones.
DEVICE float erf_(float x) {
  const float t = fabsf(x), s = x * x;
  float p = fmaf(-1.72853470e-5f, t, 3.83197126e-4f);
  p = fmaf(p, s, fmaf(-3.88396438e-3f, t, 2.42546219e-2f));
  p = fmaf(p, t, -1.06777877e-1f);
  p = fmaf(p, t, -6.34846687e-1f);
  p = fmaf(p, t, -1.28717512e-1f);
  const float outer = t > 4 ? 1 : 1 - exp_(fmaf(p, t, -t));
  float q = fmaf(-5.96761703e-4f, s, 4.99119423e-3f);
  q = fmaf(q, s, -2.67681349e-2f);
  q = fmaf(q, s, 1.12819925e-1f);
  q = fmaf(q, s, -3.76125336e-1f);
  q = fmaf(q, s, 1.28379166e-1f);
  return t > 0.921875f ? copysignf(outer, x) : fmaf(q, x, x);
}
DEVICE double erf_(double x) { return erf(x); }
template <typename T> DEVICE T sigmoid_(T x) { return 1 / (1 + exp_(-x)); }
"""


def helpers_for(lines: Iterable[str], language: str) -> str:
    """Return the definitions of the functions that these lines call, and those that they call."""
    known = _definitions(_ANY) | _definitions(_CUDA if language == "cuda" else _CPP)
    order, wanted, queue = list(known), set(), ["\n".join(lines)]
    for text in queue:  # it grows
        for name in re.findall(r"\b([a-z]\w*_)(?=[<(])", text):
            if name in known and name not in wanted:
                wanted.add(name)
                queue.append(known[name])
    device = "__device__ __forceinline__" if language == "cuda" else "inline"
    return "".join(known[name] for name in order if name in wanted).replace("DEVICE", device)


def _definitions(text: str) -> dict[str, str]:
    """Return the definitions of a text by the names of their functions."""
    found: dict[str, str] = {}
    for definition in re.findall(
        r"(?m)^(?://.*\n)?(?:template|DEVICE)(?:.*\{.*\}.*\n|[\s\S]*?^\}\n)", text
    ):
        name = re.search(r"(\w+_)\(", definition).group(1)  # type: ignore[union-attr]
        found[name] = found.get(name, "") + definition
    return found
