"""A `@triton.jit` function of a cell, of `exec`, or of another function, as the text of a module.

Triton's functions are compiled from a module's file, in another process. A function that no file
has at its top level becomes a text: its source and that of the functions it calls, after statements
that give its globals the values they have now. The source comes from `linecache`, as for
tracebacks.
"""

from __future__ import annotations

import ast
import inspect
import math
import os
import symtable
import sys
import sysconfig
import textwrap
import types
from collections.abc import Iterable
from typing import Any

from jitkern.errors import DeclarationError
from jitkern.source import texts
from jitkern.source.triton_decorators import BARE, UnsupportedDecorator, bare, inner, read

_PLAIN = (int, float, str, bool, type(None))


def check(function: Any, name: str) -> None:
    """Raise DeclarationError for a function that launches do not support.

    Its module does not have it by this name, if another module, a cell or a call has put
    decorators over it or if the module was reloaded.
    """
    found = inner(function).__globals__.get(name.removesuffix(BARE))
    if (bare(found) if name.endswith(BARE) else found) is not function:
        raise DeclarationError(
            f"`{name}` of its module is another function than the one that was passed: write the "
            "decorators above the function, and pass what a reloaded module has"
        )
    if type(function).__name__ == "InterpretedFunction":
        return  # for TRITON_INTERPRET=1, which compilers do not see
    try:
        read(function)
    except (TypeError, UnsupportedDecorator) as e:
        raise DeclarationError(f"`{name}`: {e}") from e


def name_of(function: Any) -> str:
    """Return the name by which its module has a JITFunction, or what decorators make of one.

    `name.fn` is the JITFunction below decorators.
    """
    plain = inner(function)
    own: str = plain.__name__
    names: dict[str, Any] = plain.__globals__
    others = (name for name, value in names.items() if value is function)
    if names.get(own) is function:
        return own
    below = own + BARE if bare(names.get(own)) is function else own
    return next(others, below)


def text_of(functions: Iterable[Any]) -> tuple[str, list[texts.Span]]:
    """Return a module of functions and all that they name, and where the functions are written.

    Of decorators the module has `triton.jit` alone. Raises DeclarationError for what `source_of`
    refuses, and for a name with two meanings.
    """
    writer = _ModuleWriter()
    for function in functions:
        if inner(function) not in writer.added:
            writer.add_function(function)
    return writer.module()


class _ModuleWriter:
    """The statements of a module, each name once."""

    def __init__(self) -> None:
        self.imports: list[str] = []
        self.values: list[str] = []
        self.functions: list[tuple[str, str, int]] = []  # text, file and line there
        self.added: list[types.FunctionType] = []
        self._named: dict[str, Any] = {}

    def module(self) -> tuple[str, list[texts.Span]]:
        """Return the text, and where its functions are written."""
        lines = [*self.imports, *self.values]
        spans = []
        for text, file, line in self.functions:
            rows = text.splitlines()
            if file:
                spans.append(texts.Span(len(lines) + 1, len(rows), file, line))
            lines += rows
        return "\n".join([*lines, ""]), spans

    def add_function(self, value: Any) -> None:
        """Add a function, after all that its source names."""
        function = inner(value)
        text = written(value)
        if (jitted := bare(value)) is not None:
            text = self._undecorated(text, jitted)
        self._check(function.__name__, function, function)
        self._named[function.__name__] = function
        self.added.append(function)
        known = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
        for name in _names_in(text):
            if name in known:
                self._add(name, known[name], function)
        code = function.__code__
        self.functions.append((text, code.co_filename, code.co_firstlineno))

    def _undecorated(self, text: str, jitted: Any) -> str:
        """Return the text of a function with `triton.jit` in place of its decorators."""
        (node,) = ast.parse(text).body
        assert isinstance(node, ast.FunctionDef)
        first = min((decorator.lineno for decorator in node.decorator_list), default=node.lineno)
        rows = text.splitlines()
        of_gluon = type(jitted).__name__ == "GluonJITFunction"
        module = self._module("triton.experimental.gluon" if of_gluon else "triton")
        options = f"debug={jitted.debug!r}, noinline={jitted.noinline!r}"
        for at in range(first - 1, node.lineno - 1):
            rows[at] = f"# {rows[at]}"
        if first < node.lineno:
            rows[node.lineno - 2] = f"@{module}.jit({options})"
        return "\n".join([*rows, ""])

    def _check(self, name: str, value: Any, user: types.FunctionType) -> None:
        """Refuse a name that has two meanings."""
        known = self._named.get(name, value)
        alike = type(known) is type(value) and type(value) in _PLAIN and repr(known) == repr(value)
        if known is not value and not alike:
            raise DeclarationError(
                f"`{name}` means two things in the functions that `{user.__name__}` calls: put "
                "them into a file each"
            )

    def _add(self, name: str, value: Any, user: types.FunctionType) -> None:
        plain = inner(value)
        if name in self._named:
            self._check(name, plain, user)
            return
        self._named[name] = plain
        if isinstance(value, types.ModuleType):
            self.imports.append(f"import {value.__name__} as {name}")
        elif isinstance(plain, (type, types.FunctionType)) and _is_installed(plain):
            self.imports.append(f"from {plain.__module__} import {plain.__qualname__} as {name}")
        elif isinstance(plain, types.FunctionType):
            self.add_function(value)
            if name != plain.__name__:
                self.functions.append((f"{name} = {plain.__name__}\n", "", 0))
        else:
            self.values.append(f"{name} = {self._written(name, value, user)}")

    def _written(self, name: str, value: Any, user: types.FunctionType) -> str:
        """Return a value as an expression. Raises DeclarationError if that is impossible."""
        if type(value) in _PLAIN:
            finite = not isinstance(value, float) or math.isfinite(value)
            return repr(value) if finite else f'float("{value}")'
        kind = type(value)
        if kind in (tuple, list):
            items = "".join(f"{self._written(name, item, user)}, " for item in value)
            return f"({items})" if kind is tuple else f"[{items}]"
        if kind is dict:
            pairs = [
                (self._written(name, k, user), self._written(name, v, user))
                for k, v in value.items()
            ]
            return f"{{{', '.join(f'{k}: {v}' for k, v in pairs)}}}"
        of_triton = kind.__name__ if kind.__module__.startswith("triton.") else ""
        if of_triton == "dtype":
            return f"{self._module('triton.language')}.{_name_in_triton(value)}"
        if of_triton == "constexpr":
            inside = self._written(name, value.value, user)
            return f"{self._module('triton.language')}.constexpr({inside})"
        raise DeclarationError(
            f"`{user.__name__}` reads the global `{name}`, a {kind.__name__}, which cannot be "
            "written into a module: pass it as an argument, or put the kernel into a file"
        )

    def _module(self, module: str) -> str:
        """Return the name of a module of Triton for expressions, which is imported once."""
        name = f"jitkern_{module.replace('.', '_')}"
        statement = f"import {module} as {name}"
        if statement not in self.imports:
            self.imports.append(statement)
        return name


def in_file(function: types.FunctionType) -> bool:
    """Whether a file that can be imported has the function at its top level.

    Not so a function in a cell, in text given to `exec`, in another function, or of a program, or
    one whose module is no longer imported: nobody could compare its globals.
    """
    file = function.__code__.co_filename
    module = sys.modules.get(function.__module__)
    top = function.__qualname__ == function.__name__ and function.__module__ != "__main__"
    top = top and getattr(module, "__dict__", None) is function.__globals__
    return top and os.path.isfile(file) and "ipykernel" not in file  # noqa: PTH113  a name may be `<cell>`


def _is_installed(value: Any) -> bool:
    """Whether a function or class can be imported anywhere: of Triton, Python or a package."""
    module, name = sys.modules.get(value.__module__), value.__qualname__
    code = getattr(value, "__code__", None)
    file = code.co_filename if code else str(getattr(module, "__file__", ""))
    paths = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    return (
        value.__module__ != "__main__"
        and "." not in name
        and file.startswith(tuple(f"{path}{os.sep}" for path in paths))
    )


def written(value: Any) -> str:
    """Return the source of a function, as Triton read it. Raises DeclarationError if not known."""
    function, rows = inner(value), getattr(bare(value), "raw_src", ())
    try:
        return textwrap.dedent("".join(rows) or inspect.getsource(function))
    except (OSError, TypeError) as e:
        raise DeclarationError(
            f"`{function.__name__}` is defined in {function.__code__.co_filename}, whose text is "
            "not known: put the kernel into a file, or its text into `linecache.cache`"
        ) from e


def _names_in(text: str) -> list[str]:
    """The globals that a function's source reads; builtins are among them."""
    scopes = [symtable.symtable(text, "", "exec")]
    for scope in scopes:  # it grows
        scopes += scope.get_children()
    symbols = [symbol for scope in scopes for symbol in scope.get_symbols()]
    return sorted({s.get_name() for s in symbols if s.is_global() and s.is_referenced()})


def _name_in_triton(dtype: Any) -> str:
    import triton.language

    names: dict[str, Any] = vars(triton.language)
    return next(name for name, value in names.items() if value is dtype)
