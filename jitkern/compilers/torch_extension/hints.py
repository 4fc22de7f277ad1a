"""Hints for the most frequent errors of an extension, found in the compiler's output.

Also the names that a library registers with Torch when it is loaded: registering them a second time
would end the process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from jitkern.compilers.result import MISSING_HEADER
from jitkern.compilers.torch_extension.commands import Build
from jitkern.source import cpp_text

_HALF = r"\b(?:__half2?|__nv_bfloat162?)\b"
_REFUSED = r"no operator|no suitable|more than one (?:operator|conversion|instance)"
_UNKNOWN = r"[Uu]nsupported gpu architecture '?([\w.]+)|'(\w+)' is not defined for option 'gpu-arch"
HINTS = (  # see `first_hint`
    (
        rf"(?s:(?:{_REFUSED}).{{0,400}}?{_HALF})",
        """\
Torch compiles CUDA sources with -D__CUDA_NO_HALF_OPERATORS__, -D__CUDA_NO_HALF_CONVERSIONS__, \
-D__CUDA_NO_BFLOAT16_CONVERSIONS__ and -D__CUDA_NO_HALF2_OPERATORS__: use c10::Half, __hadd or \
__half2float, or take them away with the flags "-U__CUDA_NO_HALF_OPERATORS__", …""",
    ),
    (
        _UNKNOWN,
        "this nvcc does not know {0}: name another arch (TORCH_CUDA_ARCH_LIST, a flag, the target)",
    ),
    (
        r"unsupported GNU version|unsupported clang version",
        "this nvcc does not take this host compiler: name an older one, e.g. CC=g++-13",
    ),
    (
        MISSING_HEADER,
        "`{0}` lies in none of the directories: name its root (include, extra_include_paths)",
    ),
    (
        r"cannot find (-l\S+?)(?::|$)",
        'the linker finds no {0}: name its directory (library_dirs, or extra_ldflags=["-L/path"])',
    ),
)
_BLOCK = (  # the text that TORCH_LIBRARY and TORCH_LIBRARY_FRAGMENT expand to
    r'LibraryInit\s+\w+\s*\(\s*[\w:]+::(DEF|FRAGMENT)\s*,\s*&\w+\s*,\s*"(\w+)"[^;]*;'
    r"\s*void\s+\w+\s*\(\s*[\w:]+\s*&\s*(\w+)\s*\)\s*\{"
)
_OP = r'\b{}\s*\.\s*def\s*\(\s*(?:[\w:]+\s*\(\s*)*(?:R"\w*\(\s*|")(?:\w+::)?(\w+(?:\.\w+)?)'


def missing_module(build: Build, binary: bytes) -> str:
    """Why the library cannot be imported as a Python module, or ""."""
    names = {name.decode() for name in re.findall(rb"\0(PyInit_\w+)(?=\0)", binary)}
    last = build.name.rpartition(".")[2]
    if f"PyInit_{last}" in names or not last.isascii():
        return ""
    others = sorted(names)
    contents = f"it has {others[0]}" if others else "it has no PYBIND11_MODULE"
    return (
        f"the compiled library is no Python module `{build.name}`: {contents}. "
        "Write PYBIND11_MODULE(TORCH_EXTENSION_NAME, m), or pass functions=[…] to load_inline. For "
        "a library that registers ops (TORCH_LIBRARY), pass is_python_module=False, or declare it "
        'with function="ns::name"'
    )


def registrations(expanded: Iterable[str]) -> dict[str, list[str]]:
    """The `namespaces` that preprocessed units define, and the `ops` that they add to others."""
    namespaces: set[str] = set()
    ops: set[str] = set()
    for text in expanded:
        plain = re.sub(r'"\s+"', "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
        for kind, namespace, library, body in _blocks(plain):
            if kind == "DEF":
                namespaces.add(namespace)
            else:
                ops.update(f"{namespace}::{op}" for op in re.findall(_OP.format(library), body))
    return {"namespaces": sorted(namespaces), "ops": sorted(ops)}


def _blocks(text: str) -> Iterator[tuple[str, str, str, str]]:
    """(DEF or FRAGMENT, namespace, name of the library variable, text) of each such block."""
    for block in re.finditer(_BLOCK, text):
        try:
            end = cpp_text.closing(text, block.end() - 1)
        except cpp_text.Unbalanced:  # by a brace in a string
            end = len(text)
        yield block[1], block[2], block[3], text[block.end() : end]
