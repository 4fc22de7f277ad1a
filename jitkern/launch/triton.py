"""What a launch must know of a `@triton.jit` function, read from its text, without Triton."""

from __future__ import annotations

import ast
import contextlib
import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from jitkern.errors import CompileError
from jitkern.kernel import Constant


class Config(NamedTuple):
    """One `triton.Config`: constexprs, and compile options such as num_warps."""

    constexprs: tuple[tuple[str, Constant], ...]
    options: tuple[tuple[str, int], ...]


class Function(NamedTuple):
    """A `@triton.jit` function as its text declares it: what a launch needs without Triton.

    configs, key: of `@triton.autotune`: what to choose from, and the arguments whose every value
    has a choice of its own. heuristics: of `@triton.heuristics`: constexprs computed from the rest.
    """

    parameters: tuple[str, ...]
    constexprs: frozenset[str]
    defaults: tuple[tuple[str, Constant], ...]  # of constexprs, where they are literals
    passed: tuple[tuple[str, Constant | None], ...]  # of the other parameters, likewise
    plain: frozenset[str]  # do_not_specialize: neither ==1 nor %16
    unaligned: frozenset[str]  # do_not_specialize_on_alignment: ==1 but not %16
    configs: tuple[Config, ...] = ()
    key: tuple[str, ...] = ()
    heuristics: tuple[tuple[str, Callable[[dict[str, Any]], Any]], ...] = ()


@functools.cache
def functions(path: str, _stamp: int) -> dict[str, Function]:
    """The jit functions of a file; its mtime only keys the memo. Raises CompileError."""
    try:
        tree = ast.parse(Path(path).read_bytes(), path)
    except SyntaxError as e:
        raise CompileError(f"{path}({e.lineno}): error: {e.msg}") from e
    names = _Names(path, tree)
    return {
        node.name: _function(node, decorator, names)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and (decorator := _decorator(node, "jit"))
    }


def _function(node: ast.FunctionDef, decorator: ast.expr, module: _Names) -> Function:
    positional = [*node.args.posonlyargs, *node.args.args]
    parameters = [*positional, *node.args.kwonlyargs]
    names = [parameter.arg for parameter in parameters]
    constexprs = frozenset(
        p.arg for p in parameters if p.annotation and "constexpr" in ast.unparse(p.annotation)
    )
    values = [None] * (len(positional) - len(node.args.defaults)) + node.args.defaults
    literals = {
        name: value
        for name, expression in zip(names, [*values, *node.args.kw_defaults])
        if expression
        for value in _literal(expression)
    }
    return Function(
        tuple(names),
        constexprs,
        tuple((n, v) for n, v in literals.items() if n in constexprs and v is not None),
        tuple((n, v) for n, v in literals.items() if n not in constexprs),
        frozenset(_named(decorator, "do_not_specialize", names)),
        frozenset(_named(decorator, "do_not_specialize_on_alignment", names)),
        *_tuning(_decorator(node, "autotune"), module),
        _heuristics(_decorator(node, "heuristics"), module),
    )


def _tuning(
    decorator: ast.expr | None, module: _Names
) -> tuple[tuple[Config, ...], tuple[str, ...]]:
    if not isinstance(decorator, ast.Call):
        return (), ()
    given = dict(zip(("configs", "key"), decorator.args))
    given |= {item.arg: item.value for item in decorator.keywords if item.arg}
    refused = {"prune_configs_by", "pre_hook", "post_hook"}.intersection(given)
    if refused:
        raise CompileError(
            f"{module.path}({decorator.lineno}): error: `{min(refused)}` of @triton.autotune is "
            "not supported: list the configurations that are left"
        )
    configs = tuple(module.value(given["configs"]))
    return configs, tuple(module.value(given["key"]) if "key" in given else ())


def _heuristics(
    decorator: ast.expr | None, module: _Names
) -> tuple[tuple[str, Callable[[dict[str, Any]], Any]], ...]:
    if not isinstance(decorator, ast.Call):
        return ()
    (values,) = (*decorator.args, *(item.value for item in decorator.keywords))
    return tuple(module.value(values).items())


def _config(
    kwargs: dict[str, Constant], num_warps: int = 4, num_stages: int = 3, num_ctas: int = 1,
    maxnreg: int | None = None, **unsupported: object,
) -> Config:  # fmt: skip
    """What stands in for `triton.Config`, with its defaults."""
    if any(value is not None for value in unsupported.values()):
        raise ValueError(f"triton.Config({', '.join(unsupported)}=...) is not supported")
    options = {"num_warps": num_warps, "num_stages": num_stages}
    options |= {"num_ctas": num_ctas} if num_ctas != 1 else {}
    options |= {"maxnreg": maxnreg} if maxnreg else {}
    return Config(tuple(kwargs.items()), tuple(options.items()))


class _Names(dict[str, Any]):
    """The names of a file as its decorators use them, computed without Triton as they are asked."""

    def __init__(self, path: str, tree: ast.Module) -> None:
        light = SimpleNamespace(Config=_config, cdiv=cdiv, next_power_of_2=next_power_of_2)
        super().__init__(triton=light, Config=_config, math=math)
        self.path = path
        self._tree = tree

    def value(self, expression: ast.expr) -> Any:
        """What an expression of the file is worth. Raises CompileError."""
        try:
            code = compile(ast.Expression(expression), self.path, "eval")
            return eval(code, self)  # noqa: S307  the kernel author's own code
        except Exception as e:
            raise CompileError(
                f"{self.path}({expression.lineno}): error: a launch reads this without importing "
                f"Triton, and could not: {type(e).__name__}: {e}"
            ) from e

    def __missing__(self, name: str) -> Any:
        for node in self._tree.body:
            names = [t.id for t in getattr(node, "targets", ()) if isinstance(t, ast.Name)]
            if name in names or getattr(node, "name", "") == name:
                code = compile(ast.Module([node], []), self.path, "exec")
                exec(code, self)  # noqa: S102  the kernel author's own code
                return self[name]
        raise KeyError(name)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is not below n, which is at least 1."""
    return 1 << (n - 1).bit_length()


def _literal(expression: ast.expr) -> list[Constant | None]:
    """The number or None that it is, if it is one."""
    with contextlib.suppress(ValueError):
        value = ast.literal_eval(expression)
        if value is None or isinstance(value, (bool, int, float)):
            return [value]
    return []


def _decorator(node: ast.FunctionDef, name: str) -> ast.expr | None:
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(called).split(".")[-1] == name:
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
