"""The first argument `k` of a launch function, for launches, memory and device facts.

`k.name[{"T": x.dtype}](y, x, n, grid=rows, block=256)` is one launch. The same function runs with a
`k` that starts kernels (see `runner`), with one that launches nothing (the fake), and with one that
only notes the variants it would use (prewarm).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from jitkern import launch
from jitkern.errors import DeclarationError, LaunchError, defined_at, meant
from jitkern.launch import autotune
from jitkern.launch.call import Call
from jitkern.launch.resources.device_facts import FACTS
from jitkern.launch.resources.device_view import AbsentDevice, Device
from jitkern.launch.resources.tensor_maps import TensorMap
from jitkern.launch.tuned import Tuned
from jitkern.source.triton_decorators import TRITON_OPTIONS

_KEYWORDS = {
    "grid", "block", "smem", "cluster", "cooperative", "pdl", "carveout", *TRITON_OPTIONS
}  # fmt: skip
Choose = Callable[[Tuned, Sequence[Any], Mapping[str, Any]], Mapping[str, Any]]


def first(tuned: Tuned, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first configuration, for runs that launch nothing, in which all are equivalent."""
    return autotune.configs_of(tuned, args, kwargs)[0]


class LeftToReference(Exception):
    """Raised by a launch function if only the reference can compute this call."""


class Kernels:
    """The `k` of a launch function; `launched` counts the kernels it started.

    `k.config` is the configuration of `.tune` for this call: the one that `choose` returns, by
    default the choice of the Runner, else the first. `k.multiprocessors` and the like are facts of
    `device`: by default the Runner's, else one that is not here. `k.fake` tells the op's fake, of
    which only the results count, from all other runs.
    """

    launched = 0
    _call: tuple[Tuned, Sequence[Any], Mapping[str, Any]] | None = None
    _config: Mapping[str, Any] | None = None
    _taken: Mapping[bool, tuple[Any, Any]] = MappingProxyType({})  # the last part of each workspace

    def __init__(
        self, start: Callable[[Call], object], choose: Choose | None = None,
        device: Device | None = None,
    ) -> None:  # fmt: skip
        self._start = start
        self._choose = choose
        self._device = device

    @property
    def fake(self) -> bool:
        """Whether this run is the op's fake."""
        return self._start is ignore

    def __getattr__(self, name: str) -> Any:  # no property: it would hide an AttributeError
        if name in FACTS:
            return self._asked().fact(name)
        return self._configuration() if name == "config" else KernelFunction(self, name, ())

    def __getitem__(self, name: str) -> KernelFunction:
        """Return `k.<name>`, for a name that is not written in the launch function."""
        return KernelFunction(self, name, ())

    def workspace(
        self,
        bytes: int,  # noqa: A002
        *,
        zeroed: bool = True,
        dtype: torch.dtype = torch.uint8,
    ) -> torch.Tensor:
        """Return `bytes` of memory that stays from call to call, for the kernels of this call.

        The memory belongs to the stream (on the CPU: to the thread), and other launch functions use
        it, too. With `zeroed` it is zeroed once, when it is made: each kernel finds zeros, and must
        leave zeros behind. Without, a kernel finds anything. Nothing is kept from one kernel to the
        next: what a second kernel of the call shall read goes to `torch.empty`. Several requests of
        one call get memory apart. A captured graph has memory of its own.

        Returns a tensor of one dimension, aligned to 256 bytes on a GPU and to 64 on the CPU.
        Raises LaunchError for a size that is negative or no multiple of the dtype's.
        """
        start: Any = 0
        if zeroed in self._taken:
            start, size = self._taken[zeroed]
            start = start + (size + 255) // 256 * 256
        memory: torch.Tensor = self._asked().workspace(start, bytes, dtype, zeroed=zeroed)
        self._taken = {**self._taken, zeroed: (start, bytes)}
        return memory

    def tensor_map(
        self, x: torch.Tensor, box: Sequence[int], *, swizzle: str = "none",
        l2_promotion: str = "none", oob_fill: str = "zeros",
    ) -> TensorMap:  # fmt: skip
        """Return a map of a tensor for TMA, for a `const __grid_constant__ CUtensorMap` parameter.

        box: the sizes of a tile in elements, in the order of the tensor's dimensions: the kernel
            names its coordinates in reverse, the last dimension first.
        swizzle: the span in which 16-byte pieces are permuted: "none", "32B", "64B" or "128B".
        l2_promotion: what L2 fetches at once: "none", "64B", "128B" or "256B".
        oob_fill: what elements beyond the tensor become: "zeros" or "nan".

        The tensor has 1 to 5 dimensions and no size 0, a last stride of 1, other strides and an
        address that are multiples of 16 bytes; the box is at most 256 in each dimension, and its
        last size a multiple of 16 bytes, at most the swizzle's span. Raises LaunchError otherwise,
        and for a device without TMA (before sm_90).
        """
        made: TensorMap = self._asked().tensor_map(x, box, swizzle, l2_promotion, oob_fill)
        return made

    @property
    def has_workspace(self) -> bool:
        """Whether the launch function has requested a workspace."""
        return bool(self._taken)

    def _asked(self) -> Device:
        if self._device is None:
            self._device = getattr(self._start, "present", None) or AbsentDevice()
        return self._device

    def tables(
        self, *lists: Sequence[torch.Tensor], chunk: int = 65536, most: int = 1024,
        dense: bool = False,
    ) -> list[Any]:  # fmt: skip
        """Return tables of lists of tensors, each of which is one argument of a launch.

        A table has up to `most` tensors of one dtype: `.dtype`, `.count`, `.capacity` (32, 128, 512
        or 1024, for a template argument), `.chunks` (the pieces of `chunk` elements of all its
        tensors, for the grid), `.aligned(16)`. Of several lists whose i-th tensors belong together,
        the result has a tuple of tables, one for each list.

        The tensors are contiguous, or `dense`: without gaps, in any order. Raises LaunchError for
        lists that do not belong together; the launch does, for tensors that cannot be passed.
        """
        tables = launch.resources.tables.tables_of(lists, chunk, most, dense=dense)
        for one in tables if self.fake else ():  # nothing else checks what a reference computes
            for table in one if isinstance(one, tuple) else (one,):
                table.check(lists[0][0].device)
        return tables

    def leave_to_reference(self) -> None:
        """End the launch function: the reference of the op computes this call."""
        raise LeftToReference

    def _begin(self, tuned: Tuned, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note the call of a launch function that has configurations, before it runs."""
        self._call, self._config = (tuned, args, kwargs), None

    def _configuration(self) -> Mapping[str, Any]:
        if self._call is None:
            where = getattr(self._start, "where", "an op")
            raise DeclarationError(
                f"the launch function of {where} reads `k.config`, and `.tune` lists no "
                "configurations for this kind of source: add `.tune` for this kind"
            )
        if self._config is None:
            choose: Any = self._choose or getattr(self._start, "choose", first)
            self._config = MappingProxyType({**choose(*self._call)})
        return self._config


class KernelFunction:
    """The object `k.name` or `k.name[template arguments]`, whose call is a launch."""

    __slots__ = ("_kernels", "_name", "_template")

    def __init__(self, kernels: Kernels, name: str, template: tuple[tuple[str, Any], ...]) -> None:
        self._kernels = kernels
        self._name = name
        self._template = template

    def __getitem__(self, template: Mapping[str, Any]) -> KernelFunction:
        try:
            items = tuple(template.items())
        except AttributeError:
            raise LaunchError(
                f"`{self._name}[…]` takes template arguments by name, such as {{'T': x.dtype}}, "
                f"and got a {type(template).__name__}; the grid is a keyword of the call: "
                f"`k.{self._name}(…, grid=…)`"
            ) from None
        return KernelFunction(self._kernels, self._name, items)

    def __call__(self, *args: Any, **keywords: Any) -> None:
        if keywords and not _KEYWORDS.issuperset(keywords):
            unknown = min(set(keywords) - _KEYWORDS)
            raise LaunchError(
                f"`{self._name}` was called with the unknown keyword `{unknown}`; there are: "
                f"{', '.join(sorted(_KEYWORDS))}{meant(unknown, _KEYWORDS)}; constexprs and other "
                f"template arguments stand in brackets: `k.{self._name}[{{'{unknown}': …}}](…)`"
            )
        kernels = self._kernels
        kernels._start(Call(self._name, self._template, args, keywords))
        kernels.launched += 1


def ignore(_: Call) -> None:
    """Launch nothing: the start of a fake."""


def check_result(
    op: str, function: Any, kinds: str, result: Any, role: str = "launch function"
) -> None:
    """Raise LaunchError unless a function returned tensors of these kinds.

    kinds: `Signature.results`; results that are not tensors are for Torch to check. role: what the
    function is to the op.
    """
    wanted = len(kinds)
    if "?" in kinds or (wanted == 1 and isinstance(result, torch.Tensor)):
        return
    several = wanted != 1 and isinstance(result, (tuple, list))
    results = result if several else () if result is None and not wanted else (result,)
    wrong = [
        i for i, (value, kind) in enumerate(zip(results, kinds))
        if not (isinstance(value, torch.Tensor) or (value is None and kind == "t"))
    ]  # fmt: skip
    if len(results) == wanted and not wrong:
        return
    kind = _kind_of(result)
    if len(results) == wanted > 1:
        kind = f"{_kind_of(results[wrong[0]])} as result {wrong[0] + 1}"
    schema = {0: "nothing is returned", 1: "one tensor"}.get(wanted, f"{wanted} tensors")
    raise LaunchError(
        f"{op}: {defined_at(function)}its {role} returned {kind}, and its schema says "
        f"{schema}: "
        + ("does it lack a `return`?" if result is None else "return that, or correct the schema")
    )


def _kind_of(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, (tuple, list)):
        name = type(value).__name__
        return f"{len(value)} values" if len(value) != 1 else f"a {name} of one value"
    if isinstance(value, torch.Tensor):
        return "a tensor"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
