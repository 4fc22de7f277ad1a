"""What Torch calls for an op on one device type: the first source that fits, else the reference."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitkern import config, jit, record
from jitkern.errors import CacheError, CompilerNotFound, JitkernError, NotCached, TargetError
from jitkern.gradient import recording
from jitkern.kernel import Extension, Source, Variant
from jitkern.launch.runtime import leave_behind
from jitkern.launch.slot import Slot
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.launch.python import Runner
    from jitkern.register import Op

_log = logging.getLogger(__name__)


class Implementation:
    """Registered once per op and device type, and never replaced.

    Replacing would race with calls inside Torch.
    """

    def __init__(self, op: Op, device: str) -> None:
        self.op = op
        self.device = device
        self.slot: Slot | None = None  # where a stub can launch its kernels
        self._runners: dict[tuple[int, int | None], Runner] = {}
        self._targets: dict[int | None, Target] = {}
        self._announced: set[str] = set()
        self._pinned = False  # to the reference: gradients were recorded through it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.op.complete(args, kwargs)
        recording_calls = config.current().record is not None  # each has to come by here once
        if self.slot and not recording_calls and self._recalled(self.slot, args, kwargs):
            with torch._C._AutoDispatchBelowAutograd():
                return self.slot.retry(lambda: self.op.overload(*args, **kwargs))
        result = self._compute(args, kwargs)
        self._note_changes(args, kwargs)
        return result

    def _note_changes(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """So that Autograd notices where it had saved what is changed now."""
        for position, name in self.op.changed:
            tensor = kwargs[name] if name in kwargs else args[position]
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)

    def _recalled(self, slot: Slot, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether the cache had variants for calls like this one, which serve from now on."""
        source = next(iter(self._sources()), None)
        if (
            slot.number is None
            or slot.retrying
            or self._pinned
            or source is None
            or isinstance(source, Extension)
        ):
            return False
        device = self._device_of(args)
        return slot.recall(
            self.op.written(source, self.device),
            source,
            self._target(device),
            device,
            slot.complete(args, kwargs),
        )

    def _target(self, device: torch.device) -> Target:
        if device.index not in self._targets:
            self._targets[device.index] = Target.current(self.device, device.index)
        return self._targets[device.index]

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = self._device_of(args)
        reasons: list[JitkernError] = []
        for source in () if self._pinned else self._sources():
            try:
                result = self._run(source, device, args, kwargs)
            except (CompilerNotFound, TargetError, CacheError) as e:
                if e.launched:
                    raise  # a second try could apply an in-place change twice
                reasons.append(e)
                if isinstance(e, NotCached) and config.current().compile == "background":
                    self._build_later(source, device, e)
            else:
                self._record(source, args, kwargs)
                return result
        result = self._fall_back(reasons, args, kwargs)
        if config.current().record is None:
            return result
        sources = self._sources()
        missing = [s for s, e in zip(sources, reasons) if isinstance(e, NotCached)]
        for source in (missing or sources)[:1]:
            self._record(source, args, kwargs)
        return result

    def _record(self, source: Source, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Write down a call that a kernel of this source served, or would have."""
        if config.current().record is None:
            return
        from jitkern.needs import digest_of

        op = self.op
        record.note(
            op.name, op.module, self.device, source.kind, op.in_order(args, kwargs),
            lambda call: digest_of(op, source, self.device, call),
        )  # fmt: skip

    def _sources(self) -> list[Source]:
        preferred = config.current().prefer
        return sorted(
            self.op.sources.get(self.device, ()), key=lambda source: source.kind != preferred
        )

    def _run(
        self, source: Source, device: torch.device, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        runner = self._runner(source, device)
        if isinstance(source, Extension):
            return runner.extension()(*args, **kwargs)
        from jitkern.launch.python import Kernels

        kernels = Kernels(runner)
        try:
            result = self.op.launcher(source, self.device)(kernels, *args, **kwargs)
        except Exception as e:
            if kernels.launched:
                self._note_changes(args, kwargs)
            if isinstance(e, JitkernError):
                e.launched = kernels.launched
            raise
        if self.slot:
            from jitkern.launch.linker import link

            try:
                if self.slot.number is None:
                    leave_behind()
                link(self.slot, self.op.written(source, self.device), runner, args, kwargs)
            except OSError as e:  # the answer is there, and stays
                _log.warning("%s keeps to its Python launcher: %s", self.op.name, e)
        return result

    def _runner(self, source: Source, device: torch.device) -> Runner:
        from jitkern.launch.python import Runner

        key = (id(source), device.index)
        runner = self._runners.get(key)
        if runner is None:
            made = Runner(self.op.name, source, self._target(device), device)
            runner = self._runners.setdefault(key, made)
        return runner

    def _device_of(self, args: Sequence[Any]) -> torch.device:
        for arg in args:
            for tensor in arg if isinstance(arg, (list, tuple)) else (arg,):
                if isinstance(tensor, torch.Tensor) and tensor.device.type == self.device:
                    return tensor.device
        return (
            torch.device("cuda", torch.cuda.current_device())
            if self.device == "cuda"
            else torch.device("cpu")
        )

    def _build_later(self, source: Source, device: torch.device, missing: NotCached) -> None:
        variant = missing.variant
        assert isinstance(variant, Variant)
        runner = self._runner(source, device)

        def build() -> None:
            try:
                jit.ensure(variant, runner.target)
            except JitkernError as e:
                _log.warning("%s", e)

        if runner.claim(variant):
            threading.Thread(target=build, name=f"jitkern {variant.op}", daemon=True).start()

    def _fall_back(
        self, reasons: list[JitkernError], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        settings = config.current()
        waiting = settings.compile == "background" and any(
            isinstance(e, NotCached) for e in reasons
        )
        unavailable = all(isinstance(e, (CompilerNotFound, TargetError)) for e in reasons)
        asked = settings.fallback == "reference"
        if settings.fallback == "raise" or not (asked or unavailable or waiting or self._pinned):
            raise self._error(reasons)
        if waiting and recording():
            self._pinned = True  # the numerics would change between two steps
        why = "; ".join(map(str, reasons)) or f"no kernel is declared for {self.device}"
        if why not in self._announced and not self._pinned:
            self._announced.add(why)
            _log.warning("%s on %s runs its PyTorch reference: %s", self.op.name, self.device, why)
        return self._reference(args, kwargs)

    def _error(self, reasons: list[JitkernError]) -> JitkernError:
        if not reasons:
            return TargetError(
                f"{self.op.name} has no kernel for {self.device}, and JITKERN_FALLBACK=raise"
            )
        telling = next((e for e in reasons if isinstance(e, CacheError)), reasons[0])
        if len(reasons) == 1:
            return telling
        listed = "".join(f"\n  {source.kind}: {e}" for source, e in zip(self._sources(), reasons))
        return type(telling)(
            f"{self.op.name} cannot run on {self.device}:{listed}", **vars(telling)
        )

    def _reference(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The reference's result, with the kernel's strides (which torch.compile was told)."""
        result = self.op.run_reference(*args, **kwargs)
        promised = self.op.overload(
            *map(_meta, args), **{name: _meta(value) for name, value in kwargs.items()}
        )
        if isinstance(result, torch.Tensor):
            return _restride(result, promised)
        if not isinstance(result, (tuple, list)):
            return result
        return tuple(_restride(r, p) for r, p in zip(result, promised))


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return [_meta(item) for item in value] if isinstance(value, (list, tuple)) else value


def _restride(result: Any, promised: Any) -> Any:
    if not isinstance(result, torch.Tensor) or result.stride() == promised.stride():
        return result
    return torch.empty_strided(
        result.shape, promised.stride(), dtype=result.dtype, device=result.device
    ).copy_(result)
