"""Packages that launch `@triton.jit` functions themselves, through the cache and without an edit.

Triton launches by the method `run` of `JITFunction`, `Autotuner` and `Heuristics`. While a patch
holds, these methods ask first whether the function belongs to a patched package.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from jitkern import source
from jitkern.errors import CompileError, DeclarationError, LaunchError, TargetError
from jitkern.raw.from_triton import TritonKernel, triton_kernel

_REFUSALS = (CompileError, DeclarationError, LaunchError, TargetError)
_log = logging.getLogger(__name__)
_patches: list[TritonPatch] = []


class TritonPatch(AbstractContextManager["TritonPatch"]):
    """A patch that `patch_triton` has made: the functions launched so far, and the way back.

    `taken`: names of the functions that the cache serves, as `module:name`; `module:name.fn` is one
    whose decorators are left to their own class, which also chooses its configuration. `refused`:
    the functions of which Triton launches all or some, with the reasons.
    """

    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages
        self.refused: dict[str, str] = {}
        self._kernels: weakref.WeakKeyDictionary[Any, TritonKernel | None] = (
            weakref.WeakKeyDictionary()
        )
        self._served: weakref.WeakSet[Any] = weakref.WeakSet()  # functions launched at least once

    def __repr__(self) -> str:
        return (
            f"<TritonPatch of {', '.join(self.packages)}: {len(self.taken)} functions taken, "
            f"{len(self.refused)} refused>"
        )

    @property
    def taken(self) -> list[str]:
        """The functions that the cache serves."""
        return sorted(_name_of(function) for function, kernel in self._kernels.items() if kernel)

    def undo(self) -> None:
        """Let Triton launch the functions again; a second time, do nothing."""
        if self in _patches:
            _patches.remove(self)
            if not _patches:
                for kind in _launchers():
                    kind.run = kind.run.__wrapped__

    def __exit__(self, *_: object) -> None:
        self.undo()

    def kernel_of(self, function: Any) -> TritonKernel | None:
        """Return the kernel of a function, with decorators or without; None if Triton runs it."""
        try:
            return self._kernels[function]
        except KeyError:
            pass
        kernel = None
        name = source.triton_decorators.inner(function).__module__
        if any(name == package or name.startswith(f"{package}.") for package in self.packages):
            try:
                kernel = triton_kernel(function)
            except _REFUSALS as e:
                self.refuse(function, e)
        self._kernels[function] = kernel
        return kernel

    def launch(self, function: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Launch a function through the cache, and return the kernel, or NotImplemented."""
        kernel = self.kernel_of(function)
        if kernel is None:
            return NotImplemented
        try:
            launched = kernel(*args, **keywords)
        except _REFUSALS as e:
            self.refuse(function, e)
            return NotImplemented
        self._served.add(function)
        if launched and launched.choice is not None:
            tuner: Any = function
            while not hasattr(tuner, "configs"):  # below `@triton.heuristics`
                tuner = tuner.fn
            tuner.best_config = tuner.configs[launched.choice]  # as Triton's own launch does
        return launched or kernel  # both can be launched again

    def refuse(self, function: Any, why: Exception) -> None:
        """Leave a function to Triton: this launch if others were served, else from now on.

        Of a function with decorators Triton runs these, and comes back for the function below.
        """
        name = _name_of(function)
        if function not in self._served:
            self._kernels[function] = None
        if not source.triton_decorators.is_bare(function):
            _log.info("the decorators of %s are left to Triton: %s", name, why)
        elif name not in self.refused:
            self.refused[name] = str(why)
            what = f"a launch of {name}" if function in self._served else name
            _log.warning("%s is left to Triton, which compiles it in each process: %s", what, why)


def patch_triton(*packages: str | ModuleType) -> TritonPatch:
    """Launch the `@triton.jit` functions of packages through the cache, without changing them.

    packages: modules or their names, such as "liger_kernel"; with their submodules, whether they
        are imported already or later.

    A function that jitkern does not take, or a launch that it refuses, goes to Triton as before,
    with a warning; `refused` of the result lists them. A launch returns a kernel to be launched
    again, as Triton's does: it has `metadata`, `n_regs` and `n_spills`, and no more. A `warmup`,
    `wrap_triton` and `torch.compile` go to Triton as before. Holds until `undo()`, or to the end of
    a `with`. Raises TypeError for what is not a package.
    """
    names = tuple(p.__name__ if isinstance(p, ModuleType) else p for p in packages)
    if not names or not all(str(name).replace(".", "").isidentifier() for name in names):
        raise TypeError(f"patch_triton takes packages: modules or their names, got {packages}")
    for name in names:
        top = name.partition(".")[0]
        if top not in sys.modules and not importlib.util.find_spec(top):
            _log.warning("patch_triton: there is no package `%s` here; is it misspelt?", name)
    patch = TritonPatch(names)
    if not _patches:
        for kind in _launchers():
            kind.run = _through_the_cache(kind.run)
    _patches.append(patch)
    return patch


def _launchers() -> tuple[Any, ...]:
    """The classes of Triton that launch."""
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    return JITFunction, Autotuner, Heuristics


def _through_the_cache(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(function: Any, /, *args: Any, grid: Any, warmup: bool = False, **keywords: Any) -> Any:
        for patch in () if warmup else _patches:
            launched = patch.launch(function, args, {"grid": grid, **keywords})
            if launched is not NotImplemented:
                return launched
        return original(function, *args, grid=grid, warmup=warmup, **keywords)

    return run


def _name_of(function: Any) -> str:
    module = source.triton_decorators.inner(function).__module__
    return f"{module}:{source.triton_function.name_of(function)}"
