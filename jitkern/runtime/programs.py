"""The programs of an op in this process, and the launch records that they come from."""

from __future__ import annotations

import logging
import threading
import types
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitkern import config, jit, launch, runtime as runtime_room
from jitkern._fork import after_fork
from jitkern.cache import events
from jitkern.calls.signature import Signature, class_of
from jitkern.launch.devices import Launcher
from jitkern.named_tuple import NamedTuple
from jitkern.runtime.binding import Runtime, runtime, when_loaded
from jitkern.source.kinds import Source
from jitkern.trace.world import World, world_of

if TYPE_CHECKING:
    from jitkern.jit.load import Tell
    from jitkern.launch.symbols import Specialized
    from jitkern.runtime.records import StoredRecord
    from jitkern.trace.program import Program

TRACES = 16  # of the calls of a class, and of its world, that are made without backoff
FEW = 4  # records that hold numbers for constant; more are tried for calls of just these numbers
MOST = 256  # values that are remembered
BACKOFF = 8, 16  # at most 2**8 calls are between two more programs, 2**16 between refused traces
_log = logging.getLogger(__name__)


class CallClassState:
    """The state of calls of one class (source, device, dtypes, ranks, arguments that are None)."""

    def __init__(self) -> None:
        self.records: list[StoredRecord] = []  # of the cache, that were not tried yet
        self.world: World | None = None  # the world of these records
        self.fetches = 0  # of this process when these records were looked up
        self.refusals = 0  # traces that failed
        self.traces = 0  # that gave a program, and changes of what such a program has read
        self.backoff = 0  # calls until the next trace: exponential backoff
        self.appended = False  # whether a program serves, or will as soon as there is a runtime
        self.refused = ""  # why the calls keep the Python launcher
        self.rejects: KnownAs | None = None  # a program that C had, perhaps, as it missed a call
        self.forgotten = False  # whether the launch function was declared again

    def is_due(self) -> bool:
        """Whether to trace a call that no program served."""
        self.backoff -= self.backoff > 0
        return not self.backoff and not (self.appended and runtime() is None)

    def back_off(self, *, refused: bool) -> None:
        """Trace less often, after a trace that gave one program more, or none if `refused`."""
        if refused:
            self.refusals += 1
            self.backoff = 1 << min(self.refusals, BACKOFF[1])
        else:
            self.traces += 1
            self.backoff = 1 << min(max(0, self.traces - TRACES), BACKOFF[0])


class LoadedProgram(NamedTuple):
    """A program over loaded kernels, which serves while `world` holds."""

    program: Program
    kernels: Sequence[Any]
    world: World


class OpPrograms:
    """The programs of an op on a device type; `number` is their slot in the launch runtime."""

    def __init__(self, number: int, signature: Signature) -> None:
        self.number = number
        self.signature = signature
        self.lock = threading.RLock()
        self.known: set[KnownAs] = set()
        self._states: dict[tuple[Any, ...], CallClassState] = {}
        self._constants: list[Specialized] = []
        self._places: dict[int, KnownAs] = {}  # members of `known`, by their places in C
        self.serving: frozenset[KnownAs] = frozenset()  # those that C has
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
        return {kind: state.refused for kind, state in self._states.items() if state.refused}

    def state_of(self, source: Source, device: torch.device, args: Sequence[Any]) -> CallClassState:
        """Return the state of calls like this one."""
        kind = (id(source), device.index, *class_of(args))
        state = self._states.get(kind)
        return state if state is not None else self._states.setdefault(kind, CallClassState())

    def recall(self, state: CallClassState, launcher: Launcher, args: Sequence[Any]) -> bool:
        """Append the next program that a record names for calls like this one, if there is one.

        Returns whether one was appended; it serves once the runtime is loaded. Raises nothing.
        """
        if config.current().compiler == "exact":
            return False
        if state.world and not state.world.holds():
            if state.backoff > 1:  # what keeps changing would cost a lookup each time
                return False
        elif state.world and not state.records and not self.may_have_more(state):
            return False
        loaded: list[tuple[events.Event, str]] = []
        try:
            with self.lock:
                return self._append_next(state, launcher, args, lambda *news: loaded.append(news))
        except Exception as e:  # noqa: BLE001  the call goes on without records
            state.records = []
            _log.info("%s: cannot use its records, tracing: %s", self.signature.name, e)
            return False
        finally:
            for news in loaded:  # to listeners, who may wait for a thread that calls this op
                events.tell(*news)

    def may_have_more(self, state: CallClassState) -> bool:
        """Return whether a remote may have brought records since these calls looked for some."""
        return state.fetches != events.fetches()

    def _append_next(
        self, state: CallClassState, launcher: Launcher, args: Sequence[Any], tell: Tell
    ) -> bool:
        function, source, target, device = launcher
        plain, records = isinstance(function, types.FunctionType), runtime_room.records
        world = world_of((function,) if plain else launch.tuned.parts_of(function))
        known, read = records.CallClass.of(self.signature, launcher, world, args), records.reader()
        if world is not state.world or self.may_have_more(state):
            state.fetches, state.world = events.fetches(), world
            state.records = records.found(known, read)
        stored = [one for one in state.records if one.record.fixed == known.fixed]
        few = sum(one.record.constant for one in stored) <= FEW
        for kept in [o for o in stored if few or o.record.is_for(known.fixed, known.example)]:
            state.records = [one for one in state.records if one is not kept]
            entries = [read.find(reference) for reference in kept.record.kernels]
            if None in entries or not records.is_fresh(kept, self.signature.name, source, target):
                continue
            records.adopt_runtime(kept.record, read, tell)
            kernels = [jit.load.load_entry(source, entry, tell) for entry in entries if entry]
            program = LoadedProgram(kept.record.program, kernels, world)
            if self.append(state, program, device):
                read.used(kept.entry)
                return True
        return False

    def refuse(self, state: CallClassState, why: str) -> None:
        """Note why calls of a class stay in Python. Other branches may still be traced."""
        if not state.refused:
            _log.info("%s stays on the Python launcher: %s", self.signature.name, why)
        state.refused = why
        state.back_off(refused=True)

    def append(
        self,
        state: CallClassState,
        loaded: LoadedProgram,
        device: torch.device,
        frozen: Sequence[Specialized] | None = None,
    ) -> bool:
        """Let a program serve calls of a class on a device.

        It replaces the same program for an earlier world. frozen: what a trace holds for constant;
        None for a program of a record. Returns False if this program is known already.
        """
        program, kernels, world = loaded
        known = known_as(loaded, device)
        with self.lock:
            state.refused, state.appended = "", True
            if known in self.known or state.forgotten:
                return False
            self.known.add(known)
            self._constants = [*self._constants, *(frozen or ())][-MOST:]
            if frozen is not None or self._place_of(known) >= 0:
                state.back_off(refused=False)

        def add(runtime: Runtime) -> None:
            with self.lock:
                if state.forgotten:
                    return
                try:
                    place = runtime.append(
                        self.number, program, kernels, device, world, self._place_of(known)
                    )
                except ValueError as e:
                    self.known.discard(known)
                    _log.warning("%s: %s, and does not serve", self.signature.name, e)
                    return
                if place is None:
                    self.known.discard(known)
                    if world.holds():  # else it has changed since the trace, and others will follow
                        self.refuse(state, "C cannot check some values for changes")
                    return
                replaced = self._places.get(place)
                self._places[place] = known
                self.serving = frozenset(self._places.values())
                self.known.discard(replaced)
                if replaced and replaced.others != known.others and not self._full:
                    self._full = True
                    _log.warning(
                        "%s has as many programs as it may have; each new one replaces the one "
                        "that served longest ago. Values that keep changing: %s",
                        self.signature.name, _changing(self._constants),
                    )  # fmt: skip

        when_loaded(add)
        return True

    def _place_of(self, known: KnownAs) -> int:
        """Return the place in C of the same program for another world, or -1."""
        same = (place for place, other in self._places.items() if other.others == known.others)
        return next(same, -1)

    def forget(self) -> None:
        """Start over, because the op's launch function was declared again.

        Programs that are being traced from the earlier one will never serve.
        """
        launch_runtime = runtime()
        with self.lock:
            for state in self._states.values():
                state.forgotten = True
            self._states.clear()
            self._places.clear()
            self.serving = frozenset()
            self._constants.clear()
            self.known.clear()
            if launch_runtime:
                launch_runtime.forget(self.number)


class KnownAs(NamedTuple):
    """The identity of a program of an op. others: all but the objects of its world."""

    world: World
    others: tuple[Any, ...]


def known_as(loaded: LoadedProgram, device: torch.device) -> KnownAs:
    """Return what tells a program of an op from its others."""
    program, kernels, world = loaded
    addresses = [kernel.address for kernel in kernels]
    others = (program, device.index, world.identity, *addresses)
    return KnownAs(world, others)


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
