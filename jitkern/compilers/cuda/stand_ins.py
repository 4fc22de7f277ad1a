"""Stand-ins for headers of C, C++ and CUDA that device code includes, for NVRTC, which has none.

They are empty, or hold the few names that kernels use: `INT_MAX`, `int64_t`, `M_PI`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from pathlib import Path

from jitkern.source import cpp_text
from jitkern.source.closure import Closure

IMPLIED = "jitkern/implied.h"

_C = """
assert ctype errno fenv float inttypes limits locale math setjmp signal stdarg stddef stdint stdio
stdlib string time wchar"""
_CPP = """
algorithm any array atomic bitset charconv chrono complex condition_variable deque exception
filesystem forward_list fstream functional future initializer_list iomanip ios iosfwd iostream
istream iterator limits list locale map memory mutex new numeric optional ostream queue random ratio
regex set shared_mutex sstream stack stdexcept streambuf string string_view system_error thread
tuple type_traits typeindex typeinfo unordered_map unordered_set utility valarray variant vector"""
_SYSTEM = "bits/stdc++.h malloc.h memory.h stdbool.h strings.h sys/types.h"
_CUDA = """
cuda.h cuda_profiler_api.h cuda_runtime.h cuda_runtime_api.h device_functions.h
device_launch_parameters.h exception.h"""
_CUB = "cub/cub.cuh"
# Includes of host functions, and the error by which CUB 3.2 refuses NVRTC.
_CUB_OF_THE_HOST = (
    r'(?m)^[ \t]*#[ \t]*(?:include[ \t]*["<](?:cub/)?(?:device/|util_allocator)'
    r"|error(?:.*\\\n)*).*$"
)
_MATH = """
abs acos asin atan atan2 ceil cos cosh exp exp2 fabs floor fma fmax fmin fmod isinf isnan log log10
log2 pow rint round sin sinh sqrt tan tanh trunc"""
NAMES = frozenset(f"{_CPP} {_SYSTEM} {_CUDA}".split()).union(
    *((f"{name}.h", f"c{name}") for name in _C.split())
)
INT64 = "JITKERN_INT64"  # a macro: `long` as on Linux, or `long long` as in libcu++ under NVRTC
_MACROS = {
    "stdint": f"""
typedef {INT64} intptr_t; typedef unsigned {INT64} uintptr_t;
#define INT8_MAX 127
#define INT16_MAX 32767
#define INT32_MAX 2147483647
#define INT64_MAX 9223372036854775807L
#define INT8_MIN (-128)
#define INT16_MIN (-32768)
#define INT32_MIN (-INT32_MAX - 1)
#define INT64_MIN (-INT64_MAX - 1)
#define UINT8_MAX 255
#define UINT16_MAX 65535
#define UINT32_MAX 4294967295U
#define UINT64_MAX 18446744073709551615UL
#define SIZE_MAX 18446744073709551615UL""",
    "sys/types": """
typedef unsigned short ushort; typedef unsigned int uint; typedef unsigned long ulong;""",
    "limits": """
#define CHAR_BIT 8
#define SCHAR_MAX 127
#define SCHAR_MIN (-128)
#define UCHAR_MAX 255
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295U
#define LONG_MAX 9223372036854775807L
#define LONG_MIN (-LONG_MAX - 1)
#define ULONG_MAX 18446744073709551615UL
#define LLONG_MAX 9223372036854775807LL
#define LLONG_MIN (-LLONG_MAX - 1)
#define ULLONG_MAX 18446744073709551615ULL""",
    "float": """
#define FLT_MAX 3.402823466e+38F
#define FLT_MIN 1.175494351e-38F
#define FLT_EPSILON 1.192092896e-07F
#define DBL_MAX 1.7976931348623157e+308
#define DBL_MIN 2.2250738585072014e-308
#define DBL_EPSILON 2.2204460492503131e-16""",
    "math": """
#define INFINITY ((float)(1e300 * 1e300))
#define HUGE_VALF INFINITY
#define HUGE_VAL (1e300 * 1e300)
#define NAN __int_as_float(0x7fc00000)
#define M_E 2.7182818284590452354
#define M_LOG2E 1.4426950408889634074
#define M_LN2 0.69314718055994530942
#define M_PI 3.14159265358979323846
#define M_PI_2 1.57079632679489661923
#define M_PI_4 0.78539816339744830962
#define M_1_PI 0.31830988618379067154
#define M_2_SQRTPI 1.12837916709551257390
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.70710678118654752440""",
}
_INTEGERS = "\n".join(
    f"typedef {sign}{kind} {u}int{bits}_t; namespace std {{ using ::{u}int{bits}_t; }}"
    for sign, u in (("signed ", ""), ("unsigned ", "u"))
    for bits, kind in ((8, "char"), (16, "short"), (32, "int"), (64, INT64))
)
_NAMES = {  # declarations that a header also puts into the namespace std
    "stddef": "using nullptr_t = decltype(nullptr);",
    "math": " ".join(f"using ::{name};" for name in _MATH.split()),
}


def of_cub(directories: Iterable[Path]) -> dict[str, str]:
    """`cub/cub.cuh` without its host functions, which NVRTC refuses; {} if there is no CUB."""
    for directory in directories:
        path = directory / _CUB
        if path.is_file():
            return {_CUB: re.sub(_CUB_OF_THE_HOST, "", cpp_text.read(path))}
    return {}


def stand_in(name: str) -> str:
    """The text that NVRTC gets as the header `name`."""
    guard = "JITKERN_" + re.sub(r"\W", "_", name)
    stem = name.removesuffix(".h") if name.endswith(".h") else name.removeprefix("c")
    text = f"namespace std {{ using ::size_t; using ::ptrdiff_t; {_NAMES.get(stem, '')} }}\n"
    if name == f"c{stem}" and stem in _C.split():
        text = f'#include "{stem}.h"\n'  # so that each name is defined once
    elif stem in ("stdint", "inttypes"):
        text += _INTEGERS + _MACROS["stdint"] + "\n"
    elif name == f"{stem}.h":
        text += _MACROS.get(stem, "") + "\n"
    return f"#ifndef {guard}\n#define {guard}\n{text}#endif\n"


def headers_for(closure: Closure) -> dict[str, str]:
    """The stand-ins for the files of `closure`, by the names that `#include` has.

    The author's own headers have none, and are given without the byte order mark, which NVRTC
    refuses.
    """
    own = {path.name: path for path in closure.paths}
    headers = {name: stand_in(name) for name in NAMES if Path(name).name not in own}
    marked = {name: path for name, path in own.items() if path.read_bytes()[:3] == codecs.BOM_UTF8}
    headers |= {name: cpp_text.read(path) for name, path in marked.items()}
    implied = ("stddef.h", "stdint.h", "limits.h", "math.h", "sys/types.h")  # by nvcc in every file
    return {**headers, IMPLIED: "".join(map(stand_in, implied))}
