"""Hints for the classic errors of an extension, found in the compiler's output.

Also the names that a library registers with Torch when it is loaded: registering them a second time
would end the process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from jitkern.compilers.result import MISSING_HEADER, first_hint
from jitkern.compilers.torch_extension.commands import Build
from jitkern.source import cpp_text

_HALF = r"\b(?:__half2?|__nv_bfloat162?)\b"
_REFUSED = r"no operator|no suitable|more than one (?:operator|conversion|instance)"
_UNKNOWN = r"[Uu]nsupported gpu architecture '?([\w.]+)|'(\w+)' is not defined for option 'gpu-arch"
_WORDS = {  # the names of the arguments, by kind of source
    "inline": {
        "flags": "extra_cuda_cflags",
        "include": "extra_include_paths",
        "arch": "name another arch in TORCH_CUDA_ARCH_LIST or extra_cuda_cflags",
        "link": 'e.g. extra_ldflags=["-L/path", "{0}"]',
        "bound": "; `functions` writes one, too",
        "module": (
            "or pass functions=[…] to load_inline; for a library that registers ops "
            "(TORCH_LIBRARY), pass is_python_module=False"
        ),
    },
    "extension": {
        "flags": "flags",
        "include": "include",
        "arch": "name another target",
        "link": "in library_dirs",
        "bound": "",
        "module": (
            "or, where it registers ops (TORCH_LIBRARY), name one with its namespace: "
            'function="ns::name"'
        ),
    },
}
_HINTS = (  # see `first_hint`
    (
        rf"(?s:(?:{_REFUSED}).{{0,400}}?{_HALF})",
        """\
Torch compiles CUDA sources with -D__CUDA_NO_HALF_OPERATORS__, -D__CUDA_NO_HALF_CONVERSIONS__, \
-D__CUDA_NO_BFLOAT16_CONVERSIONS__ and -D__CUDA_NO_HALF2_OPERATORS__: use c10::Half, __hadd or \
__half2float, or take them away with {flags}=["-U__CUDA_NO_HALF_OPERATORS__", …]""",
    ),
    (
        _UNKNOWN,
        "this nvcc does not know {0}: {arch}, or use a newer CUDA toolkit",
    ),
    (
        r"unsupported GNU version|unsupported clang version",
        "this nvcc does not take this host compiler: name an older one, e.g. CC=g++-13",
    ),
    (
        r"(?:redefinition of|multiple definition of) .*TORCH_LIBRARY_(?:static_)?init_(\w+?)\b",
        """\
the namespace `{0}` is registered twice: one TORCH_LIBRARY defines it, and TORCH_LIBRARY_FRAGMENT \
adds to it""",
    ),
    (
        r"multiple definition of \W?PyInit_(\w+)",
        "PYBIND11_MODULE stands in two units{bound}",
    ),
    (
        MISSING_HEADER,
        "`{0}` lies in none of the include directories: name its root in {include}",
    ),
    (
        r"cannot find \d+\.o\b",
        "the C++ compiler made no object of a unit: a .cu file takes nvcc, with_cuda=True",
    ),
    (
        r"cannot find (-l\S+?)(?::|$)",
        "the linker finds no {0}: name its directory, {link}",
    ),
    (
        r"Killed signal terminated|Killed: 9|std::bad_alloc|virtual memory exhausted",
        "the compiler was killed, usually for lack of memory: set JITKERN_JOBS=1",
    ),
)
_SHELLS = r"`|\$[({]|^[^-].*[*?]"
_BARE = r"error: \W(?:torch|at|c10|py|pybind11|PYBIND11_MODULE|TORCH_LIBRARY|TORCH_CHECK)\W"
_BLOCK = (  # the text that TORCH_LIBRARY and TORCH_LIBRARY_FRAGMENT expand to
    r'LibraryInit\s+\w+\s*\(\s*[\w:]+::(DEF|FRAGMENT)\s*,\s*&\w+\s*,\s*"(\w+)"[^;]*;'
    r"\s*void\s+\w+\s*\(\s*[\w:]+\s*&\s*(\w+)\s*\)\s*\{"
)
_OP = r'\b{}\s*\.\s*def\s*\(\s*(?:[\w:]+\s*\(\s*)*(?:R"\w*\(\s*|")(?:\w+::)?(\w+(?:\.\w+)?)'


def hint(build: Build, output: str) -> str:
    """A hint for the first classic error in a compiler's output, or ""."""
    function = re.search(r"\W(\w+)\W was not declared|identifier \"(\w+)\" is undefined", output)
    name = next(filter(None, function.groups()), "") if function else ""
    texts = list(build.texts.values())
    if name and re.search(rf'^m\.def\("{name}", ', "\n".join(texts), re.MULTILINE):
        return (
            f"`functions` names {name}, which cpp_sources neither defines nor declares "
            "(declare functions of cuda_sources there)"
        )
    flags = (*build.ldflags, *(flag for unit in build.units for flag in unit.flags))
    shells = next((flag for flag in flags if re.search(_SHELLS, flag)), "")
    if shells:
        return f"no shell reads the flags, so `{shells}` stays as it is: expand it in Python"
    if told := first_hint(output, _HINTS, **_WORDS[build.kind]):
        return told
    prelude = "#include <torch/extension.h>"
    if texts and re.search(_BARE, output) and not texts[0].startswith(prelude):
        return "with no_implicit_headers, write #include <torch/extension.h> yourself"
    return ""


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
        f"Write PYBIND11_MODULE(TORCH_EXTENSION_NAME, m), {_WORDS[build.kind]['module']}"
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
