"""State that tests give a process and have it forget: settings, a processor, a driver, answers.

No other module imports this one, and jitkern promises nothing of it. `patch` is the fixture
`monkeypatch` of pytest, which undoes each of these after the test.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from jitkern import config, loading, target
from jitkern.config import Config
from jitkern.jit import active_cache
from jitkern.launch.resources import workspaces
from jitkern.launch.runner import Runner
from jitkern.loading import cuda_driver
from jitkern.op import recorder
from jitkern.remote import fetch
from jitkern.runtime import binding

if TYPE_CHECKING:
    from jitkern.op.op import Op
    from jitkern.trace.program import Program


class Patch(Protocol):
    """Sets attributes until a test ends."""

    def setattr(self, target: object, name: str, value: object) -> None: ...


def set_settings(patch: Patch, settings: Config | None = None) -> None:
    """Give the process these settings: by default, those that its environment has now.

    `config.using` gives them to one thread alone.
    """
    patch.setattr(config, "_current", settings or Config.from_env())


def set_processor(patch: Patch, flags: str) -> None:
    """Have the system say that its processor has these flags."""
    patch.setattr(target, "processor", lambda: {"flags": flags})


def set_driver(patch: Patch, driver: ctypes.CDLL) -> None:
    """Replace CUDA's driver, which was not used so far, by a library."""
    patch.setattr(cuda_driver, "_driver", lambda: driver)
    asked = cuda_driver.device_attribute.__wrapped__
    patch.setattr(cuda_driver, "device_attribute", functools.cache(asked))


def set_launch(patch: Patch, of: Runner | type[Runner], launch: Callable[..., object]) -> None:
    """Have a runner, or all of them, start kernels by `launch(call)`."""
    patch.setattr(of, "_start", launch)


def count_recorded_calls_from(number: int) -> None:
    """Have the next call that Python records for Autograd be of this number."""
    recorder._numbers = itertools.count(number)


def recorded_calls() -> int:
    """Return how many calls Python has recorded, and count one more."""
    return next(recorder._numbers) - 1


def forget_caches() -> None:
    """Have the next call open its caches again."""
    active_cache._open_cache.cache_clear()


def forget_remotes(patch: Patch) -> None:
    """Forget all remotes, as after the start of this process."""
    patch.setattr(fetch, "_remotes", {})


def forget_samples(op: Op[Any]) -> None:
    """Have an op draw its samples again."""
    op._drawn = None


def forget_workspaces(patch: Patch) -> None:
    """Have this process have no workspace on a GPU, as after its start."""
    patch.setattr(workspaces, "_blocks", {})


def held_locks() -> list[str]:
    """Return the names of the locks that the threads of this process have for what they load."""
    return [*loading._locks]


def loaded_program(
    program: Program, passed: Sequence[list[str]], kernels: ctypes.Array[Any], guard: Any
) -> ctypes.Structure:
    """Return a program with its kernels and guard as C takes it.

    passed: the codes of what is passed to each kernel.
    """
    in_c = binding._in_c(program, passed)
    parts = in_c, kernels, guard
    loaded = binding._LoadedProgram(*map(ctypes.addressof, parts), 0)
    loaded.alive = parts
    return loaded
