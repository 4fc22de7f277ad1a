"""From a call that no compiled variant served to one that serves the next: trace, stub, append.

Imported at the first call that has to be traced.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from jitkern import config, jit
from jitkern.entry import Entry
from jitkern.errors import CompilerNotFound, JitkernError, NotCached
from jitkern.kernel import Generated, Variant
from jitkern.launch.arguments import SHORT
from jitkern.launch.plans import Plan, Plans, reference_to, situation_of
from jitkern.launch.python import Runner
from jitkern.launch.runtime import announce
from jitkern.launch.slot import Parameter, Slot
from jitkern.launch.stub import text_of_stub
from jitkern.launch.symbols import Unsupported
from jitkern.launch.trace import Traced, trace
from jitkern.target import Target

_log = logging.getLogger(__name__)
STRIKES = 4  # traces that may fail in a situation: the first values may just have been odd ones
_builders: list[threading.Thread] = []


def link(
    slot: Slot,
    function: Callable[..., Any],
    runner: Runner,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Have the next call like this one served without Python. Raises nothing."""
    args = slot.complete(args, kwargs)
    situation = (id(runner.source), runner.device.index, *map(_concrete, args))
    if slot.full or slot.strikes[situation] >= STRIKES or jit.capturing():
        return
    with slot.lock:
        try:
            traced = trace(
                slot.op, function, slot.parameters, args, frozenset(kwargs), slot.returns,
                runner.device, runner.where, runner,
            )  # fmt: skip
        except (Unsupported, JitkernError) as e:
            slot.refuse(situation, str(e))
            return
    slot.refused.pop(situation, None)
    _Making(slot, function, runner, args, traced, situation).start()


class _Making:
    """A stub on its way from its trace to where it serves, and to the plans of the next process."""

    def __init__(
        self,
        slot: Slot,
        function: Callable[..., Any],
        runner: Runner,
        args: Sequence[Any],
        traced: Traced,
        situation: tuple[Any, ...],
    ) -> None:
        self.situation = situation
        self.settings = config.current()
        self.slot = slot
        self.runner = runner
        self.traced = traced
        self.variant = stub_variant(slot.op, slot.schema, traced, slot.parameters, args)
        self._plans = slot.plans(function, runner.source, runner.target)
        self._situation = situation_of(args)
        self._addresses = [kernel.function.address for kernel in traced.kernels]

    def start(self) -> None:
        """Serve at once if the stub is cached; else compile it in a thread."""
        never = self.settings.compile == "never"
        try:
            self._serve(jit.loaded(self.variant, self.runner.target, may_compile=False))
        except NotCached:
            if never:
                _log.info("%s: its stub is not cached, and compiling is off", self.slot.op)
            else:
                _later(self._build)
        except JitkernError as e:
            _log.warning("%s keeps to its Python launcher: %s", self.slot.op, e)
        else:
            if not never:
                _later(self._keep)

    def _build(self) -> None:
        if config.current() is not self.settings:
            return  # the next call like it begins anew
        try:
            self._serve(jit.loaded(self.variant, self.runner.target))
        except CompilerNotFound as e:
            announce(e)
        except NotCached:
            return  # the settings have just changed
        except JitkernError as e:
            self.slot.refuse(self.situation, str(e), strikes=STRIKES)
        else:
            self._keep()

    def _serve(self, stub: Any) -> None:
        digest = jit.key_of(self.variant, self.runner.target).digest
        self.slot.append(
            stub, digest, self._addresses, self.runner.device, self.settings, self.traced.frozen
        )

    def _keep(self) -> None:
        if config.current() is not self.settings:
            return
        keep(self._plans, self._situation, self.variant, self.traced, self.runner.target)


def keep(
    plans: Plans, situation: tuple[str, ...], variant: Variant, traced: Traced, target: Target
) -> tuple[Entry, bool] | None:
    """Publish what a process needs to do without this trace, unless a choice is still to come."""
    if traced.model is None:
        return None
    kernels = (jit.key_of(kernel.variant, target) for kernel in traced.kernels)
    stub = reference_to(jit.key_of(variant, target))
    return plans.publish(situation, Plan(stub, tuple(map(reference_to, kernels))), traced.model)


def stub_variant(
    op: str, schema: str, traced: Traced, parameters: Sequence[Parameter], args: Sequence[Any]
) -> Variant:
    """The stub as something to compile and cache; its label names the tensors' dtypes."""
    dtypes = {
        parameter.name: SHORT[value.dtype]
        for parameter, value in zip(parameters, args)
        if isinstance(value, torch.Tensor) and value.dtype in SHORT
    }
    text = text_of_stub(schema, traced)
    return Variant(op, Generated("stub.c", text=text), "stub", tuple(dtypes.items()))


def _concrete(value: Any) -> Any:
    """What a trace takes for constant without being asked."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim(), value.device
    return value if value is None or isinstance(value, bool) else type(value)


def settle() -> None:
    """Wait until every stub that is being compiled serves."""
    while _builders:
        _builders.pop().join()


def _later(work: Callable[[], None]) -> None:
    """In a thread that the interpreter waits for at its end."""
    thread = threading.Thread(target=work, name="jitkern stub")
    _builders[:] = [builder for builder in _builders if builder.is_alive()]
    try:
        thread.start()
    except RuntimeError:
        return  # the interpreter is ending
    _builders.append(thread)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_builders.clear)
