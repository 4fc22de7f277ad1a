"""The PYBIND11_MODULE that `load_inline` writes for `functions`."""

from __future__ import annotations

import re
from collections.abc import Mapping


def bindings(functions: object, *, safe: bool) -> list[str]:
    """Lines that bind `functions`: names, or names with their docstrings.

    safe: warnings and errors of Torch become those of Python. Raises ValueError for another type.
    """
    if isinstance(functions, str):
        functions = [functions]
    if isinstance(functions, list):
        functions = {function: function for function in functions}
    if not isinstance(functions, Mapping):
        raise ValueError(  # noqa: TRY004  as Torch has it
            f"Expected 'functions' to be a list or dict, but was {type(functions)}"
        )
    called = "torch::wrap_pybind_function({})" if safe else "{}"
    return [
        "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {",
        *(
            f'm.def("{function}", {called.format(function)}, "{_literal(str(doc))}");'
            for function, doc in functions.items()
        ),
        "}",
    ]


def _literal(doc: str) -> str:
    """What a C++ literal of `doc` holds; the escapes in it mean what they say."""
    if doc.isprintable() and '"' not in doc:
        return doc
    plain = {'"': '\\"', "\n": "\\n", "\r": "\\r"}
    return re.sub(r'(?s)\\[^\n]|["\n\r]', lambda found: plain.get(found[0], found[0]), doc)
