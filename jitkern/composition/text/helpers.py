"""Functions in C++ that texts of the table use: those whose names end in an underscore."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ANY = """
template <typename T> DEVICE T abs_(T x) { return x < T(0) ? T(-x) : x; }
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
template <typename T> DEVICE T not_(T x) { return T(~x); }
DEVICE bool not_(bool x) { return !x; }
template <typename T> DEVICE bool signbit_(T x) { return x < T(0); }
DEVICE bool signbit_(float x) { return copysignf(1.f, x) < 0; }
DEVICE bool signbit_(double x) { return copysign(1., x) < 0; }
template <typename T> DEVICE T pow_(T x, T y) {  // of integers
  T result = 1;
  if (y < T(0)) return x == T(1) ? T(1) : x == T(-1) ? T(y % 2 ? -1 : 1) : T(0);
  for (; y > T(0); y = T(y / 2), x = T(x * x))
    if (y % 2) result = T(result * x);
  return result;
}
DEVICE float pow_(float x, float y) { return powf(x, y); }
DEVICE double pow_(double x, double y) { return pow(x, y); }
template <typename T> DEVICE T fmod_(T x, T y) {
  return y == T(0) || y == T(-1) ? T(0) : T(x % y);
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
  if (q == 0) return x / y < 0 ? T(-0.) : T(0);
  const T whole = floor_(q);
  return q - whole > T(0.5) ? whole + 1 : whole;
}
template <typename T> DEVICE T floor_divide_(T x, T y) {  // of integers
  if (y == T(0) || y == T(-1)) return T(-(y != T(0)) * x);
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
_CPP = """
template <typename T> DEVICE T exp_(T x) { return exp(x); }
template <typename T> DEVICE T log_(T x) { return log(x); }
template <typename T> DEVICE T tanh_(T x) { return tanh(x); }
template <typename T> DEVICE T erf_(T x) { return erf(x); }
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
