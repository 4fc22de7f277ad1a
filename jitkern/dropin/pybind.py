"""The PYBIND11_MODULE that `load_inline` writes for `functions`."""

from __future__ import annotations

import re
from collections.abc import Mapping


def bindings(functions: object, *, safe: bool, gil_not_used: bool) -> list[str]:
    """Lines that bind `functions`: names, or names with their docstrings.

    safe: warnings and errors of Torch become warnings and errors of Python. gil_not_used: the
    module says that it needs no global lock. Raises ValueError for another type.
    """
    if isinstance(functions, str):
        functions = [functions]
    if isinstance(functions, list):
        functions = {function: function for function in functions}
    if not isinstance(functions, Mapping):
        raise ValueError(  # noqa: TRY004  as Torch has it
            f"Expected 'functions' to be a list or dict, but was {type(functions)}"
        )
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


def _literal(doc: str) -> str:
    """The content of a C++ literal for `doc`; the escapes in `doc` keep their meaning."""
    if doc.isprintable() and '"' not in doc:
        return doc
    plain = {'"': '\\"', "\n": "\\n", "\r": "\\r"}
    return re.sub(r'(?s)\\[^\n]|["\n\r]', lambda match: plain.get(match[0], match[0]), doc)
