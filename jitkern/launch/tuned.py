"""A launch function together with the configurations that `.tune` lists for it.

A process that finds its choices in the cache imports this module, and not the one that measures.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from typing import Any

import torch

Function = Callable[..., Any]


class Tuned:
    """A launch function that has configurations; a call of it sets `k.config`.

    configurations: returns the configurations for the op's inputs. key: returns the value that a
    choice depends on besides the dtypes of the inputs.
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
        """The code object of the launch function."""
        return self.launch.__code__


def parts_of(function: Function) -> tuple[Function, ...]:
    """Return the functions that belong to a launch function: itself, and those of `.tune`."""
    if not isinstance(function, Tuned):
        return (function,)
    key = (function.key,) if function.key else ()
    return function.launch, function.configurations, *key


def changed(function: Function, change: Callable[[Function], Function]) -> Function:
    """Return a launch function with `change` applied to each of its parts."""
    if isinstance(function, Tuned):
        return Tuned(*map(change, parts_of(function)))
    return change(function)


def model_of(device: torch.device) -> str:
    """Return a device's model name: a configuration is equally quick on all devices of a model."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()


@functools.cache
def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model n")]
    except OSError:
        names = []
    return next(iter(names), platform.processor() or platform.machine())
