"""A launch function with its own code, and a `torch._check` that imports no sympy.

Torch's own `_check` imports sympy on its first use, which takes 0.7 s. It also makes each check of
a symbolic size a condition of the compiled code; a launch function makes its checks again with each
call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from jitkern import trace
from jitkern.launch.tuned import changed, parts_of
from jitkern.trace.scope import Scope, scope_of

COPIES = 16  # of a function whose scope keeps changing, which then runs itself
Function = Callable[..., Any]


def check(condition: Any, message: Callable[[], object] | None = None) -> None:
    """Check as torch._check does, without sympy for a bool, and without a guard on a size."""
    if isinstance(condition, torch.SymBool) and condition.node.has_hint() and condition.node.hint:
        return
    if not isinstance(condition, bool):
        torch._check(condition, message)
    elif not condition:
        raise RuntimeError(str(message()) if message else "Expected cond to be True, but got False")


def with_fast_check(function: Function) -> Function:
    """Return a copy of a launch function with a quick `torch._check`.

    Return the function itself if it calls none, or calls what could read or change the names that
    the copy has copies of.
    """
    return _fast_check(function).now() or function


class _FastCheck:
    """The copies of a launch function with a quick `torch._check`, each made for one scope."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._made = [self._copied()]

    def now(self) -> Function | None:
        """Return a copy that does what the function does now, or None for the function itself."""
        for scope, copy in self._made:
            if scope and scope.holds():
                return copy
        if not self._made[-1][0] or len(self._made) == COPIES:
            return None
        self._made.append(self._copied())
        return self._made[-1][1]

    def _copied(self) -> tuple[Scope | None, Function | None]:
        function = self._function
        scope = scope_of(parts_of(function))
        if not scope.uses(torch._check) or scope.refusal or not scope.is_inert:
            return None, None
        copied = iter(trace.copying.copies(scope, {id(torch._check): check}))
        return scope, changed(function, lambda _: next(copied))


_fast_check = functools.lru_cache(maxsize=1024)(_FastCheck)


def from_partial(partial: functools.partial[Any]) -> Function:
    """Return a Python function that does what a partial does now, so that a trace can follow it.

    Its place in files is that of the function inside.
    """
    inner, given, named = partial.func, partial.args, tuple(partial.keywords.items())

    def launch(*args: Any, **kwargs: Any) -> Any:
        return inner(*given, *args, **{**dict(named), **kwargs})

    code = getattr(inner, "__code__", None)
    if code is not None:
        launch.__code__ = launch.__code__.replace(
            co_filename=code.co_filename, co_firstlineno=code.co_firstlineno
        )
    return functools.update_wrapper(launch, inner, updated=())
