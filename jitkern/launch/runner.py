"""Runners, which start the launches of launch functions, and the cached kernels of a trace."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from jitkern import config, jit, launch
from jitkern._fork import after_fork
from jitkern.cache.entry import Entry
from jitkern.config import Config
from jitkern.errors import CompilerNotFound, JitkernError, NotCached, TargetError, told
from jitkern.launch import autotune
from jitkern.launch.arguments import checked
from jitkern.launch.autotune import Choice, Question
from jitkern.launch.call import Call, check_contiguous, checked_address, expanded, variant_of
from jitkern.launch.declared import declared_in
from jitkern.launch.geometry import Compiled, Geometry, geometry_of, plain_geometry
from jitkern.launch.kernels import Kernels
from jitkern.launch.launched import LaunchedKernel
from jitkern.launch.packing import ArgumentPacker
from jitkern.launch.resources.device_view import AbsentDevice, PresentDevice
from jitkern.launch.resources.tensor_maps import TensorMap
from jitkern.launch.symbols import Unsupported
from jitkern.launch.tuned import Launch, Tuned
from jitkern.source import triton_decorators
from jitkern.source.dtypes import table_of
from jitkern.source.kinds import HOST, Source, Variant
from jitkern.target import Target

_PLAIN = (torch.Tensor, torch.nn.Parameter, int, float, bool, type(None))  # no tables
RETRY = 60.0  # seconds after which a background build that failed is tried again


class Runner:
    """Starter of the kernels of one source on one device, with a memo of the loaded ones."""

    def __init__(self, op: str, source: Source, target: Target, device: torch.device) -> None:
        self.op = op
        self.source = source
        self.target = target
        self.device = device
        self.where = f"{op} for {target}"
        self._ready: dict[tuple[Any, ...], tuple[Compiled, LaunchedKernel | None]] = {}
        self._choices: dict[str, Choice] = {}
        self._pruned: dict[str, Question] = {}  # by the question with every configuration
        self._refused: dict[Variant, tuple[Config, type[JitkernError], str]] = {}
        self._claims: dict[Variant, tuple[int, float]] = {}  # process, and end of the claim
        self._lock = threading.Lock()
        after_fork(self._lock)

    def __call__(self, call: Call) -> LaunchedKernel | None:
        """Start a launch; returns the kernel if it is Triton's."""
        compiled, _ = self._ready.get(_kernel_key(call), (None, None))
        values = compiled.packs.packed(call.args) if compiled and compiled.packs else None
        if compiled is None or values is None:
            check_contiguous(self.where, self.source, call)
            return self._start(self.expanded(call))
        what, keywords, shape = compiled.what, call.keywords, None
        if self.source.runs != HOST:
            shape = plain_geometry(keywords) or geometry_of(what, compiled, keywords)
        self._launch(compiled, values, shape)
        return None

    @functools.cached_property
    def present(self) -> PresentDevice:
        """The device, as launch functions see it."""
        return PresentDevice(self.target, self.device)

    def expanded(self, call: Call) -> Call:
        """Return the call with what its kernel's decorators add; may measure configurations."""

        def choose(
            declared: triton_decorators.TritonFunction, named: dict[str, Any]
        ) -> triton_decorators.TritonConfig:
            args = functools.cache(lambda: launch.measure.copies_for(call.args))

            def launch_of(config: triton_decorators.TritonConfig) -> Launch:
                copy = call._replace(args=args())
                complete = self._expanded(copy, lambda *_: config)
                pairs = list(zip(copy.args, call.args))
                zeroed = [mine for mine, given in pairs if _is_among(declared.zeroed, given, named)]
                restored = [pair for pair in pairs if _is_among(declared.restored, pair[1], named)]

                def launch() -> None:
                    for mine in zeroed:
                        mine.zero_()
                    for mine, given in restored:
                        mine.copy_(given)
                    self._start(complete)

                return launch

            every = declared._replace(pruned=False)
            situation = repr(autotune.question_of(self.source, call.function, every, named))
            if (known := self._pruned.get(situation)) is None:
                known = autotune.question_of(self.source, call.function, declared, named)
                self._pruned[situation] = known
            run = self._all_compiled(call, known.configs, launch_of)
            config: triton_decorators.TritonConfig = self._choice(known, run).config
            return config

        return self._expanded(call, choose)

    def _expanded(self, call: Call, choose: Callable[..., Any]) -> Call:
        if self.source.declares:
            may_import = config.current().compile != "background"
            declared_in(self.where, self.source, call.function, self.target, may_import=may_import)
        return expanded(self.where, self.source, call, choose, self.target)

    def _all_compiled(
        self, call: Call, configs: Sequence[triton_decorators.TritonConfig],
        run: Callable[[triton_decorators.TritonConfig], Launch],
    ) -> Callable[[triton_decorators.TritonConfig], Launch]:  # fmt: skip
        """Return `run`, which has all configurations compiled at once if that is quicker."""

        @functools.cache
        def compile_all() -> None:
            if jit.at_once.threads_for(len(configs)) == 1:
                return
            calls = [self._expanded(call, lambda *_, c=c: c) for c in configs]
            variants = [self._variant(each)[0] for each in calls]
            ensure = functools.partial(jit.ensure, target=self.target)
            with jit.at_once.each(ensure, variants) as results:
                for result in results:
                    with contextlib.suppress(JitkernError):  # which a measurement raises again
                        result()

        def after(config: triton_decorators.TritonConfig) -> Launch:
            compile_all()
            return run(config)

        return after

    def choose(
        self, tuned: Tuned, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the configuration of `.tune` for a call; may measure the configurations."""
        arguments = functools.cache(lambda: launch.measure.arguments_for(tuned, args, kwargs))

        def launch_of(config: Mapping[str, Any]) -> Launch:
            positional, named = arguments()
            kernels = functools.partial(Kernels, self, lambda *_: config)
            return lambda: tuned(kernels(), *positional, **named)

        configs = autotune.configs_of(tuned, args, kwargs)
        question = Question("", configs, autotune.tuning_key_of_call(tuned, args, kwargs))
        chosen: Mapping[str, Any] = self._choice(question, launch_of, cold=tuned.tuning.cold).config
        return chosen

    def _choice(
        self, question: Question, run: Callable[[Any], Launch], *, cold: bool = True
    ) -> Choice:
        key = repr(question)  # 1 == 1.0 == True
        choice = self._choices.get(key)
        if choice is None or (choice.model is None and autotune.may_measure()):
            choice = self._choices[key] = autotune.choose(
                self.op, self.source, self.target, self.device, question, run, cold=cold
            )
        return choice

    def chosen(self, question: Question) -> Choice:
        """Return the choice made for the call that is being traced. Raises Unsupported."""
        choice = self._choices.get(repr(question))
        if choice is None:
            raise Unsupported("its configurations are others than when it was called")
        return choice

    def _start(self, call: Call) -> LaunchedKernel | None:
        compiled, launched = self._of(call)
        what, passed = compiled.what, arguments_of(compiled, call.args)
        args = checked(what, compiled.parameters, passed, self.device, compiled.written)
        values = [_value(what, *both) for both in zip(compiled.parameters, args)]
        is_host = self.source.runs == HOST
        shape = None if is_host else geometry_of(what, compiled, call.keywords)
        self._launch(compiled, values, shape)
        return launched

    def compiled(self, call: Call) -> Compiled:
        """Return the variant that a call needs, loaded."""
        return self._of(call)[0]

    def _of(self, call: Call) -> tuple[Compiled, LaunchedKernel | None]:
        """Return the same, and what its launch returns if it is Triton's."""
        key: tuple[Any, ...] = _kernel_key(call)
        pair = None
        if self.source.in_python:  # whose variant depends on the arguments, too
            pair = self._variant(call)
            how = call.keywords.get("cooperative"), call.keywords.get("pdl")
            key = (call.function, repr(pair[0].template), pair[0].signature, pair[0].options, *how)
        if key not in self._ready:
            variant, positions = pair or self._variant(call)
            function = self.loaded(variant)
            meta, packs, launched = function.meta, None, None
            if not (pair or any(map(table_of, meta["parameters"]))):  # each tensor of a table
                strided = self.source.strided
                packs = ArgumentPacker(meta["parameters"], self.device, strided=strided)
            what = f"`{call.function}` of {self.where}"
            compiled = Compiled(variant, function, meta, function.reference, positions, what, packs)
            if self.source.declares:
                launched = LaunchedKernel(self._start, self.device, call, compiled, self.target)
            self._ready[key] = compiled, launched
        return self._ready[key]

    def _variant(self, call: Call) -> tuple[Variant, tuple[int, ...] | None]:
        return variant_of(self.op, self.source, call, self.where, self.target)

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
            e.args = (told(str(e), self.op),)
            if not isinstance(e, NotCached):
                self._refused[variant] = settings, type(e), str(e)
            raise

    @functools.cached_property
    def extension(self) -> Any:
        """The function of an Extension."""
        return self.loaded(Variant(self.op, self.source))

    def claim(self, variant: Variant) -> bool:
        """Whether this caller, as the first one, must build the variant in the background.

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

    def _launch(
        self, compiled: Compiled, values: list[float | None], shape: Geometry | None
    ) -> None:
        """Launch a kernel. shape: None for a function of the host, which launches it by itself."""
        function, what, index = compiled.function, compiled.what, self.device.index
        if self.device.type == "cpu":
            function.call(values, what)
            return
        if shape and (sizes := compiled.meta.get("scratch")):
            scratch = [
                torch.empty(math.prod(shape.grid) * size, dtype=torch.uint8, device=self.device)
                for size in sizes
            ]
            values += [memory.data_ptr() for memory in scratch]
        stream = torch._C._cuda_getCurrentRawStream(index)
        start = function.launch if shape else function.call
        passed: tuple[Any, ...] = ([*values, stream, index], what)
        if shape:
            passed = values, index, stream, *shape
        if torch._C._cuda_getDevice() == index:
            start(*passed)
            return
        before = torch.cuda._exchange_device(index)
        try:
            start(*passed)
        finally:
            torch.cuda._maybe_exchange_device(before)


class CachedKernels:
    """Kernels of one source for any target, read from the cache, for a trace that runs nothing.

    model: the device model whose choices among configurations are used. entries: those that were
    looked up before, to which others are added.
    """

    def __init__(
        self, op: str, source: Source, target: Target, model: str, entries: dict[Variant, Entry]
    ) -> None:
        self.op = op
        self.source = source
        self.target = target
        self.model = model
        self.where = f"{op} for {target}"
        self.present = AbsentDevice(target)
        self._entries = entries

    def chosen(self, question: Question) -> Choice:
        """Return the choice that the cache holds for the device model. Raises Unsupported."""
        choice = autotune.published(self.op, self.source, self.target, self.model, question)
        if choice is None:
            raise Unsupported(
                f"{question} is tuned: the device chooses among its {len(question.configs)} "
                "configurations at the first call"
            )
        return choice

    def compiled(self, call: Call) -> Compiled:
        """Return the variant that a call needs, without loading it. Raises NotCached."""
        variant, positions = variant_of(self.op, self.source, call, self.where, self.target)
        if variant not in self._entries:
            self._entries[variant] = jit.ensure(variant, self.target, may_compile=False)
        entry = self._entries[variant]
        return Compiled(variant, None, dict(entry.manifest.meta), entry.reference, positions)

    def check(self, call: Call) -> None:
        """Raise the error that a launch with these meta tensors would raise, or NotCached."""
        compiled = self.compiled(call)
        if "parameters" not in compiled.meta:
            return  # its compiler does not record them
        what = f"`{call.function}` of {self.where}"
        args = [
            arg.to("meta")
            if isinstance(arg, torch.Tensor) and arg.device.type == self.target.device
            else arg
            for arg in arguments_of(compiled, call.args)
        ]
        checked(what, compiled.parameters, args, torch.device("meta"), compiled.written)
        if self.source.runs != HOST:
            geometry_of(what, compiled, call.keywords)


def _kernel_key(call: Call) -> tuple[Any, ...]:
    """Return what distinguishes the kernels of a source that are identified by their text."""
    return call.function, *[(name, repr(value)) for name, value in call.template]  # 1 == 1.0


def _is_among(names: Sequence[str], value: Any, named: Mapping[str, Any]) -> bool:
    """Whether a value is a tensor that one of these names has."""
    return isinstance(value, torch.Tensor) and any(named.get(name) is value for name in names)


def arguments_of(compiled: Compiled, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments that the compiled kernel takes."""
    if compiled.variant.source.flat:
        return launch.flat.flattened(args, strided=compiled.variant.source.strided)
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
