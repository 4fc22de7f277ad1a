"""What a launch must know of a `@triton.jit` function, read from its text, without Triton."""

from __future__ import annotations

import ast
import contextlib
import functools
from pathlib import Path
from typing import NamedTuple

from jitkern.errors import CompileError
from jitkern.kernel import Constant


class Function(NamedTuple):
    """A `@triton.jit` function as its text declares it: what a launch needs without Triton."""

    parameters: tuple[str, ...]
    constexprs: frozenset[str]
    defaults: tuple[tuple[str, Constant], ...]  # of constexprs, where they are literals
    plain: frozenset[str]  # do_not_specialize: neither ==1 nor %16
    unaligned: frozenset[str]  # do_not_specialize_on_alignment: ==1 but not %16


@functools.cache
def functions(path: str, _stamp: int) -> dict[str, Function]:
    """The jit functions of a file; its mtime only keys the memo. Raises CompileError."""
    try:
        tree = ast.parse(Path(path).read_bytes(), path)
    except SyntaxError as e:
        raise CompileError(f"{path}({e.lineno}): error: {e.msg}") from e
    return {
        node.name: _function(node, decorator)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and (decorator := _jit_decorator(node))
    }


def _function(node: ast.FunctionDef, decorator: ast.expr) -> Function:
    positional = [*node.args.posonlyargs, *node.args.args]
    parameters = [*positional, *node.args.kwonlyargs]
    names = [parameter.arg for parameter in parameters]
    constexprs = frozenset(
        p.arg for p in parameters if p.annotation and "constexpr" in ast.unparse(p.annotation)
    )
    values = [None] * (len(positional) - len(node.args.defaults)) + node.args.defaults
    defaults = [
        (name, value.value)
        for name, value in zip(names, [*values, *node.args.kw_defaults])
        if name in constexprs and isinstance(value, ast.Constant)
    ]
    return Function(
        tuple(names),
        constexprs,
        tuple((name, value) for name, value in defaults if isinstance(value, (bool, int, float))),
        frozenset(_named(decorator, "do_not_specialize", names)),
        frozenset(_named(decorator, "do_not_specialize_on_alignment", names)),
    )


def _jit_decorator(node: ast.FunctionDef) -> ast.expr | None:
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(called).split(".")[-1] == "jit":
            return decorator
    return None


def _named(decorator: ast.expr, keyword: str, names: list[str]) -> list[str]:
    """Parameters that a list keyword of the decorator gives, by name or position."""
    for item in decorator.keywords if isinstance(decorator, ast.Call) else []:
        if item.arg == keyword:
            with contextlib.suppress(ValueError):
                return [
                    names[v] if isinstance(v, int) else str(v) for v in ast.literal_eval(item.value)
                ]
    return []
