"""Template arguments and constexprs as plain data: numbers unchanged, all else as text.

A text is an expression: `f32` is a dtype, `'mean'` a string; `None`, `nan` and `(1, f32)` are what
they say; `enum('lib.modes', 'Mode', 2)` is a member of an enum, and `function('../act.py',
'lib.act', 'relu')` a `@triton.jit` function. A file or module is "" where it is the kernel's own.
"""

from __future__ import annotations

import ast
import enum
import math
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from jitkern import source as source_room
from jitkern.source.dtypes import DTYPES, Constant, codes_of_torch
from jitkern.source.triton_decorators import inner

if TYPE_CHECKING:
    from jitkern.source.kinds import Source

ALONE = "jitkern_source_"  # begins the module's name where a file runs for its decorators alone
_CODES = {name: code for code, d in DTYPES.items() for name in (d.triton, d.language)}  # of Triton


class NotConstant(Exception):
    """A value cannot be a constant of a kernel; the message says why."""


def encoded(value: Any, source: Source) -> Constant:  # noqa: PLR0911  a table of cases
    """Return a constant of a kernel of this source as plain data. Raises NotConstant."""
    if isinstance(value, enum.Enum):
        return _enum(value, source)
    if isinstance(value, bool):  # also a Symbol
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        value = float(value)
        return value if math.isfinite(value) else str(value)
    if value is None:
        return "None"
    if isinstance(value, str):
        return repr(str(value))
    if isinstance(value, tuple) and type(value).__name__ in ("tuple", "Size"):
        return f"({''.join(f'{_text(item, source)}, ' for item in value)})"
    if code := codes_of_torch().get(value) if type(value).__module__ == "torch" else None:
        return code
    return _of_triton(value, source)


def decoded(constant: Any, dtype: Callable[[str], Any], find: Callable[..., Any]) -> Any:
    """Return the value of a constant.

    dtype: returns the dtype with a short name. find: returns a member of an enum or a function,
    from `"enum"`, module, name and value, or from `"function"`, file, module and name.
    """

    def of(node: Any) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.UnaryOp):
            return -of(node.operand)
        if isinstance(node, ast.Tuple):
            return tuple(map(of, node.elts))
        if isinstance(node, ast.Call):
            assert isinstance(node.func, ast.Name)
            return find(node.func.id, *map(of, node.args))
        return float(node.id) if node.id in ("nan", "inf") else dtype(node.id)

    return of(ast.parse(constant, mode="eval").body) if isinstance(constant, str) else constant


def files_of(constants: Iterable[Constant]) -> list[str]:
    """Return the files of functions among constants, beside the kernel's own."""
    files: set[str] = set()

    def find(kind: str, *words: Any) -> None:
        if kind == "function" and words[0]:
            files.add(words[0])

    for constant in constants:
        decoded(constant, str, find)
    return sorted(files)


def _text(value: Any, source: Source) -> str:
    constant = encoded(value, source)
    return constant if isinstance(constant, str) else repr(constant)


def _enum(value: enum.Enum, source: Source) -> str:
    kind = type(value)
    name = kind.__qualname__
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    own = file and not source.text and os.path.realpath(file) == os.path.realpath(source.paths[0])
    own = own or kind.__module__.startswith(ALONE)
    if "<locals>" in name or (kind.__module__ == "__main__" and not own):
        raise NotConstant(f"{name} is an enum of no module: define it at the top of a module")
    return f"enum({'' if own else kind.__module__!r}, {name!r}, {_text(value.value, source)})"


def _of_triton(value: Any, source: Source) -> Constant:
    """Return a dtype, constexpr or function of Triton as plain data."""
    kind = type(value)
    if kind.__module__.startswith("triton."):
        if kind.__name__ == "constexpr":
            return encoded(value.value, source)
        if kind.__name__ == "dtype" and value.name in _CODES:
            return _CODES[value.name]
        if isinstance(plain := inner(value), FunctionType) and plain is not value:
            return _function(value, plain, source)
    raise NotConstant(f"a {kind.__name__} is none of what can be")


def _function(value: Any, plain: FunctionType, source: Source) -> str:
    module = plain.__module__
    if module.partition(".")[0] == "triton":  # whose version is in the key
        return f"function('', {module!r}, {plain.__qualname__!r})"
    alone = module.startswith(ALONE)
    if source.text or not (alone or source_room.triton_function.in_file(plain)):
        raise NotConstant(f"`{plain.__name__}` or the kernel is in no file: put both into files")
    path = os.path.realpath(plain.__code__.co_filename)
    name = source_room.triton_function.name_of(value)
    if path == os.path.realpath(source.paths[0]):
        return f"function('', '', {name!r})"
    file = Path(os.path.relpath(path, source.folder)).as_posix()
    return f"function({file!r}, {'' if module == '__main__' else module!r}, {name!r})"
