"""Dispatch of an op on one device type: to the first source that fits, else the reference."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitkern import calls, config, jit, launch, op as op_room, runtime, trace
from jitkern.calls.signature import tensors_in
from jitkern.errors import (
    CacheError,
    CompileError,
    CompilerNotFound,
    DeclarationError,
    JitkernError,
    LaunchError,
    NotCached,
    TargetError,
    error_site,
    is_ours,
    told,
)
from jitkern.launch.devices import Devices, Launcher
from jitkern.op.declaration import DeclaredOp
from jitkern.op.recording import recording
from jitkern.runtime.binding import prepare
from jitkern.runtime.programs import OpPrograms
from jitkern.source.kinds import ITSELF, Source, Variant

if TYPE_CHECKING:
    from jitkern.launch.runner import Runner

_MISTAKES = (NameError, AttributeError, TypeError, LookupError, ArithmeticError)
_PLACED = (CompileError, DeclarationError, LaunchError)
_NO_BLOCK = contextlib.nullcontext()
_log = logging.getLogger(__name__)


class Implementation:
    """The implementation of an op on one device type, for calls with all their arguments.

    op: the op by one declaration. programs: the op's in the launch runtime; None if C cannot launch
    its kernels. is_current: returns whether this declaration serves all threads. A call that is
    under way when another one takes its place may end with the earlier result.
    """

    def __init__(
        self,
        op: DeclaredOp,
        devices: Devices,
        programs: OpPrograms | None,
        is_current: Callable[[], bool],
    ) -> None:
        self.op = op
        self.signature = op.signature
        self.devices = devices
        self.device = devices.type
        self.programs = programs
        self._is_current = is_current
        self._has_lists = any("List" in str(a.type) for a in self.signature.arguments)
        self._functions: dict[int, tuple[Source, Callable[..., Any]]] = {}  # by the ids of sources
        self._announced: set[str] = set()
        self.pinned = False  # to the reference, through which gradients were recorded

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = self.devices.device_of((*args, *kwargs.values()))
        if self.signature.changed:
            self._check_changeable(args, kwargs)
        if self.programs:
            source = next(iter(self.op.sources_on(self.device)), None)
            with self._served(source, device, args, kwargs):
                prepare()
        result = self._compute(device, args, kwargs)
        if self.signature.changed:
            self._note_changes(args, kwargs)
        return result

    def _check_changeable(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Refuse to change an inference tensor where Torch's own ops refuse, before any change."""
        changed = self._changed(args, kwargs)
        if not torch.is_inference_mode_enabled() and any(t.is_inference() for t in changed):
            raise RuntimeError(
                f"{self.op.name}: Inplace update to inference tensor outside InferenceMode is not "
                "allowed: call the op under torch.inference_mode(), or pass a clone()"
            )

    def _note_changes(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raise the versions of changed tensors, so that Autograd notices the changes."""
        for tensor in self._changed(args, kwargs):
            if not tensor.is_inference():  # which has no version
                torch.autograd.graph.increment_version(tensor)

    def _changed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors that the op changes."""
        changed = self.signature.changed
        return tensors_in([kwargs[name] if name in kwargs else args[at] for at, name in changed])

    def _versions(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
        return [t._version for t in self._changed(args, kwargs) if not t.is_inference()]

    def _compute(self, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        settings = config.current()
        reasons: list[JitkernError] = []
        for source in () if self.pinned else self.op.sources_on(self.device):
            try:
                with self._served(source, device, args, kwargs):
                    result = self._run(source, device, args, kwargs)
            except launch.kernels.LeftToReference:
                return self._reference(args, kwargs)
            except (CompilerNotFound, TargetError, CacheError) as e:
                if isinstance(e, NotCached) and settings.compile == "background":
                    with self._served(source, device, args, kwargs):
                        self._build_later(source, device, e)
                if e.launched:  # a second try could apply an in-place change twice
                    e.args = (f"{e}. The call had begun, so nothing else can compute it.",)
                    raise
                reasons.append(e)
            else:
                if settings.record is not None:
                    self._record(source, args, kwargs)
                return result
        result = self._fall_back(reasons, args, kwargs)
        if settings.record is None:
            return result
        sources = self.op.sources_on(self.device)
        missing = [s for s, e in zip(sources, reasons) if isinstance(e, NotCached)]
        for source in (missing or sources)[:1]:
            self._record(source, args, kwargs)
        return result

    def _record(self, source: Source, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Record a call that a kernel of this source served, or would have served."""
        op = self.op
        calls.record.note(
            op.name, op.module, self.device, source.kind, op.signature.in_order(args, kwargs),
            lambda call: op_room.needed_kernels.digest_of(op, source, self.device, call),
            gradient=recording(),
        )  # fmt: skip

    def _served(
        self, source: Source | None, device: torch.device, args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> contextlib.AbstractContextManager[None]:  # fmt: skip
        """Return a block in which a miss may tell a build service of this call."""
        if source is None or not config.current().remotes:
            return _NO_BLOCK
        op, kind = self.op, source.kind

        def text() -> tuple[str, str]:
            ordered = op.signature.in_order(args, kwargs)
            line = calls.record.line_of(op.name, op.module, self.device, kind, ordered)
            return line, str(self.devices.target(device.index))

        return jit.current_call.served(text)

    def _run(
        self, source: Source, device: torch.device, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        op, runner = self.op, self.devices.runner(source, device)
        tried = self.programs.serving if self.programs else frozenset()
        if source.runs == ITSELF:
            result = runner.extension(*args, **kwargs)
            self._check_results(result, args, kwargs)
            return result
        function, kernels = self._function(source), launch.kernels.Kernels(runner)
        before = self._versions(args, kwargs) if op.signature.changed else []
        try:
            own_args, own_kwargs = _own(args, kwargs) if self._has_lists else (args, kwargs)
            run = trace.fast_check.with_fast_check(function)
            result = run(kernels, *own_args, **own_kwargs)
            launch.kernels.check_result(op.name, function, op.signature.results, result)
            self._check_results(result, args, kwargs)
        except Exception as e:
            begun = kernels.launched + getattr(e, "launched", 0)
            if begun:
                self._note_changes(args, kwargs)
            if isinstance(e, JitkernError):
                e.launched = begun or int(self._versions(args, kwargs) != before)
            self._place(e, function)
            raise
        new = kernels.has_workspace and _share_workspaces(device)
        if self.programs and not (new and self.programs.known):  # C lacked the workspace alone
            self._link(self.programs, source, runner, args, kwargs, tried)
        return result

    def _place(self, e: Exception, function: Callable[..., Any]) -> None:
        """Add the op and the author's line to an error.

        What an author raises on purpose, as by `torch._check`, stays as it is.
        """
        place = error_site(e, function)
        if isinstance(e, _MISTAKES):
            if hasattr(e, "add_note"):  # from Python 3.11
                e.add_note(f"{place}raised in the launch function of {self.op.name}")
        elif isinstance(e, _PLACED) and not e.place and is_ours(e):
            e.place = self.op.place if isinstance(e, DeclarationError) else place
            e.args = (told(str(e), self.op.name, e.place),)

    def _launcher(self, source: Source, device: torch.device) -> Launcher:
        target = self.devices.target(device.index)
        return Launcher(self._function(source), source, target, device)

    def _function(self, source: Source) -> Callable[..., Any]:
        if id(source) not in self._functions:
            self._functions[id(source)] = source, self.op.launch_function(source, self.device)
        return self._functions[id(source)][1]

    def _link(
        self,
        programs: OpPrograms,
        source: Source,
        runner: Runner,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tried: frozenset[Any],
    ) -> None:
        """Trace a call, if it is time to, so that C serves the next one like it.

        tried: the programs that did not serve it.
        """
        if not config.c_may_serve() or torch._C._len_torch_function_stack():
            return
        ordered = self.signature.in_order(args, kwargs)
        launcher = self._launcher(source, runner.device)
        state = programs.state_of(source, runner.device, ordered)
        if not self._is_current():
            return  # the op is declared again; `state` may be of the new declaration
        if state.is_due() and not jit.capturing():
            runtime.specializer.specialize(
                programs, state, launcher, runner, ordered, frozenset(kwargs), tried
            )

    def _check_results(self, result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raise LaunchError for a result that shares memory with an argument or another result.

        torch.compile and Autograd rely on results of their own memory.
        """
        results = tuple(tensors_in(result if isinstance(result, (tuple, list)) else [result]))
        shares = torch._C._any_output_is_alias_to_input_or_output
        if not shares(args, kwargs, results):
            return
        names = (argument.name for argument in self.signature.arguments)
        named = {**dict(zip(names, args)), **kwargs}
        sharers = [n for n, v in named.items() if any(shares((v,), {}, (r,)) for r in results)]
        what = f"its argument `{sharers[0]}`" if sharers else "another result"
        raise LaunchError(
            f"{self.op.name} on {self.device}: the launch function returned a tensor that shares "
            f"the memory of {what}; an op returns new tensors: return a clone() of that tensor"
        )

    def _build_later(self, source: Source, device: torch.device, missing: NotCached) -> None:
        variant = missing.variant
        assert isinstance(variant, Variant)
        runner = self.devices.runner(source, device)

        def build() -> None:
            try:
                with jit.announcement.silence():  # no call waits for it
                    launch.declared.make(variant, runner.target)
            except CompileError as e:
                _log.warning("%s", e)  # fails again until the source is edited
            except Exception as e:  # noqa: BLE001  e.g. a full disk: only the log shows it
                _log.warning("%s", e)
                runner.give_back(variant)

        if runner.claim(variant):
            jit.current_call.text()  # for the copy of the context, which keeps no tensor
            if not config.background.BUILDS.later(build):
                runner.give_back(variant)

    def _fall_back(
        self, reasons: list[JitkernError], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        settings = config.current()
        waiting = settings.compile == "background" and any(
            isinstance(e, NotCached) for e in reasons
        )
        unavailable = all(isinstance(e, (CompilerNotFound, TargetError)) for e in reasons)
        wanted = settings.fallback == "reference"
        may = wanted or unavailable or waiting or self.pinned
        if settings.fallback == "raise" or not (may and self.op.declaration.reference):
            for e in reasons:
                if isinstance(e, NotCached):
                    ordered = self.signature.in_order(args, kwargs)
                    e.for_call(self.op.name, calls.samples.spell(ordered))
            raise self._error(reasons)
        if waiting and recording():
            self.pinned = True  # the numerics would change between two steps
        why = "; ".join(map(str, reasons)) or self._lacking()
        if why not in self._announced and not self.pinned:
            self._announced.add(why)
            _log.warning("%s on %s runs its PyTorch reference: %s", self.op.name, self.device, why)
        return self._reference(args, kwargs)

    def _lacking(self) -> str:
        remedy = f"give one as {self.device}= in {self.op.place.removesuffix(': ')}"
        return f"no kernel is declared for {self.device}: {remedy}"

    def _error(self, reasons: list[JitkernError]) -> JitkernError:
        if not reasons:
            if self.op.declaration.reference:
                why = f"{self.op.name} has no kernel for {self.device}, and JITKERN_FALLBACK=raise"
                return TargetError(why)
            remedy = f", or a reference with @{self.op.__name__}.reference"
            return DeclarationError(
                f"{self.op.name} has no reference, and {self._lacking()}{remedy}"
            )
        main_error = next((e for e in reasons if isinstance(e, CacheError)), reasons[0])
        if len(reasons) == 1:
            return main_error
        listed = "".join(
            f"\n  {source.kind}: {e}" for source, e in zip(self.op.sources_on(self.device), reasons)
        )
        return type(main_error)(
            f"{self.op.name} cannot run on {self.device}:{listed}", **vars(main_error)
        )

    def _reference(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the reference's result, with the strides that the fake promised."""
        own_args, own_kwargs = _own(args, kwargs)
        result = self.op.run_reference(*own_args, **own_kwargs)
        complete, named = self.op.signature.complete(tuple(args), kwargs)
        metas = [_meta(value) for value in complete], {k: _meta(v) for k, v in named.items()}
        promised = self.op.promised(torch.device("meta"), *metas)
        if isinstance(result, torch.Tensor):
            return _restride(result, promised)
        if not isinstance(result, (tuple, list)):
            return result
        return tuple(_restride(r, p) for r, p in zip(result, promised))


def _own(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with a copy of each list, which a function may change.

    After a launch function that failed, another one or the reference gets them, too.
    """
    return [*map(_copied, args)], {name: _copied(value) for name, value in kwargs.items()}


def _copied(value: Any) -> Any:
    return [*value] if isinstance(value, list) else value


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return [_meta(item) for item in value] if isinstance(value, (list, tuple)) else value


def _restride(result: Any, promised: Any) -> Any:
    if not isinstance(result, torch.Tensor) or promised is None:  # for a `Tensor?`
        return result
    if result.stride() == promised.stride():
        return result
    return torch.empty_strided(
        result.shape, promised.stride(), dtype=result.dtype, device=result.device
    ).copy_(result)


def _share_workspaces(device: torch.device) -> bool:
    """Register the current stream's workspaces with C; returns whether one is new there."""
    loaded = runtime.binding.runtime()
    if loaded is None or device.type != "cuda":
        return False
    new = [loaded.share(block) for block in launch.resources.workspaces.shared(device)]
    return any(new)
