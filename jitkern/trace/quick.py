"""A launch function as it runs: its own code, with a `torch._check` that imports no sympy.

Torch's own takes 0.7 s for that import on its first use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from jitkern.launch.tuned import changed, parts_of
from jitkern.trace.world import World, world_of

Function = Callable[..., Any]


def check(condition: Any, message: Callable[[], object] | None = None) -> None:
    """As torch._check, for a bool."""
    if not isinstance(condition, bool):
        torch._check(condition, message)
    elif not condition:
        raise RuntimeError(str(message()) if message else "Expected cond to be True, but got False")


def runnable(function: Function) -> Function:
    """A launch function as it is now, with a quick `torch._check` where it calls that."""
    world = world_of(parts_of(function))
    if world.refusal or not world.uses(torch._check):
        return function
    return _quick(world, function)


@functools.lru_cache(maxsize=1024)
def _quick(world: World, function: Function) -> Function:
    copies = iter(world.copies({id(torch._check): check}))
    return changed(function, lambda _: next(copies))
