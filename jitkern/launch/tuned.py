"""A launch function together with the configurations that `.tune` lists for it.

Light: a process that finds all it needs in the cache imports this, and not what measures.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from typing import Any

import torch

Function = Callable[..., Any]


class Tuned:
    """Called like its launch function, whose `k.config` it provides for.

    configurations: lists them, given the op's inputs. key: what of the inputs a choice depends on
    besides their dtypes.
    """

    def __init__(
        self, launch: Function, configurations: Function, key: Function | None = None
    ) -> None:
        self.launch = launch
        self.configurations = configurations
        self.key = key

    def __call__(self, k: Any, *args: Any, **kwargs: Any) -> Any:
        k._begin(self, args, kwargs)
        return self.launch(k, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tuned) and parts_of(self) == parts_of(other)

    def __hash__(self) -> int:
        return hash(parts_of(self))

    @property
    def __code__(self) -> Any:
        """The launch function's own."""
        return self.launch.__code__


def parts_of(function: Function) -> tuple[Function, ...]:
    """The functions that the author of a launch function wrote for it."""
    if not isinstance(function, Tuned):
        return (function,)
    key = (function.key,) if function.key else ()
    return function.launch, function.configurations, *key


def changed(function: Function, change: Callable[[Function], Function]) -> Function:
    """A launch function with each of its parts changed."""
    if isinstance(function, Tuned):
        return Tuned(*map(change, parts_of(function)))
    return change(function)


def model_of(device: torch.device) -> str:
    """The name of a device's model: what is quickest on one is on all of it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()


@functools.cache
def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            named = [line.partition(":")[2].strip() for line in lines if line.startswith("model n")]
    except OSError:
        named = []
    return next(iter(named), platform.processor() or platform.machine())
