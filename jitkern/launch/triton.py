"""What a launch must know of a `@triton.jit` function, read from its text, without Triton."""

from __future__ import annotations

import ast
import contextlib
import functools
from pathlib import Path
from typing import NamedTuple


class Function(NamedTuple):
    """A `@triton.jit` function as its text declares it: what a launch needs without Triton."""

    parameters: tuple[str, ...]
    constexprs: frozenset[str]
    plain: frozenset[str]  # do_not_specialize: neither ==1 nor %16
    unaligned: frozenset[str]  # do_not_specialize_on_alignment: ==1 but not %16


@functools.cache
def functions(path: str, _stamp: int) -> dict[str, Function]:
    """The jit functions of a file; its mtime only keys the memo."""
    tree = ast.parse(Path(path).read_bytes(), path)
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and (decorator := _jit_decorator(node)):
            names = [
                a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            ]
            annotated = [
                a
                for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                if a.annotation
            ]
            found[node.name] = Function(
                tuple(names),
                frozenset(
                    a.arg for a in annotated if "constexpr" in ast.unparse(a.annotation or a)
                ),
                frozenset(_named(decorator, "do_not_specialize", names)),
                frozenset(_named(decorator, "do_not_specialize_on_alignment", names)),
            )
    return found


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
