"""The PYBIND11_MODULE that `load_inline` writes for `functions`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jitkern.errors import DeclarationError, meant

# What may declare functions that a text does not: other headers, macros, names of a namespace.
_MAY_DECLARE = r"""(?mx)
    ^\s*\#\s*include(?!\s*<(?:(?:torch|ATen|c10|pybind11)/[^>]*|cuda[\w.]*|[^./>]*)>)
    | \#\# | \busing\s+namespace\b"""


def bindings(
    functions: object, *, safe: bool, gil_not_used: bool, cpp: str = "", cuda: str = ""
) -> list[str]:
    """Lines that bind `functions`: names, or names with their docstrings.

    safe: warnings and errors of Torch become warnings and errors of Python. gil_not_used: the
    module says that it needs no global lock. cpp, cuda: the sources. Raises ValueError for another
    type, and DeclarationError for a function that the sources cannot have declared.
    """
    if isinstance(functions, str):
        functions = [functions]
    if isinstance(functions, list):
        functions = {function: function for function in functions}
    if not isinstance(functions, Mapping):
        raise ValueError(  # noqa: TRY004  as Torch has it
            f"Expected 'functions' to be a list or dict, but was {type(functions)}"
        )
    for function in map(str, functions if cpp else ()):
        _check(function, cpp, cuda)
    wrapper = "torch::wrap_pybind_function({})" if safe else "{}"
    options = ", pybind11::mod_gil_not_used()" if gil_not_used else ""
    return [
        f"PYBIND11_MODULE(TORCH_EXTENSION_NAME, m{options}) {{",
        *(
            f'm.def("{function}", {wrapper.format(function)}, "{_literal(str(doc))}");'
            for function, doc in functions.items()
        ),
        "}",
    ]


def _check(function: str, cpp: str, cuda: str) -> None:
    """Raise DeclarationError for a function that C++ sources cannot have declared."""
    words = re.findall(r"[A-Za-z_]\w*", cpp)
    name = (re.findall(r"[A-Za-z_]\w*", function.partition("<")[0]) or [""])[-1]
    if not name or name in words or re.search(_MAY_DECLARE, cpp):
        return
    near = meant(name, words)
    if re.search(rf"\b{name}\b", cuda):
        near = ": cuda_sources has it; declare it in cpp_sources, which the bindings are part of"
    raise DeclarationError(f"functions: cpp_sources does not declare `{function}`{near}")


def _literal(doc: str) -> str:
    """The content of a C++ literal for `doc`; the escapes in `doc` keep their meaning."""
    if doc.isprintable() and '"' not in doc:
        return doc
    plain = {'"': '\\"', "\n": "\\n", "\r": "\\r"}
    return re.sub(r'(?s)\\[^\n]|["\n\r]', lambda match: plain.get(match[0], match[0]), doc)
