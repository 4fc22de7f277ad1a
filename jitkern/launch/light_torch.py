"""The `torch` that launch functions see."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, ClassVar

import torch


def with_light_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a `torch` whose `_check` does not import sympy (0.7 s on first use)."""
    return seeing(function, _LIGHT)


@functools.cache
def seeing(function: Callable[..., Any], proxy: LightTorch) -> Callable[..., Any]:
    """The function with `proxy` for `torch`.

    Functions of the same module that it calls see that `torch` too. Made at its first call, when
    the module has bound all its names.
    """
    if (
        not isinstance(function, types.FunctionType)
        or function.__globals__.get("torch") is not torch
    ):
        return function
    module = function.__globals__
    scope = {**module, "torch": proxy, **proxy.builtins}
    for name, value in module.items():
        if isinstance(value, types.FunctionType) and value.__globals__ is module:
            scope[name] = _rebound(value, scope)
    return _rebound(function, scope)


def _rebound(function: types.FunctionType, scope: dict[str, Any]) -> types.FunctionType:
    cells = tuple(
        types.CellType(_rebound(cell.cell_contents, scope)) if _is_beside(cell, function) else cell
        for cell in function.__closure__ or ()
    )
    copy = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, cells
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _is_beside(cell: types.CellType, function: types.FunctionType) -> bool:
    """Whether a closure holds another function of the same module."""
    try:
        held = cell.cell_contents
    except ValueError:  # not bound yet
        return False
    return (
        isinstance(held, types.FunctionType)
        and held is not function
        and held.__globals__ is function.__globals__
    )


class LightTorch(types.ModuleType):
    """Torch, with a quick `_check`. `builtins` are seen instead of Python's."""

    builtins: ClassVar[dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        setattr(self, name, value)
        return value

    @staticmethod
    def _check(condition: Any, message: Callable[[], object] | None = None) -> None:
        if not isinstance(condition, bool):
            torch._check(condition, message)
        elif not condition:
            raise RuntimeError(
                str(message()) if message else "Expected cond to be True, but got False"
            )


_LIGHT = LightTorch("torch")
