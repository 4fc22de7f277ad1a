"""What Torch calls for an op: on a device type, and on all other devices.

A call goes to the first source that fits, else to the reference. A source serves a call by a launch
record of such calls, else in Python, and the runtime serves the next one like it.
"""

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
from jitkern.launch.devices import Devices
from jitkern.op.declaration import Declaration, DeclaredOp
from jitkern.op.recording import recording
from jitkern.runtime.binding import prepare
from jitkern.source.kinds import ITSELF, Source, Variant

if TYPE_CHECKING:
    from jitkern.launch.kernels import Kernels
    from jitkern.runtime.programs import OpPrograms
    from jitkern.runtime.records import CallClass

_MISTAKES = (NameError, AttributeError, TypeError, LookupError, ArithmeticError)
_PLACED = (CompileError, DeclarationError, LaunchError)
_log = logging.getLogger(__name__)


_KEYS = {
    device.lower(): torch._C.DispatchKeySet(torch._C.DispatchKey.__members__[device])
    for device in ("CPU", "CUDA", "Meta")
}


class Backend:
    """An op by one declaration on one device type, for calls with all their arguments.

    A call that is under way when another declaration takes the place of this one may end with the
    earlier result.
    """

    def __init__(self, op: DeclaredOp, declaration: Declaration, device: str) -> None:
        self.op = DeclaredOp(op.signature, declaration)
        self.signature = op.signature
        self.devices = Devices(op.name, device)
        self.device = device
        self.programs = op.programs.get(device)
        if device in op.programs and self.programs is None:
            runtime.binding.say_why_not()
        self._registered = op
        self._has_lists = any("List" in str(a.type) for a in self.signature.arguments)
        self._functions: dict[int, Callable[..., Any]] = {}  # by the ids of sources
        self._sources: tuple[config.Config | None, Sequence[Source]] = (None, ())  # by settings
        self._announced: set[str] = set()
        self.pinned = False  # to the reference, through which gradients were recorded

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        settings = config.current()
        reasons: list[JitkernError] = []
        device = self.devices.device_of((*args, *kwargs.values()))
        if self.signature.changed:
            self._check_changeable(args, kwargs)
        known, sources = self._sources
        if known is not settings:
            sources = self.op.sources_on(self.device)
            self._sources = settings, sources
        run = self._run_served if settings.remotes else self._run
        for source in () if self.pinned else sources:
            try:
                result = run(source, device, args, kwargs)
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
        missing = [s for s, e in zip(sources, reasons) if isinstance(e, NotCached)]
        for source in (missing or sources)[:1]:
            self._record(source, args, kwargs)
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

    def _record(self, source: Source, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Record a call that a kernel of this source served, or would have served."""
        op = self.op
        calls.record.note(
            op.name, op.module, self.device, source.kind, op.signature.in_order(args, kwargs),
            lambda call: op_room.needed_kernels.digest_of(op, source, self.device, call),
            gradient=recording(),
        )  # fmt: skip

    def _served(
        self, source: Source, device: torch.device, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> contextlib.AbstractContextManager[None]:  # fmt: skip
        """Return a block in which a miss may tell a build service of this call."""
        op, kind = self.op, source.kind

        def text() -> tuple[str, str]:
            ordered = op.signature.in_order(args, kwargs)
            line = calls.record.line_of(op.name, op.module, self.device, kind, ordered)
            return line, str(self.devices.target(device.index))

        return jit.current_call.served(text)

    def _run_served(self, source: Source, device: torch.device, *call: Any) -> Any:
        """Run a source's kernels; see `_served`."""
        with self._served(source, device, *call[:2]):
            return self._run(source, device, *call)

    def _run(
        self, source: Source, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a source's kernels for a call: by a launch record of such calls, else in Python."""
        if source.runs == ITSELF:
            result = self.devices.runner(source, device).extension(*args, **kwargs)
            self._check_results(result, args, kwargs)
            self._note_changes(args, kwargs)
            return result
        function, programs, of_class = self._launch_function(source), self.programs, None
        tried = programs.known if programs else frozenset()
        if programs is not None:
            ordered = self.signature.in_order(args, kwargs)
            of_class = self._class(programs, source, device, ordered)
            recorded = config.current().record is not None  # then each comes here
            if of_class and not recorded and programs.recall(of_class, ordered):
                return self._registered.overload.redispatch(_KEYS[self.device], *args, **kwargs)
            prepare()
        runner = self.devices.runner(source, device)
        kernels = launch.kernels.Kernels(runner)
        result = self._run_in_python(function, kernels, args, kwargs)
        if self.signature.changed:
            self._note_changes(args, kwargs)
        new = kernels.has_workspace and _share_workspaces(device)
        if programs is None or of_class is None or (new and programs.known):
            return result  # C lacked the workspace alone
        if of_class.is_due() and not jit.capturing():
            runtime.specializer.specialize(
                programs, of_class, runner, ordered, frozenset(kwargs), tried
            )
        return result

    def _launch_function(self, source: Source) -> Callable[..., Any]:
        """Return the launch function of a source. Raises DeclarationError."""
        if id(source) not in self._functions:
            self._functions[id(source)] = self.op.launch_function(source, self.device)
        return self._functions[id(source)]

    def _class(
        self, programs: OpPrograms, source: Source, device: torch.device, args: Sequence[Any]
    ) -> CallClass | None:
        """Return the class of calls like this one; None if C cannot serve them now."""
        modes = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
        if not config.c_may_serve() or modes:  # which must see the calls of a launch function
            return None
        function, target = self._launch_function(source), self.devices.target(device.index)
        of_class = programs.calls_like(function, source, target, device, args)
        if self._registered.is_settled(self.op.declaration):
            return of_class
        return None  # the op is declared again, and `programs` may be of the new declaration

    def _run_in_python(
        self, function: Callable[..., Any], kernels: Kernels, args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        """Return the result of a launch function. Errors tell its line, and what has begun."""
        before = self._versions(args, kwargs) if self.signature.changed else []
        try:
            own_args, own_kwargs = _own(args, kwargs) if self._has_lists else (args, kwargs)
            run = trace.fast_check.with_fast_check(function)
            result = run(kernels, *own_args, **own_kwargs)
            launch.kernels.check_result(self.op.name, function, self.signature.results, result)
            self._check_results(result, args, kwargs)
        except Exception as e:
            begun = kernels.launched + getattr(e, "launched", 0)
            if begun:
                self._note_changes(args, kwargs)
            if isinstance(e, JitkernError):
                e.launched = begun or int(self._versions(args, kwargs) != before)
            self._place(e, function)
            raise
        return result

    def _place(self, e: Exception, function: Callable[..., Any] | None) -> None:
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

    def _check_results(self, result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raise LaunchError for a result that shares memory with an argument or another result.

        torch.compile and Autograd rely on results of their own memory.
        """
        values = result if isinstance(result, (list, tuple)) else (result,)
        results = tuple(tensors_in(values))
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
        silent = not reasons and any(self.op.sources.values())  # it is for other devices
        if why not in self._announced and not silent and not self.pinned:
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
        complete, named = self.op.signature.complete(tuple(args), kwargs)
        metas = [_meta(value) for value in complete], {k: _meta(v) for k, v in named.items()}
        try:  # which refuses what kernels refuse
            promised = self.op.promised(torch.device("meta"), *metas)
        except JitkernError as e:
            self._place(e, next(iter(self.op.declaration.launchers.values()), None))
            raise
        own_args, own_kwargs = _own(args, kwargs)
        result = self.op.run_reference(*own_args, **own_kwargs)
        self._note_changes(args, kwargs)
        if isinstance(result, torch.Tensor):
            return _restride(result, promised)
        if not isinstance(result, (tuple, list)):
            return result
        return tuple(_restride(r, p) for r, p in zip(result, promised))


class FallbackKernel:
    """The reference on all other devices, and the choice of a device for calls without tensors.

    A call without tensors runs on

    1. the device of its `Device` argument;
    2. the only device that the op has kernels for, if this machine has it;
    3. Torch's default device (`torch.set_default_device`), else the CPU.
    """

    def __init__(self, op: DeclaredOp) -> None:
        self.op = op

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.op.signature.complete(args, kwargs)
        arguments = (*args, *kwargs.values())
        if tensors_in(arguments):
            return self.op.run_reference(*args, **kwargs)
        device = self._device(arguments)
        if device in ("cpu", "meta"):
            return self.op.overload.redispatch(_KEYS[device], *args, **kwargs)
        if device in self.op.backends:  # C takes the index of a CUDA device from tensors
            return self.op.backends[device](*args, **kwargs)
        return self.op.run_reference(*args, **kwargs)

    def _device(self, arguments: Sequence[Any]) -> str:
        for value in arguments:
            if isinstance(value, torch.device):
                return value.type
        able = [device for device, sources in self.op.sources.items() if sources]
        if len(able) == 1 and (able[0] == "cpu" or torch.cuda.is_available()):
            return able[0]
        # Torch disables the mode of a default device during a call, so its getter returns "cpu".
        context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        return context.device.type if context else "cpu"


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
