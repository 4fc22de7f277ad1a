"""The programs of an op in this process, and the launch records that they come from."""

from __future__ import annotations

import logging
import threading
import types
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitkern import config, jit, launch, runtime as runtime_room
from jitkern._fork import after_fork
from jitkern.cache import events
from jitkern.calls.signature import Signature, class_of, example_of, fixed_of
from jitkern.named_tuple import NamedTuple
from jitkern.runtime.binding import is_looked_up, runtime
from jitkern.source.kinds import Source
from jitkern.trace.scope import Scope, scope_of

if TYPE_CHECKING:
    from jitkern.jit.load import Tell
    from jitkern.launch.symbols import Specialized
    from jitkern.runtime.records import CallClass
    from jitkern.target import Target
    from jitkern.trace.program import Program

FEW = 4  # records that hold numbers for constant; more are tried for calls of just these numbers
MOST = 256  # values that are remembered
KnownAs = tuple[Scope, tuple[Any, ...]]
_log = logging.getLogger(__name__)


class LoadedProgram(NamedTuple):
    """A program over loaded kernels, which serves while `scope` holds."""

    program: Program
    kernels: Sequence[Any]
    scope: Scope

    def known_as(self, device: torch.device) -> KnownAs:
        """Return its scope, and all else that tells it from the other programs of an op."""
        addresses = [kernel.address for kernel in self.kernels]
        return self.scope, (self.program, device.index, self.scope.identity, *addresses)


class OpPrograms:
    """The programs of an op on a device type; `number` is their slot in the launch runtime."""

    def __init__(self, number: int, signature: Signature) -> None:
        self.number = number
        self.signature = signature
        self.lock = threading.RLock()
        self._classes: dict[tuple[Any, ...], CallClass] = {}
        self._constants: list[Specialized] = []
        self._places: dict[int, KnownAs] = {}  # by their places in C
        self.known: frozenset[KnownAs] = frozenset()  # the same
        self._full = False
        SLOTS.append(self)

    @property
    def misses(self) -> int:
        """The number of calls that went to Python."""
        launch_runtime = runtime()
        return launch_runtime.misses(self.number) if launch_runtime else 0

    @property
    def refused(self) -> dict[tuple[Any, ...], str]:
        """The reasons why calls keep the Python launcher, by their class."""
        return {kind: calls.refused for kind, calls in self._classes.items() if calls.refused}

    def calls_like(
        self, function: Callable[..., Any], source: Source, target: Target, device: torch.device,
        args: Sequence[Any],
    ) -> CallClass:  # fmt: skip
        """Return the class of calls like this one."""
        call = class_of(args)
        kind = id(function), id(source), device.index, *call
        calls = self._classes.get(kind)
        if calls is None:
            new = runtime_room.records.CallClass(
                self.signature, function, source, target, device, call
            )
            calls = self._classes.setdefault(kind, new)
        return calls

    def recall(self, calls: CallClass, args: Sequence[Any]) -> bool:
        """Append the next program that a record names for calls like this one, if there is one.

        Returns whether one was appended. Raises nothing.
        """
        if config.current().compiler == "exact" or (is_looked_up() and runtime() is None):
            return False
        if calls.scope and not calls.scope.holds():
            if calls.backoff > 1:  # what keeps changing would cost a lookup each time
                return False
        elif calls.scope and not calls.records and not self.may_have_more(calls):
            return False
        loaded: list[tuple[events.Event, str]] = []
        try:
            with self.lock:
                return self._append_next(calls, args, lambda *news: loaded.append(news))
        except Exception as e:  # noqa: BLE001  the call goes on without records
            calls.records = []
            _log.info("%s: cannot use its records, tracing: %s", self.signature.name, e)
            return False
        finally:
            for news in loaded:  # to listeners, who may wait for a thread that calls this op
                events.tell(*news)

    def may_have_more(self, calls: CallClass) -> bool:
        """Return whether a remote may have brought records since these calls looked for some."""
        return calls.fetches != events.fetches()

    def _append_next(self, calls: CallClass, args: Sequence[Any], tell: Tell) -> bool:
        function, records = calls.function, runtime_room.records
        plain = isinstance(function, types.FunctionType)
        scope = scope_of((function,) if plain else launch.tuned.parts_of(function))
        fixed, example, read = fixed_of(args), example_of(args), records.reader()
        if scope is not calls.scope or self.may_have_more(calls):
            calls.fetches, calls.scope = events.fetches(), scope
            calls.records = records.found(calls, scope, example, read)
        stored = [one for one in calls.records if one.fixed == fixed]
        few = sum(one.constant for one in stored) <= FEW
        for kept in [o for o in stored if few or o.is_for(fixed, example)]:
            calls.records = [one for one in calls.records if one is not kept]
            entries = [read.find(reference) for reference in kept.kernels]
            if None in entries or not records.is_fresh(kept, calls):
                continue
            records.adopt_runtime(kept, read, tell)
            if runtime() is None:
                calls.scope = None  # so that they are looked up again once there is one
                return False
            kernels = [jit.load.load_entry(calls.source, entry, tell) for entry in entries if entry]
            program = LoadedProgram(kept.program, kernels, scope)
            if self.append(calls, program):
                read.used(kept.entry)
                return True
        return False

    def refuse(self, calls: CallClass, why: str) -> None:
        """Note why calls of a class stay in Python. Other branches may still be traced."""
        if not calls.refused:
            _log.info("%s stays on the Python launcher: %s", self.signature.name, why)
        calls.refused = why
        calls.back_off(refused=True)

    def append(
        self,
        calls: CallClass,
        loaded: LoadedProgram,
        frozen: Sequence[Specialized] | None = None,
    ) -> bool:
        """Let a program serve calls of a class.

        It replaces the same program for an earlier scope. frozen: what a trace holds for constant;
        None for a program of a record. Returns False if C has this program already, or cannot have
        it: as long as no runtime is loaded, none is kept for it.
        """
        (program, kernels, scope), device = loaded, calls.device
        _, others = known = loaded.known_as(device)
        launch_runtime = runtime()
        with self.lock:
            calls.refused, calls.traced = "", True
            if launch_runtime is None:
                calls.scope = None  # its record is looked up once there is a runtime
            if launch_runtime is None or known in self.known or calls.forgotten:
                return False
            self._constants = [*self._constants, *(frozen or ())][-MOST:]
            same = next((at for at, (_, other) in self._places.items() if other == others), -1)
            if frozen is not None or same >= 0:
                calls.back_off(refused=False)
            try:
                place = launch_runtime.append(self.number, program, kernels, device, scope, same)
            except ValueError as e:
                _log.warning("%s: %s, and does not serve", self.signature.name, e)
                return False
            if place is None:
                if scope.holds():  # else it has changed since the trace, and others will follow
                    self.refuse(calls, "C cannot check some values for changes")
                return False
            replaced = self._places.get(place)
            self._places[place] = known
            self.known = frozenset(self._places.values())
            if replaced and replaced[1] != others and not self._full:
                self._full = True
                _log.warning(
                    "%s has as many programs as it may have; each new one replaces the one that "
                    "served longest ago. Values that keep changing: %s",
                    self.signature.name, _changing(self._constants),
                )  # fmt: skip
            return True

    def forget(self) -> None:
        """Start over, because the op's launch function was declared again.

        Programs that are being traced from the earlier one will never serve.
        """
        with self.lock:
            launch_runtime = runtime() if self._places else None  # which is loaded then
            for calls in self._classes.values():
                calls.forgotten = True
            self._classes.clear()
            self._places.clear()
            self.known = frozenset()
            self._constants.clear()
            if launch_runtime:
                launch_runtime.forget(self.number)


def _changing(frozen: Sequence[Specialized]) -> str:
    """Return, in words, the values that programs hold for constant and that differ most."""
    values: dict[str, set[Any]] = {}
    for what, value in frozen:
        values.setdefault(what, set()).add(value)
    counts = Counter({what: len(seen) for what, seen in values.items() if len(seen) > 1})
    named = [f"{what} ({count} values)" for what, count in counts.most_common(3)]
    return ", ".join(named) or "dtypes, ranks, and the branches that its launch function takes"


SLOTS: list[OpPrograms] = []


def _renew_locks() -> None:
    """Renew the locks in a forked child."""
    for programs in SLOTS:
        programs.lock = threading.RLock()


after_fork(_renew_locks)
