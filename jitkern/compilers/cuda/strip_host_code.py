"""A `.cu` file for NVRTC without its host half: no `main`, no stdio, no `cudaMalloc`.

In the file and its own headers, code that only the host runs is blanked. Headers for the host are
empty, or hold the few names that kernels use: `INT_MAX`, `int64_t`, `M_PI`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from jitkern.compilers.cuda import host_header_stand_ins
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
_Edit = tuple[int, int, str]  # begin and end of the text to blank, and the text to put before it


_IMPLIED = "jitkern/implied.h"


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
        implied = [f"-D{host_header_stand_ins.INT64}={self.int64}", f"--pre-include={_IMPLIED}"]
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
    headers[_IMPLIED] = host_header_stand_ins.implied()
    return DeviceHalf(blanked, headers, frozenset(macros), frozenset(declaring))


def _headers(
    unit: Path, own: dict[Path, str], macros: set[str], declaring: set[str]
) -> dict[str, str]:
    included = {name for text in own.values() for name in includes.headers_in(text)}
    host = host_header_stand_ins.NAMES | set(filter(host_header_stand_ins.is_host, included))
    headers = {name: host_header_stand_ins.stand_in(name) for name in host}
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
    pointer = re.search(r"\*\s*(?!const\b)\w", head)  # `const char* x` is no constant
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
