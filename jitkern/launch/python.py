"""Running a launch function in Python: its first argument `k` compiles, checks and starts kernels.

`k.name[{"T": x.dtype}](y, x, n, grid=rows, block=256)` is one launch. The same function also runs
with a `k` that launches nothing (the fake) and with one that only notes the variants it would use
(prewarm).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from jitkern import config, jit
from jitkern.config import Config
from jitkern.errors import CompilerNotFound, JitkernError, LaunchError, NotCached, TargetError
from jitkern.kernel import TRITON_OPTIONS, Source, Variant
from jitkern.launch.arguments import values_of
from jitkern.launch.variants import Call, variant_of
from jitkern.target import Target

_KEYWORDS = {"grid", "block", "smem", "cluster", "cooperative", "pdl", *TRITON_OPTIONS}


class Kernels:
    """The `k` of a launch function; `launched` counts what it started."""

    def __init__(self, start: Callable[[Call], None]) -> None:
        self._start = start
        self.launched = 0

    def __getattr__(self, name: str) -> Function:
        return Function(self, name, ())

    def _launch(self, call: Call) -> None:
        if not _KEYWORDS.issuperset(call.keywords):
            unknown = min(set(call.keywords) - _KEYWORDS)
            raise LaunchError(f"`{call.function}` was called with the unknown keyword `{unknown}`")
        self._start(call)
        self.launched += 1


class Function:
    """`k.name`, and `k.name[template arguments]`; calling it launches."""

    def __init__(self, kernels: Kernels, name: str, template: tuple[tuple[str, Any], ...]) -> None:
        self._kernels = kernels
        self._name = name
        self._template = template

    def __getitem__(self, template: Mapping[str, Any]) -> Function:
        return Function(self._kernels, self._name, tuple(template.items()))

    def __call__(self, *args: Any, **keywords: Any) -> None:
        self._kernels._launch(Call(self._name, self._template, args, keywords))


def ignore(_: Call) -> None:
    """The start of a fake: launches nothing."""


class Runner:
    """Starts kernels of one source on one device, remembering each variant's function."""

    def __init__(
        self,
        op: str,
        source: Source,
        target: Target,
        device: torch.device,
    ) -> None:
        self.op = op
        self.source = source
        self.target = target
        self.device = device
        self._memo: dict[tuple[Any, ...], tuple[Any, tuple[int, ...] | None]] = {}
        self._refused: dict[Variant, tuple[Config, type[JitkernError], str]] = {}
        self._claimed: set[Variant] = set()
        self._lock = threading.Lock()

    def __call__(self, call: Call) -> None:
        function, kept = self._function(call)
        what = f"`{call.function}` of {self.op} for {self.target}"
        args = call.args if kept is None else [call.args[i] for i in kept]
        values = values_of(what, function.parameters, args, self.device)
        if self.source.kind == "cc":
            function.call(values)
        else:
            self._launch_cuda(function, values, call.keywords, what)

    def _function(self, call: Call) -> tuple[Any, tuple[int, ...] | None]:
        where = f"{self.op} for {self.target}"
        kinds = tuple(type(value) for _, value in call.template)  # 1, 1.0 and True are equal
        memo: tuple[Any, ...] = (call.function, call.template, kinds)
        found = None
        if self.source.kind == "triton":
            found = variant_of(self.op, self.source, call, where)
            memo += (found[0].signature, found[0].options)
        if memo not in self._memo:
            variant, kept = found or variant_of(self.op, self.source, call, where)
            self._memo[memo] = self.loaded(variant), kept
        return self._memo[memo]

    def loaded(self, variant: Variant) -> Any:
        """What `variant` compiles to. That it cannot be had is remembered under these settings."""
        settings = config.current()
        known = self._refused.get(variant)
        if known and known[0] is settings:
            raise known[1](known[2], variant=variant)
        try:
            may_compile = settings.compile != "background"
            return jit.loaded(variant, self.target, may_compile=may_compile)
        except (CompilerNotFound, TargetError, NotCached) as e:
            e.variant = variant
            if not isinstance(e, NotCached):
                self._refused[variant] = settings, type(e), str(e)
            raise

    def extension(self) -> Any:
        """The function of an Extension."""
        memo = ("extension",)
        if memo not in self._memo:
            self._memo[memo] = self.loaded(Variant(self.op, self.source)), None
        return self._memo[memo][0]

    def claim(self, variant: Variant) -> bool:
        """True for the first caller: it is the one to build the variant in the background."""
        with self._lock:
            first = variant not in self._claimed
            self._claimed.add(variant)
            return first

    def _launch_cuda(
        self, function: Any, values: list[float | None], keywords: dict[str, Any], what: str
    ) -> None:
        grid = _three(what, "grid", keywords.get("grid"))
        meta = function.meta
        cluster = _three(what, "cluster", keywords["cluster"]) if "cluster" in keywords else None
        if self.source.kind == "triton":
            block = (meta["block"], 1, 1)
            smem = meta["smem"]
            if meta["cluster"] > 1:
                cluster = (meta["cluster"], 1, 1)
                grid = (grid[0] * meta["cluster"], grid[1], grid[2])
        else:
            block = _three(what, "block", keywords.get("block"))
            smem = keywords.get("smem", 0)
        index = self.device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        before = torch.cuda._exchange_device(index)
        try:
            function.launch(
                values, index, stream, grid, block, smem, cluster,
                cooperative=keywords.get("cooperative", False) or meta.get("cooperative", False),
                pdl=keywords.get("pdl", False) or meta.get("pdl", False),
            )  # fmt: skip
        finally:
            torch.cuda._maybe_exchange_device(before)


def _three(what: str, name: str, value: Any) -> tuple[int, int, int]:
    sizes = (
        (value,)
        if isinstance(value, int)
        else tuple(value)
        if isinstance(value, (tuple, list, torch.Size))
        else ()
    )
    if not 1 <= len(sizes) <= 3 or not all(
        isinstance(size, int) and 0 <= size < 2**31 for size in sizes
    ):
        raise LaunchError(f"{what}: `{name}` must be one to three sizes, got {value!r}")
    return (*sizes, 1, 1)[:3]
