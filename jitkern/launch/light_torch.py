"""The `torch` that launch functions see."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

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
    scope = {**module, "torch": proxy}
    for name, value in module.items():
        if isinstance(value, types.FunctionType) and value.__globals__ is module:
            scope[name] = _rebound(value, scope)
    return _rebound(function, scope)


def _rebound(function: types.FunctionType, scope: dict[str, Any]) -> types.FunctionType:
    copy = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class LightTorch(types.ModuleType):
    """Torch, with a quick `_check`."""

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
