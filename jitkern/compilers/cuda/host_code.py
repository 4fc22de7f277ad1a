"""A `.cu` file for NVRTC without its host half: no `main`, no stdio, no `cudaMalloc`.

In the file and its own headers, code that only the host runs is blanked. Headers for the host are
empty, or hold the few names that kernels use: `INT_MAX`, `int64_t`, `M_PI`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from jitkern.named_tuple import NamedTuple
from jitkern.source import cpp_text, includes
from jitkern.source.closure import Closure
from jitkern.source.kinds import Source

_MARKS = {"__global__", "__device__", "__constant__", "__managed__", "__shared__"}
_CONSTANT = {"constexpr", "consteval"}
_TYPES = {"asm", "concept", "namespace", "static_assert", "typedef", "using"}
_KEPT = _TYPES | {"const"}
# Macros of libraries: CUTLASS_HOST_MARKS, C10_MARKS, MY_GLOBAL.
_MACRO = r"[A-Z][A-Z0-9_]*(?:DEVICE|GLOBAL|KERNEL|HOSTDEV)[A-Z0-9_]*"
_HOST_TYPE = (
    r"\b(?:(?:cublas|cudnn|cusolver|cusparse|nccl|pthread_)\w+|cufftHandle|FILE|pid_t|time_t)\b"
    r"|\b(?:at|c10|py|pybind11|std|thrust|torch)\s*::\s*(?!(?:size_t|ptrdiff_t|nullptr_t|u?int\d+_t)\b)\w"
)
_ATTRIBUTE = r"\b__\w+__\s*(?:\((?:[^()]|\([^()]*\))*\))?"
_IMPLIED = "jitkern/implied.h"
_Edit = tuple[int, int, str]  # begin and end of the text to blank, and the text to put before it

# ------------------------------------------------------------------ stand-ins for headers

_C = """
assert ctype errno fenv float inttypes limits locale math setjmp signal stdarg stddef stdint stdio
stdlib string time wchar"""
_CPP = """
algorithm any array atomic bitset charconv chrono complex condition_variable deque exception
filesystem forward_list fstream functional future initializer_list iomanip ios iosfwd iostream
istream iterator limits list locale map memory mutex new numeric optional ostream queue random ratio
regex set shared_mutex sstream stack stdexcept streambuf string string_view system_error thread
tuple type_traits typeindex typeinfo unordered_map unordered_set utility valarray variant vector"""
_SYSTEM = """
bits/stdc++.h dirent.h dlfcn.h err.h execinfo.h fcntl.h getopt.h glob.h libgen.h malloc.h memory.h
mpi.h netdb.h omp.h poll.h pthread.h pwd.h sched.h semaphore.h stdbool.h strings.h termios.h
unistd.h windows.h Windows.h"""
_CUDA = """
cuda.h cuda_profiler_api.h cuda_runtime.h cuda_runtime_api.h curand.h device_functions.h
device_launch_parameters.h exception.h helper_cuda.h helper_functions.h helper_image.h
helper_string.h helper_timer.h nccl.h"""
# Libraries that only host code uses.
_LIBRARIES = (
    r"(?:arpa|ATen|boost|c10|EGL|GL|GLES\d?|GLFW|linux|net|netinet|nvtx3|opencv2?|pybind11|sys|thrust"
    r"|torch|vulkan|X11)/.+|Python\.h"
    r"|(?:cublas|cudnn|cufft|cusolver|cusparse|cudaGL|cuda_gl_|nvToolsExt|nvml|npp|nvjpeg)\w*\.h"
)
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
INT64 = "JITKERN_INT64"  # a macro: `long` or `long long`
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


def implied() -> str:
    """The headers that nvcc includes into every file, as far as kernels use them."""
    names = ("stddef.h", "stdint.h", "limits.h", "math.h", "sys/types.h")
    return "".join(map(stand_in, names))


def is_implied(identifier: str) -> bool:
    """Whether a name comes from the headers that nvcc includes into every file."""
    return re.search(rf"\b{re.escape(identifier)}\b", implied()) is not None


def is_host(name: str) -> bool:
    """Whether a header, as `#include` names it, is for host code only."""
    return name in NAMES or re.fullmatch(_LIBRARIES, name) is not None


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
    if name.startswith("cublas"):
        text += "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
    elif name.startswith("cufft"):
        text += "typedef float2 cufftComplex; typedef double2 cufftDoubleComplex;\n"
        text += "typedef float cufftReal; typedef double cufftDoubleReal;\n"
    return f"#ifndef {guard}\n#define {guard}\n{text}#endif\n"


# ------------------------------------------------------------------ the text without host code


class DeviceHalf(NamedTuple):
    """The input of NVRTC: the file, and headers by the names that `#include` has.

    int64: the type of int64_t: `long` as on Linux, or `long long` as in libcu++ under NVRTC.
    """

    text: str
    headers: dict[str, str]
    device_macros: frozenset[str] = frozenset()
    declaring_macros: frozenset[str] = frozenset()
    int64: str = "long"

    @property
    def options(self) -> list[str]:
        """Options that include the implied headers; NVRTC crashed on a `#line` after `#include`."""
        implied = [f"-D{INT64}={self.int64}", f"--pre-include={_IMPLIED}"]
        return implied if self.headers else []

    def without(self, lines: set[int]) -> DeviceHalf:
        """A copy without the host declarations at these lines.

        These are host code without a mark: virtual methods, a `const` that is computed when the
        program starts.
        """
        shown, declared = cpp_text.declared_in(self.text, self.declaring_macros)
        edits = [
            (d.begin, d.end, "")
            for d in declared
            if d.rest == d.begin
            and not _is_marked(shown[d.begin : d.end], _MARKS | self.device_macros)
            if not lines.isdisjoint(_lines(shown, d))
        ]
        return self._replace(text=_edited(self.text, shown, edits))

    def lost(self, less: DeviceHalf) -> set[str]:
        """The words of the lines that `less` no longer has."""
        rows = zip(self.text.splitlines(), less.text.splitlines())
        return {word for row, new in rows if row != new for word in re.findall(r"\w+", row)}


def device_half(source: Source, closure: Closure) -> DeviceHalf:
    """The source's first file without its host half, with the headers that nvcc would include."""
    path = source.paths[0]
    own = {p: cpp_text.read(p) for p in closure.paths}
    own[path.resolve()] = text = cpp_text.read(path)
    macros = device_macros_in(own.values())
    declaring = cpp_text.declaring_macros(own.values())
    blanked = without_host_half(text, macros, declaring)
    headers = _headers(path.resolve(), own, macros, declaring)
    headers[_IMPLIED] = implied()
    return DeviceHalf(blanked, headers, frozenset(macros), frozenset(declaring))


def _headers(
    unit: Path, own: dict[Path, str], macros: set[str], declaring: set[str]
) -> dict[str, str]:
    included = {name for text in own.values() for name in includes.headers_in(text)}
    host = NAMES | set(filter(is_host, included))
    headers = {name: stand_in(name) for name in host}
    for name in included:
        tail = Path(re.sub(r"^(\.\.?/)+", "", name)).parts
        matches = [path for path in own if path != unit and path.parts[-len(tail) :] == tail]
        if len(matches) == 1:
            blanked = without_host_half(own[matches[0]], macros, declaring)
            headers.pop(name, None)
            if blanked.encode(errors="surrogateescape") != matches[0].read_bytes():
                headers[name] = blanked
    return headers


def without_host_half(
    text: str, device_macros: Iterable[str] = (), declaring_macros: Iterable[str] = ()
) -> str:
    """The text with code that only a host can run or read blanked out; lines keep their numbers.

    Blanked are host functions, methods, variables, and classes with members of `std`; `constexpr`
    functions become the device's too. device_macros: names of macros that stand for `__device__`
    and the like (see `device_macros_in`). declaring_macros: see `cpp_text.code_of`.
    """
    marks = _MARKS.union(device_macros)
    shown = cpp_text.code_of(text, declaring_macros)
    try:
        declared = list(cpp_text.declarations(shown, 0, len(shown)))
        edits = [edit for d in declared for edit in _edits(shown, d, marks)]
    except cpp_text.Unbalanced:
        return text
    half = _edited(text, shown, edits)
    return re.sub(cpp_text.DEFINE, lambda define: _without_host_macro(define, marks), half)


def _without_host_macro(define: re.Match[str], marks: set[str]) -> str:
    """A `#define` without host code, if its text defines both kernels and host functions."""
    whole, body = define.group(), define.group(2)
    if not body.rstrip().endswith(("}", ";")) or "__global__" not in re.findall(r"\w+", body):
        return whole
    half = without_host_half(re.sub(r"\\(?=\r?\n)", " ", body), marks)
    rows = zip(body.splitlines(), half.splitlines())
    lines = (new[: len(row) - 1] + "\\" if row.endswith("\\") else new for row, new in rows)
    return whole[: define.start(2) - define.start()] + "\n".join(lines)


def _edited(text: str, shown: str, edits: list[_Edit]) -> str:
    for begin, end, new in reversed(edits):
        text = text[:begin] + new + _blank(text[begin:end], shown[begin:end]) + text[end:]
    return text


def _lines(shown: str, declaration: cpp_text.CppDeclaration) -> range:
    first = shown.count("\n", 0, declaration.begin) + 1
    return range(first, first + shown.count("\n", declaration.begin, declaration.end) + 1)


def _is_marked(code: str, marks: set[str]) -> bool:
    """Whether a word of the code marks it as device code."""
    words = set(re.findall(r"\w+", code))
    return bool(words & marks) or any(re.fullmatch(_MACRO, word) for word in words)


def device_macros_in(texts: Iterable[str]) -> set[str]:
    """The names of macros whose text marks device code."""
    return cpp_text.macros_for(_MARKS, texts)


def _blank(text: str, shown: str) -> str:
    """Blank code; preprocessor lines inside stay, so that `#if` and `#endif` still match."""
    rows, continued = [], False
    for row, code in zip(text.splitlines(keepends=True), shown.splitlines(keepends=True)):
        stays = continued or (row.lstrip().startswith("#") and not code.strip())
        continued = stays and row.rstrip("\r\n").endswith("\\")
        rows.append(row if stays else cpp_text.blanks(row))
    return "".join(rows)


def _edits(shown: str, declaration: cpp_text.CppDeclaration, marks: set[str]) -> Iterator[_Edit]:
    """The edits that remove a declaration's host code; none for device code."""
    begin, rest, at, body, end, *_ = declaration
    head = shown[begin:at]
    if _is_marked(head, marks):
        return
    words = set(re.findall(r"\w+", head))
    if declaration.function:
        if words & _CONSTANT:  # nvcc lets a kernel use the function in constants
            yield rest, rest, "__host__ __device__ "
        else:
            yield begin, end, ""
    elif body and re.match(cpp_text.CLASS, shown[rest:at]):
        yield from _edits_of_class(shown, declaration, marks)
    elif "template" in words:
        if rest == begin:
            yield begin, end, ""  # an explicit instantiation
    elif not words & _CONSTANT and _is_host_variable(head, words, shown[begin:end]):
        yield begin, end, ""


def _is_host_variable(head: str, words: set[str], whole: str) -> bool:
    if re.search(_HOST_TYPE, whole):
        return True
    pointer = re.search(r"\*\s*(?!const\b)\w", head)  # `const char* x` is not a constant
    return not words & _KEPT or ("const" in words and not words & _TYPES and pointer is not None)


def _edits_of_class(
    shown: str, declaration: cpp_text.CppDeclaration, marks: set[str]
) -> Iterator[_Edit]:
    """The edits that blank host methods, or the class if it has a host or a virtual member."""
    assert declaration.body
    first, last = declaration.body
    edits: list[_Edit] = []
    for member in cpp_text.declarations(shown, first + 1, last):
        own = list(_edits(shown, member, marks)) if member.function or member.body else []
        virtual = own and "virtual" in shown[member.begin : member.head].split()
        stored = not member.function and not member.body
        if virtual or (stored and re.search(_HOST_TYPE, shown[member.begin : member.end])):
            yield declaration.begin, declaration.end, ""
            return
        edits += own
    variable = re.sub(_ATTRIBUTE, "", shown[last + 1 : declaration.end - 1]).strip()
    kind, *name = re.sub(_ATTRIBUTE, "", shown[declaration.rest : declaration.head]).split()
    if not variable or kind == "typedef":
        yield from edits
    elif name or kind == "enum":
        yield from edits
        yield last + 1, declaration.end - 1, ""
    else:
        yield declaration.begin, declaration.end, ""  # a struct without a name, for that variable
