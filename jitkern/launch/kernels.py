"""Run a launch function in Python: its first argument `k` compiles, checks and starts kernels.

`k.name[{"T": x.dtype}](y, x, n, grid=rows, block=256)` is one launch. The same function also runs
with a `k` that launches nothing (the fake) and with one that only notes the variants it would use
(prewarm).
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple  # quicker to create than jitkern.named_tuple's

import torch

from jitkern import after_fork, config, jit, launch
from jitkern.config import Config
from jitkern.errors import (
    CompilerNotFound,
    DeclarationError,
    JitkernError,
    LaunchError,
    NotCached,
    TargetError,
    defined_at,
)
from jitkern.launch import autotune
from jitkern.launch.arguments import checked
from jitkern.launch.autotune import Choice, Situation
from jitkern.launch.call import Call, checked_address, expanded, variant_of
from jitkern.launch.packing import Pack, packed, packs_of
from jitkern.launch.resources.device_facts import FACTS
from jitkern.launch.resources.device_view import AbsentDevice, Device, PresentDevice
from jitkern.launch.resources.tensor_maps import TensorMap
from jitkern.launch.symbols import Unsupported
from jitkern.launch.tuned import Launch, Tuned
from jitkern.source import triton_text
from jitkern.source.dtypes import table_of
from jitkern.source.kinds import HOST, TRITON_OPTIONS, Source, Variant
from jitkern.target import Target

_PLAIN = (torch.Tensor, torch.nn.Parameter, int, float, bool, type(None))  # no tables
RETRY = 60.0  # seconds after which a background build that failed is tried again
MAX_THREADS = 1024  # in a block, on every GPU
_KEYWORDS = {
    "grid", "block", "smem", "cluster", "cooperative", "pdl", "carveout", *TRITON_OPTIONS
}  # fmt: skip
Choose = Callable[[Tuned, Sequence[Any], Mapping[str, Any]], Mapping[str, Any]]


def first(tuned: Tuned, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first configuration, for runs that launch nothing, in which all are equivalent."""
    return autotune.configs_of(tuned, args, kwargs)[0]


class Kernels:
    """The `k` of a launch function; `launched` counts the kernels it started.

    `k.config` is the configuration of `.tune` for this call: the one that `choose` returns, by
    default the choice of the Runner, else the first. `k.multiprocessors` and the like are facts of
    `device`: by default the Runner's, else one that is not here. `k.fake` tells the op's fake, of
    which only the results count, from all other runs.
    """

    def __init__(
        self, start: Callable[[Call], None], choose: Choose | None = None,
        device: Device | None = None,
    ) -> None:  # fmt: skip
        self._start = start
        self.fake = start is ignore
        self._choose = choose
        self._device = device
        self._call: tuple[Tuned, Sequence[Any], Mapping[str, Any]] | None = None
        self._config: Mapping[str, Any] | None = None
        self._taken: dict[bool, tuple[Any, Any]] = {}  # the last part of each workspace
        self.launched = 0

    def __getattr__(self, name: str) -> Any:  # no property: it would hide an AttributeError
        if name in FACTS:
            return self._asked().fact(name)
        return self._configuration() if name == "config" else Function(self, name, ())

    def __getitem__(self, name: str) -> Function:
        """Return `k.<name>`, for a name that is not written in the launch function."""
        return Function(self, name, ())

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
        self._taken[zeroed] = start, bytes
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
        """Whether the launch function has asked for a workspace."""
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
        return launch.resources.tables.tables_of(lists, chunk, most, dense=dense)

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

    def _launch(self, call: Call) -> None:
        if call.keywords.keys() - _KEYWORDS:
            unknown = min(set(call.keywords) - _KEYWORDS)
            raise LaunchError(
                f"`{call.function}` was called with the unknown keyword `{unknown}`; there are: "
                f"{', '.join(sorted(_KEYWORDS))}"
            )
        self._start(call)
        self.launched += 1


class Function:
    """The object `k.name` or `k.name[template arguments]`, whose call is a launch."""

    __slots__ = ("_kernels", "_name", "_template")

    def __init__(self, kernels: Kernels, name: str, template: tuple[tuple[str, Any], ...]) -> None:
        self._kernels = kernels
        self._name = name
        self._template = template

    def __getitem__(self, template: Mapping[str, Any]) -> Function:
        return Function(self._kernels, self._name, tuple(template.items()))

    def __call__(self, *args: Any, **keywords: Any) -> None:
        self._kernels._launch(Call(self._name, self._template, args, keywords))


def ignore(_: Call) -> None:
    """Launch nothing: the start of a fake."""


class Compiled(NamedTuple):
    """A variant as launches need it: the loaded function, and which arguments it takes.

    reference: target, label and digest of its entry. kept: positions of the arguments that the
    compiled kernel takes (None: all).
    """

    variant: Variant
    function: Any
    meta: dict[str, Any]
    reference: tuple[str, str, str]
    kept: tuple[int, ...] | None = None

    @property
    def parameters(self) -> list[str]:
        """The codes of its parameters, e.g. `*f32`, `i64`."""
        codes: list[str] = self.meta["parameters"]
        return codes

    def written(self) -> tuple[Sequence[int], list[str]]:
        """Return its parameters as their author wrote them: see `parameters.written`."""
        return launch.parameters.written(self.variant, self.kept, len(self.parameters))


class Ready(NamedTuple):
    """A kernel that was launched before: its name in messages (`what`), and its packs."""

    compiled: Compiled
    what: str
    packs: list[Pack]


class Geometry(NamedTuple):
    """The geometry of a launch: how its threads are spread over a GPU."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem: int
    cluster: tuple[int, int, int] | None = None
    cooperative: bool = False
    pdl: bool = False
    carveout: int | None = None


def geometry_of(what: str, compiled: Compiled, keywords: dict[str, Any]) -> Geometry:
    """Return the geometry that keywords and Triton's metadata ask for. Raises LaunchError."""
    meta = compiled.meta
    grid = _three_sizes(what, "grid", keywords.get("grid"))
    cluster = _three_sizes(what, "cluster", keywords["cluster"]) if "cluster" in keywords else None
    if compiled.variant.source.kind == "triton":
        block, smem = (meta["block"], 1, 1), meta["smem"]
        if meta["cluster"] > 1:
            cluster = (meta["cluster"], 1, 1)
            grid = (grid[0] * meta["cluster"], grid[1], grid[2])
    else:
        block, smem = _three_sizes(what, "block", keywords.get("block")), keywords.get("smem", 0)
        _check_block(what, block, keywords["block"])
    return Geometry(
        grid,
        block,
        smem,
        cluster,
        bool(keywords.get("cooperative", False) or meta.get("cooperative", False)),
        bool(keywords.get("pdl", False) or meta.get("pdl", False)),
        _percent(what, keywords["carveout"]) if "carveout" in keywords else None,
    )


def _percent(what: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 100:
        raise LaunchError(
            f"{what}: `carveout` must be the share of shared memory in percent, a whole number "
            f"from 0 (as much L1 cache as possible) to 100, got {value!r}"
        )
    return value


def _check_block(what: str, block: tuple[int, int, int], keyword: Any) -> None:
    if all(type(size) is int for size in block) and math.prod(block) > MAX_THREADS:
        raise LaunchError(
            f"{what}: block={keyword} has {math.prod(block)} threads, and no GPU takes more than "
            f"{MAX_THREADS} in a block: use a smaller block, and a larger grid"
        )


def check_result(op: str, function: Any, kinds: str, result: Any) -> None:
    """Raise LaunchError unless a launch function returned tensors of these kinds.

    kinds: `Signature.results`; results that are no tensors are for Torch to check.
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
        f"{op}: {defined_at(function)}its launch function returned {kind}, and its schema says "
        f"{schema}: "
        + ("does it lack a `return`?" if result is None else "return that, or correct the schema")
    )


def _kind_of(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, (tuple, list)):
        return f"{len(value)} values"
    if isinstance(value, torch.Tensor):
        return "a tensor"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _plain_geometry(keywords: dict[str, Any]) -> Geometry | None:
    """Return the geometry of a plain launch in one dimension, or None for any other launch."""
    grid, block = keywords.get("grid"), keywords.get("block")
    if len(keywords) > 2 or type(grid) is not int or type(block) is not int:
        return None
    if not (0 <= grid < 2**31 and 0 <= block < 2**31):
        return None
    return Geometry((grid, 1, 1), (block, 1, 1), 0)


class Runner:
    """Starter of the kernels of one source on one device, with a memo of loaded variants."""

    def __init__(self, op: str, source: Source, target: Target, device: torch.device) -> None:
        self.op = op
        self.source = source
        self.target = target
        self.device = device
        self.where = f"{op} for {target}"
        self._memo: dict[tuple[Any, ...], Compiled] = {}
        self._ready: dict[tuple[Any, ...], Ready] = {}
        self._choices: dict[str, Choice] = {}
        self._refused: dict[Variant, tuple[Config, type[JitkernError], str]] = {}
        self._claims: dict[Variant, tuple[int, float]] = {}  # process, and end of the claim
        self._lock = threading.Lock()
        after_fork(self._lock)

    def __call__(self, call: Call) -> None:
        ready = self._ready.get(call[:2])
        values = packed(ready.packs, call.args) if ready else None
        if ready is None or values is None:
            compiled = self._start(self.expanded(call))
            if self.source.kind != "triton" and not any(
                isinstance(value, (int, float))
                for _, value in call.template  # 1 == 1.0 == True
            ):
                packs = packs_of(compiled.parameters, self.device)
                self._ready[call[:2]] = Ready(compiled, f"`{call.function}` of {self.where}", packs)
        elif self.source.runs == HOST:
            ready.compiled.function.call(values)
        else:
            shape = _plain_geometry(call.keywords) or geometry_of(
                ready.what, ready.compiled, call.keywords
            )
            self._launch_cuda(ready.compiled, values, shape)

    @functools.cached_property
    def present(self) -> PresentDevice:
        """The device, as launch functions see it."""
        return PresentDevice(self.target, self.device)

    def expanded(self, call: Call) -> Call:
        """Return the call with what its kernel's decorators add; may measure configurations."""

        def choose(declared: triton_text.Function, named: dict[str, Any]) -> triton_text.Config:
            args = functools.cache(lambda: launch.measure.copies_for(call.args))

            def launch_of(config: triton_text.Config) -> Launch:
                copy = call._replace(args=args())
                complete = expanded(self.where, self.source, copy, lambda *_: config)

                def launch() -> None:
                    self._start(complete)

                return launch

            situation = autotune.situation_of(declared, named)
            choice = self._choice(call.function, declared.configs, situation, launch_of)
            return declared.configs[choice.number]

        return expanded(self.where, self.source, call, choose)

    def choose(
        self, tuned: Tuned, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the configuration of `.tune` for a call; may measure the configurations."""
        arguments = functools.cache(lambda: launch.measure.arguments_for(tuned, args, kwargs))

        def launch_of(config: Mapping[str, Any]) -> Launch:
            positional, named = arguments()
            return lambda: tuned(Kernels(self, lambda *_: config), *positional, **named)

        configs = autotune.configs_of(tuned, args, kwargs)
        situation = autotune.situation_of_call(tuned, args, kwargs)
        choice = self._choice("", configs, situation, launch_of, cold=tuned.tuning.cold)
        return configs[choice.number]

    def _choice(
        self,
        function: str,
        configs: Sequence[Any],
        situation: Situation,
        run: Callable[[Any], Launch],
        *,
        cold: bool = True,
    ) -> Choice:
        key = repr((function, configs, situation))  # 1 == 1.0 == True
        choice = self._choices.get(key)
        if choice is None or (choice.model is None and autotune.may_measure()):
            choice = self._choices[key] = autotune.choose(
                self.op, self.source, function, self.target, self.device, configs, situation, run,
                cold=cold,
            )  # fmt: skip
        return choice

    def chosen(self, function: str, configs: Sequence[Any], situation: Situation) -> Choice:
        """Return the choice made for the call that is being traced. Raises Unsupported."""
        choice = self._choices.get(repr((function, configs, situation)))
        if choice is None:
            raise Unsupported("its configurations have changed since it was called")
        return choice

    def _start(self, call: Call) -> Compiled:
        compiled = self.compiled(call)
        what = f"`{call.function}` of {self.where}"
        passed = arguments_of(compiled, call.args)
        args = checked(what, compiled.parameters, passed, self.device, compiled.written)
        values = [_value(what, *both) for both in zip(compiled.parameters, args)]
        if self.source.runs == HOST:
            compiled.function.call(values)
        else:
            self._launch_cuda(compiled, values, geometry_of(what, compiled, call.keywords))
        return compiled

    def compiled(self, call: Call) -> Compiled:
        """Return the variant that a call needs, loaded."""
        template = tuple((name, repr(value)) for name, value in call.template)  # 1 == 1.0 == True
        memo: tuple[Any, ...] = (call.function, template)
        pair = None
        if self.source.kind == "triton":
            pair = variant_of(self.op, self.source, call, self.where)
            memo += (pair[0].signature, pair[0].options)
        if memo not in self._memo:
            variant, positions = pair or variant_of(self.op, self.source, call, self.where)
            function = self.loaded(variant)
            meta, reference = function.meta, function.reference
            self._memo[memo] = Compiled(variant, function, meta, reference, positions)
        return self._memo[memo]

    def loaded(self, variant: Variant) -> Any:
        """Return the loaded code of `variant`. Remembers a failure while the settings stay."""
        settings = config.current()
        refusal = self._refused.get(variant)
        if refusal and refusal[0] is settings:
            raise refusal[1](refusal[2], variant=variant)
        try:
            may_compile = settings.compile != "background"
            return jit.loaded(variant, self.target, may_compile=may_compile)
        except (CompilerNotFound, TargetError, NotCached) as e:
            e.variant = variant
            if not isinstance(e, NotCached):
                self._refused[variant] = settings, type(e), str(e)
            raise

    @functools.cached_property
    def extension(self) -> Any:
        """The function of an Extension."""
        return self.loaded(Variant(self.op, self.source))

    def claim(self, variant: Variant) -> bool:
        """Whether this caller is to build the variant in the background, as the first to ask.

        A later caller may, too, after the first has given its claim back, and in a forked child.
        """
        with self._lock:
            process, until = self._claims.get(variant, (0, 0.0))
            granted = process != os.getpid() or time.monotonic() >= until
            if granted:
                self._claims[variant] = os.getpid(), math.inf
            return granted

    def give_back(self, variant: Variant) -> None:
        """Allow another build in RETRY seconds: this one failed for a reason that may pass."""
        with self._lock:
            self._claims[variant] = os.getpid(), time.monotonic() + RETRY

    def _launch_cuda(self, compiled: Compiled, values: list[float | None], shape: Geometry) -> None:
        index = self.device.index
        if sizes := compiled.meta.get("scratch"):
            scratch = [
                torch.empty(math.prod(shape.grid) * size, dtype=torch.uint8, device=self.device)
                for size in sizes
            ]
            values += [memory.data_ptr() for memory in scratch]
        stream = torch._C._cuda_getCurrentRawStream(index)
        if torch._C._cuda_getDevice() == index:
            compiled.function.launch(values, index, stream, *shape)
            return
        before = torch.cuda._exchange_device(index)
        try:
            compiled.function.launch(values, index, stream, *shape)
        finally:
            torch.cuda._maybe_exchange_device(before)


class CachedKernels:
    """Kernels of one source for any target, read from the cache, for a trace that runs nothing.

    model: the device model whose choices among configurations are used.
    """

    def __init__(self, op: str, source: Source, target: Target, model: str = "") -> None:
        self.op = op
        self.source = source
        self.target = target
        self.model = model
        self.where = f"{op} for {target}"
        self.present = AbsentDevice(target)

    def chosen(self, function: str, configs: Sequence[Any], situation: Situation) -> Choice:
        """Return the choice that the cache holds for the device model. Raises Unsupported."""
        choice = autotune.published(
            self.op, self.source, function, self.target, self.model, configs, situation
        )
        if choice is None:
            what = f"`{function}`" if function else "the launch function"
            raise Unsupported(
                f"{what} is tuned: the device chooses among its {len(configs)} configurations at "
                "the first call"
            )
        return choice

    def compiled(self, call: Call) -> Compiled:
        """Return the variant that a call needs, without loading it. Raises NotCached."""
        variant, positions = variant_of(self.op, self.source, call, self.where)
        entry = jit.ensure(variant, self.target, may_compile=False)
        return Compiled(variant, None, dict(entry.manifest.meta), entry.reference, positions)

    def check(self, call: Call) -> None:
        """Raise the error that a launch with these meta tensors would raise, or NotCached."""
        compiled = self.compiled(call)
        if "parameters" not in compiled.meta:
            return  # its compiler does not record them
        what = f"`{call.function}` of {self.where}"
        args = [
            arg.to("meta") if isinstance(arg, torch.Tensor) and _is_on(arg, self.target) else arg
            for arg in arguments_of(compiled, call.args)
        ]
        checked(what, compiled.parameters, args, torch.device("meta"), compiled.written)
        if self.source.runs != HOST:
            geometry_of(what, compiled, call.keywords)


def _is_on(tensor: torch.Tensor, target: Target) -> bool:
    return tensor.device.type == target.device


def arguments_of(compiled: Compiled, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments that the compiled kernel takes."""
    if compiled.variant.source.runs == HOST and {*map(type, args)}.difference(_PLAIN):
        return launch.resources.tables.spread(args)
    return args if compiled.kept is None else [args[i] for i in compiled.kept]


def _value(what: str, code: str, arg: Any) -> Any:
    """Return an argument that was checked as the kernel takes it. Raises LaunchError."""
    if isinstance(arg, torch.Tensor):
        return checked_address(what, arg)
    if isinstance(arg, TensorMap):
        return arg.encoded
    return arg.packed(code) if table_of(code) else arg


def _three_sizes(what: str, name: str, value: Any) -> tuple[int, int, int]:
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
        remedy = (
            f": pass {name}=" if value is None
            else ": divide with //, for whole sizes" if isinstance(value, float)
            else ""
        )  # fmt: skip
        raise LaunchError(f"{what}: `{name}` must be one to three sizes, got {value!r}{remedy}")
    return (*sizes, 1, 1)[:3]
