"""A `.cu` file for NVRTC without its host half: no `main`, no stdio, no `cudaMalloc`.

Of the file and of its own headers what the host alone runs is blanked, and headers that are for the
host stand empty, or hold what kernels use of them: `INT_MAX`, `int64_t`, `M_PI`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from jitkern import cxx
from jitkern.closure import Closure
from jitkern.compilers import host_headers
from jitkern.kernel import Source

_INCLUDE = r'(?m)^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]'

_MARKS = {"__global__", "__device__", "__constant__", "__managed__", "__shared__"}
_CONSTANT = {"constexpr", "consteval"}
_TYPES = {"asm", "concept", "namespace", "static_assert", "typedef", "using"}
_KEPT = _TYPES | {"const"}
# Macros of libraries: CUTLASS_HOST_MARKS, C10_MARKS, MY_GLOBAL.
_MACRO = r"[A-Z][A-Z0-9_]*(?:DEVICE|GLOBAL|KERNEL|HOSTDEV)[A-Z0-9_]*"
_HOST_TYPE = (
    r"\b(?:(?:cublas|cudnn|cusolver|cusparse|nccl|pthread_)\w+|cufftHandle|FILE|pid_t|time_t)\b"
    r"|\b(?:std|thrust)\s*::\s*(?!(?:size_t|ptrdiff_t|nullptr_t|u?int\d+_t)\b)\w"
)
_Edit = tuple[int, int, str]  # blank these, and put that first


_IMPLIED = "jitkern/implied.h"


class DeviceHalf(NamedTuple):
    """What NVRTC is given: the file, and headers by the names that it includes them by."""

    text: str
    headers: dict[str, str]

    @property
    def options(self) -> list[str]:
        """Options of NVRTC: a `#line` after an `#include` has made it crash."""
        return [f"--pre-include={_IMPLIED}"] if self.headers else []


def device_half(source: Source, closure: Closure) -> DeviceHalf:
    """The source's first file without its host half, after what nvcc would include into it."""
    path = source.paths[0]
    own = {p: cxx.read(p) for p in closure.paths}
    own[path.resolve()] = text = cxx.read(path)
    macros = device_macros_in(own.values())
    blanked = without_host_half(text, macros)
    headers = _headers(path.resolve(), own, macros)
    headers[_IMPLIED] = host_headers.implied()
    return DeviceHalf(blanked, headers)


def _headers(unit: Path, own: dict[Path, str], macros: set[str]) -> dict[str, str]:
    included = {name for text in own.values() for name in re.findall(_INCLUDE, text)}
    host = host_headers.NAMES | set(filter(host_headers.is_host, included))
    headers = {name: host_headers.stand_in(name) for name in host}
    for name in included:
        tail = Path(re.sub(r"^(\.\.?/)+", "", name)).parts
        meant = [path for path in own if path != unit and path.parts[-len(tail) :] == tail]
        if len(meant) == 1:
            blanked = without_host_half(own[meant[0]], macros)
            headers.pop(name, None)
            if blanked.encode(errors="surrogateescape") != meant[0].read_bytes():
                headers[name] = blanked
    return headers


def without_host_half(text: str, device_macros: Iterable[str] = ()) -> str:
    """The text with what only a host can run or read blanked out; lines keep their numbers.

    Blanked are host functions, methods, variables, and classes with members of `std`; `constexpr`
    functions become the device's too. device_macros: names of macros that stand for `__device__`
    and the like (see `device_macros_in`).
    """
    shown = cxx.masked(text)
    marks = _MARKS.union(device_macros)
    try:
        declared = list(cxx.declarations(shown, 0, len(shown)))
        edits = [edit for d in declared for edit in _edits(shown, d, marks)]
    except cxx.Unbalanced:
        return text
    for begin, end, new in reversed(edits):
        text = text[:begin] + new + _blank(text[begin:end], shown[begin:end]) + text[end:]
    return text


def device_macros_in(texts: Iterable[str]) -> set[str]:
    """Names of macros whose text marks device code."""
    return cxx.macros_for(_MARKS, texts)


def _blank(text: str, shown: str) -> str:
    """Blanks for code; preprocessor lines inside stay, so that `#if` and `#endif` still match."""
    rows, continued = [], False
    for row, code in zip(text.splitlines(keepends=True), shown.splitlines(keepends=True)):
        stays = continued or (row.lstrip().startswith("#") and not code.strip())
        continued = stays and row.rstrip("\r\n").endswith("\\")
        rows.append(row if stays else re.sub(r"[^\r\n]", " ", row))
    return "".join(rows)


def _edits(shown: str, declaration: cxx.Declaration, marks: set[str]) -> Iterator[_Edit]:
    """What to do to a declaration: nothing where it is the device's."""
    begin, rest, at, body, end, *_ = declaration
    head = shown[begin:at]
    words = set(re.findall(r"\w+", head))
    if words & marks or any(re.fullmatch(_MACRO, word) for word in words):
        return
    if declaration.function:
        if words & _CONSTANT:  # for nvcc a kernel may use it in constants
            yield rest, rest, "__host__ __device__ "
        else:
            yield begin, end, ""
    elif body and re.match(cxx.CLASS, shown[rest:at]):
        yield from _edits_of_class(shown, declaration, marks)
    elif "template" in words:
        if rest == begin:
            yield begin, end, ""  # an explicit instantiation
    elif not words & _CONSTANT and _is_host_variable(head, words, shown[begin:end]):
        yield begin, end, ""


def _is_host_variable(head: str, words: set[str], whole: str) -> bool:
    if re.search(_HOST_TYPE, whole):
        return True
    pointer = re.search(r"\*\s*(?!const\b)\w", head)  # `const char* x` is no constant
    return not words & _KEPT or ("const" in words and not words & _TYPES and pointer is not None)


def _edits_of_class(shown: str, declaration: cxx.Declaration, marks: set[str]) -> Iterator[_Edit]:
    """Host methods go; a class with a host member, or a virtual one, goes as a whole."""
    assert declaration.body
    first, last = declaration.body
    edits: list[_Edit] = []
    for member in cxx.declarations(shown, first + 1, last):
        own = list(_edits(shown, member, marks)) if member.function or member.body else []
        virtual = own and "virtual" in shown[member.begin : member.head].split()
        stored = not member.function and not member.body
        if virtual or (stored and re.search(_HOST_TYPE, shown[member.begin : member.end])):
            edits = [(declaration.begin, declaration.end, "")]
            break
        edits += own
    yield from edits
