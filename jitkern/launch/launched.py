"""What a launch of a Triton kernel returns: the compiled kernel, to be launched again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple  # quicker to create than jitkern.named_tuple's

import torch

from jitkern.errors import LaunchError
from jitkern.launch.call import Call
from jitkern.launch.declared import declared_in
from jitkern.launch.geometry import Compiled
from jitkern.target import Target

_LOCAL_BYTES, _REGISTERS = 3, 4  # CUfunction_attribute
_WARP, _WORD = 32, 4  # threads, and bytes


class KernelMetadata(NamedTuple):
    """The `metadata` of a kernel that Triton compiled, as far as the cache keeps it."""

    name: str
    shared: int
    num_warps: int
    num_ctas: int
    launch_cooperative_grid: bool
    launch_pdl: bool

    def __getattr__(self, name: str) -> Any:
        raise _lacks("the `metadata` of a kernel that jitkern launches", name, self._fields)


class LaunchedKernel:
    """A compiled kernel as Triton's launches return it: `kernel[grid](*arguments)` launches again.

    As with Triton's, the arguments are those of all parameters, by position. What is passed for a
    constexpr does not count, and constexprs at the end may be left out.

    start: launches what it is given, on `device`. call: the launch that has compiled it.
    choice: the number of its configuration, if it was chosen by `@triton.autotune`.
    """

    _what = "a kernel"

    def __init__(
        self, start: Callable[[Call], object], device: torch.device, call: Call, compiled: Compiled,
        target: Target,
    ) -> None:  # fmt: skip
        variant, what = compiled.variant, compiled.what
        compiled_in = dict(variant.template)
        self._what, self._start, self._device, self._compiled = what, start, device, compiled
        declared = declared_in(what, variant.source, variant.function, target)
        self.choice = None if call.config is None else declared.configs.index(call.config)
        self._names = declared.parameters
        self._passed = [i for i, name in enumerate(self._names) if name not in compiled_in]
        options = {name: value for name, value in call.keywords.items() if name != "grid"}
        self._call = call._replace(args=(), keywords=options)  # without tensors

    def __repr__(self) -> str:
        return f"<LaunchedKernel {self._what}>"

    def __getattr__(self, name: str) -> Any:
        has = ("kernel[grid](*arguments)", "metadata", "n_regs", "n_spills")
        raise _lacks(f"{self._what}, as jitkern launches it,", name, has)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Any, /, *args: Any, stream: int | None = None) -> None:
        least = max(self._passed, default=-1) + 1
        if not least <= len(args) <= len(self._names):
            raise LaunchError(
                f"{self._what} is launched again with {len(args)} arguments: pass all of "
                f"({', '.join(self._names)}) by position, constexprs too"
            )
        if stream not in (None, torch._C._cuda_getCurrentRawStream(self._device.index)):
            raise LaunchError(
                f"{self._what} is launched again with stream={stream}, which is not the current "
                "stream: launch it within `torch.cuda.stream(...)`"
            )
        keywords = {**self._call.keywords, "grid": grid}
        passed = tuple([args[i] for i in self._passed])
        self._start(self._call._replace(args=passed, keywords=keywords))

    @functools.cached_property
    def metadata(self) -> KernelMetadata:
        """The name of the kernel, and what a launch takes."""
        meta = self._compiled.meta
        return KernelMetadata(
            meta["symbol"], meta["smem"], meta["block"] // _WARP, meta["cluster"],
            meta.get("cooperative", False), meta.get("pdl", False),
        )  # fmt: skip

    @property
    def n_regs(self) -> int:
        """The registers of a thread. Raises LaunchError."""
        return self._attribute(_REGISTERS)

    @property
    def n_spills(self) -> int:
        """The words of a thread in local memory, as Triton counts them. Raises LaunchError."""
        return self._attribute(_LOCAL_BYTES) // _WORD

    def _attribute(self, number: int) -> int:
        found: int = self._compiled.function.attribute(number, self._device.index)
        return found


def _lacks(what: str, name: str, has: Iterable[str]) -> AttributeError:
    return AttributeError(
        f"{what} has no `{name}`; it has {', '.join(has)}: for the rest of a compiled kernel, have "
        "Triton launch the function, outside of `jitkern.patch_triton` and `jitkern.triton_kernel`"
    )
