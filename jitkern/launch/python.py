"""Running a launch function in Python: its first argument `k` compiles, checks and starts kernels.

`k.name[{"T": x.dtype}](y, x, n, grid=rows, block=256)` is one launch. The same function also runs
with a `k` that launches nothing (the fake) and with one that only notes the variants it would use
(prewarm).
"""

from __future__ import annotations

import functools
import math
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from jitkern import config, jit
from jitkern.config import Config
from jitkern.errors import (
    CompilerNotFound,
    DeclarationError,
    JitkernError,
    LaunchError,
    NotCached,
    TargetError,
)
from jitkern.kernel import TRITON_OPTIONS, Constant, Source, Variant
from jitkern.launch.arguments import SHORT, values_of
from jitkern.target import Target

_KEYWORDS = {"grid", "block", "smem", "cluster", "cooperative", "pdl", *TRITON_OPTIONS}


class Call(NamedTuple):
    """One launch that a launch function asks for."""

    function: str
    template: tuple[tuple[str, Any], ...]
    args: tuple[Any, ...]
    keywords: dict[str, Any]


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


def variant_of(
    op: str, source: Source, call: Call, where: str = ""
) -> tuple[Variant, tuple[int, ...] | None]:
    """The variant that a call needs, and which arguments the compiled kernel takes (None: all).

    where: what errors name, by default the op.
    """
    where = where or op
    template = tuple((name, _constant(where, name, value)) for name, value in call.template)
    if source.kind != "triton":
        return Variant(op, source, call.function, template), None
    from jitkern.launch.triton import functions

    path = source.paths[0]
    if not path.is_file():
        raise DeclarationError(f"{where}: the kernel source {path} does not exist")
    declared = functions(str(path), path.stat().st_mtime_ns).get(call.function)
    if declared is None:
        raise LaunchError(f"{where}: {path} has no @triton.jit function `{call.function}`")
    given = dict(template)
    template += tuple(item for item in declared.defaults if item[0] not in given)
    names = [name for name in declared.parameters if name not in dict(template)]
    unset = [name for name in names if name in declared.constexprs]
    unknown = [name for name, _ in template if name not in declared.parameters]
    if unset or unknown or len(names) != len(call.args):
        raise LaunchError(
            f"{where}: `{call.function}({', '.join(declared.parameters)})` got {len(call.args)} "
            f"arguments and the constexprs {[name for name, _ in template]}; missing or unknown: "
            f"{unset + unknown or 'a number of arguments'}"
        )
    signature = tuple(
        _triton_class(
            arg,
            special=name not in declared.plain,
            aligned=name not in declared.plain | declared.unaligned,
        )
        for name, arg in zip(names, call.args)
    )
    options = tuple(
        (name, int(call.keywords[name])) for name in TRITON_OPTIONS if name in call.keywords
    )
    kept = tuple(i for i, kind in enumerate(signature) if kind not in ("1", "None"))
    return Variant(op, source, call.function, template, signature, options), kept


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
        classes: tuple[Any, ...] = ()
        if self.source.kind == "triton":
            variant, _ = variant_of(self.op, self.source, call, where)
            classes = (variant.signature, variant.options)
        kinds = tuple(type(value) for _, value in call.template)  # 1, 1.0 and True are equal
        memo = (call.function, call.template, kinds, classes)
        if memo not in self._memo:
            variant, kept = variant_of(self.op, self.source, call, where)
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


@functools.cache
def with_light_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a `torch` whose `_check` does not import sympy (0.7 s on first use).

    Functions of the same module that it calls see that `torch` too. Made at its first call, when
    the module has bound all its names.
    """
    if (
        not isinstance(function, types.FunctionType)
        or function.__globals__.get("torch") is not torch
    ):
        return function
    module = function.__globals__
    scope = {**module, "torch": _LightTorch("torch")}
    for name, value in module.items():
        if isinstance(value, types.FunctionType) and value.__globals__ is module:
            scope[name] = _rebound(value, scope)
    return _rebound(function, scope)


def _rebound(function: types.FunctionType, scope: dict[str, Any]) -> types.FunctionType:
    copy = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class _LightTorch(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        setattr(self, name, value)
        return value

    @staticmethod
    def _check(condition: Any, message: Callable[[], object] | None = None) -> None:
        if not isinstance(condition, bool):
            torch._check(condition, message)
        elif not condition:
            raise RuntimeError(
                str(message()) if message else "Expected cond to be True, but got False"
            )


def _constant(op: str, name: str, value: Any) -> Constant:
    if isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, torch.dtype) and value in SHORT:
        return SHORT[value]
    raise LaunchError(
        f"{op}: template argument {name}={value!r} must be a dtype, bool, int or finite float"
    )


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


def _triton_class(arg: Any, *, special: bool, aligned: bool) -> str:
    """Triton's class of an argument: type, and where specialised on, ==1 and divisible by 16."""
    if arg is None:
        return "None"
    if isinstance(arg, torch.Tensor):
        return f"*{SHORT.get(arg.dtype, '')}" + (
            ":16" if aligned and _address(arg) % 16 == 0 else ""
        )
    if isinstance(arg, bool):
        return "bool"
    if isinstance(arg, int):
        if special and arg == 1:
            return "1"
        kind = "i32" if -(2**31) <= arg < 2**31 else "i64" if arg < 2**63 else "u64"
        return kind + (":16" if aligned and arg % 16 == 0 else "")
    if isinstance(arg, float):
        return "f32"
    raise LaunchError(
        f"a Triton kernel takes tensors, numbers and None, not {type(arg).__name__} `{arg}`"
    )


def _address(tensor: torch.Tensor) -> int:
    """Where its data begins; a meta tensor's is as aligned as a fresh allocation would be."""
    if tensor.device.type == "meta":
        return int(tensor.storage_offset()) * tensor.element_size()
    return tensor.data_ptr()
