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
from pathlib import Path
from typing import Any

from jitkern.errors import CompileError, DeclarationError
from jitkern.source import texts, triton_decorators, triton_text
from jitkern.source.triton_decorators import BARE, TRITON_OPTIONS, bare, inner

_PLAIN = (int, float, str, bool, type(None))


def source_of(function: Any) -> tuple[str, dict[str, Any]]:
    """Return the file of a function for `Triton`, and further arguments: the text if it is in none.

    Raises DeclarationError for a function without a source, or with globals that no statement can
    give to a module: others than modules, functions, classes of packages, numbers, strings, lists,
    tuples, dicts, and Triton's dtypes, constexprs and configurations.
    """
    plain = inner(function)
    if plain is function or not isinstance(plain, types.FunctionType):
        raise DeclarationError(f"{function!r} is not a `@triton.jit` function")
    if (name := name_of(function)).endswith(BARE):
        raise DeclarationError(
            f"`{name}` is below decorators: pass what its module has by the name"
        )
    if in_file(plain):
        package = plain.__globals__.get("__package__") or ""
        path = os.path.abspath(plain.__code__.co_filename)  # noqa: PTH100  as the code has it
        check(function, triton_text.functions(Path(path)))
        return path, {"package": package}
    text, written_at = text_of([plain])
    path = f"{plain.__name__}.py"
    check(function, triton_text.Functions(path, ast.parse(text)))
    return path, {"text": text, "written_at": written_at}


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


def check(function: Any, declared: triton_text.Functions) -> None:
    """Raise DeclarationError for decorators that a launch would not find in the text.

    Such are those that another module, a cell or a call has put over a function, and those of a
    file that was edited since its import. What the text cannot tell, a launch reads from the object
    that the module has.
    """
    name = name_of(function)
    if type(function).__name__ == "InterpretedFunction":
        return  # for TRITON_INTERPRET=1, which compilers do not see
    try:
        real = triton_decorators.read(function)
        found = declared[name]
    except (TypeError, triton_decorators.UnsupportedDecorator) as e:
        raise DeclarationError(f"`{name}`: {e}") from e
    except KeyError:
        told = f"the text has no function `{name}`"
    except CompileError:
        names = inner(function).__globals__
        own = function in (names.get(name), bare(names.get(name.removesuffix(BARE))))
        told = "" if own else f"`{name}` of its module is another"
    else:
        told = triton_decorators.difference(found, real)
    if told:
        raise DeclarationError(
            f"`{name}` has other decorators than its text, which is what a launch reads "
            f"({told}): write them above the function, and reload an edited file"
        )


def text_of(functions: Iterable[types.FunctionType]) -> tuple[str, list[texts.Span]]:
    """Return a module of functions and all that they name, and where the functions are written.

    Raises DeclarationError for what `source_of` refuses, and for a name with two meanings.
    """
    writer = _ModuleWriter()
    for function in functions:
        if function not in writer.added:
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

    def add_function(self, function: types.FunctionType) -> None:
        """Add a function, after all that its source names."""
        text = written(function)
        self._check(function.__name__, function, function)
        self._named[function.__name__] = function
        self.added.append(function)
        known = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
        for name in _names_in(text):
            if name in known:
                self._add(name, known[name], function)
        code = function.__code__
        self.functions.append((text, code.co_filename, code.co_firstlineno))

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
            self.add_function(plain)
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
        if of_triton == "Config" and not value.pre_hook:
            options = {option: getattr(value, option, None) for option in TRITON_OPTIONS}
            shown = "".join(f", {n}={v!r}" for n, v in options.items() if v is not None)
            constexprs = self._written(name, value.kwargs, user)
            return f"{self._module('triton')}.Config({constexprs}{shown})"
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
    """Whether a file has the function at its top level.

    Not so a function in a cell, in text given to `exec`, or in another function.
    """
    file = function.__code__.co_filename
    top = function.__qualname__ == function.__name__
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


def written(function: types.FunctionType) -> str:
    """Return the source of a function. Raises DeclarationError if its text is not known."""
    try:
        return textwrap.dedent(inspect.getsource(function))
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
