"""A launch function together with the configurations that `.tune` lists for it.

A process that finds its choices in the cache imports this module, and not the one that measures.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from jitkern.named_tuple import NamedTuple

if TYPE_CHECKING:
    from jitkern.calls.signature import Signature

Function = Callable[..., Any]
Launch = Callable[[], object]


class Tuning(NamedTuple):
    """A declaration by `.tune`: the configurations, and how they are measured.

    configurations: returns the configurations for the op's inputs. key: returns the value that a
    choice depends on besides the dtypes of the inputs. inputs: returns the arguments to measure
    with. cold: whether each measured run begins with a cache (the L2 of a GPU) without its data.
    """

    configurations: Function
    key: Function | None = None
    inputs: Function | None = None
    cold: bool = False


class Tuned:
    """A launch function that has configurations; a call of it sets `k.config`.

    signature: of the op, which says which arguments a launch changes.
    """

    def __init__(self, launch: Function, tuning: Tuning, signature: Signature) -> None:
        self.launch = launch
        self.tuning = tuning
        self.signature = signature

    def __call__(self, k: Any, *args: Any, **kwargs: Any) -> Any:
        k._begin(self, args, kwargs)
        return self.launch(k, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tuned) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(parts_of(self))  # without `inputs`, which may be an object that has no hash

    def _identity(self) -> tuple[Any, ...]:
        return self.launch, self.tuning, self.signature.schema

    @property
    def __code__(self) -> Any:
        """The code object of the launch function."""
        return self.launch.__code__


def parts_of(function: Function) -> tuple[Function, ...]:
    """Return the functions that decide what a launch function does: itself, and those of `.tune`.

    The function `inputs` is none of them: no call runs it once a configuration is chosen.
    """
    if not isinstance(function, Tuned):
        return (function,)
    tuning = function.tuning
    return function.launch, tuning.configurations, *((tuning.key,) if tuning.key else ())


def changed(function: Function, change: Callable[[Function], Function]) -> Function:
    """Return a launch function with `change` applied to each of its parts, in their order."""
    if isinstance(function, Tuned):
        launch, configurations, *key = map(change, parts_of(function))
        tuning = function.tuning._replace(configurations=configurations, key=next(iter(key), None))
        return Tuned(launch, tuning, function.signature)
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
