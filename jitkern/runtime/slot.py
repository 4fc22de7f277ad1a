"""An op's place in the launch runtime: its variants in this process, and its plans in the cache."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from jitkern import after_fork, config, jit, launch, runtime as room
from jitkern.cache import events
from jitkern.calls.call_class import class_of, example_of
from jitkern.calls.signature import Signature
from jitkern.config import Config
from jitkern.errors import JitkernError
from jitkern.named_tuple import NamedTuple
from jitkern.runtime.binding import Runtime, runtime, when_loaded
from jitkern.source.kinds import Generated, Source
from jitkern.trace.world import World, world_of

if TYPE_CHECKING:
    from jitkern.cache.entry import Entry
    from jitkern.launch.symbols import Frozen
    from jitkern.runtime.plans import Plan, Plans
    from jitkern.target import Target

STRIKES = 4  # traces that may fail for calls of one class and of sizes like these
FUTILE = 64  # traces that may fail for calls of one class
LATEST = 16  # worlds, sources and targets whose plans are at hand
REMEMBERED = 256  # calls without a stub whose repetitions are counted
AT_ONCE = 4  # stubs that may be in the making for calls of one class
MANY = 64  # variants that the dtypes, ranks and branches of an op may need
# How often a call must come before a stub is made for it, by the number of variants that hold a
# value for constant or are beyond MANY: they could be made without end, and few would serve again.
_PATIENCE = ((16, 1), (32, 2), (64, 8), (128, 32))
_OFTEN = 256
_log = logging.getLogger(__name__)
STUB = Generated("stub.c", text="")  # the source with which stubs are loaded from their entries


class Calls:
    """The state of calls of one class (source, device, dtypes, ranks, arguments that are None)."""

    def __init__(self) -> None:
        # Plans of the cache that were not tried yet, each with its entry.
        self.plans: Iterator[tuple[Entry, Plan]] | None = None
        self.world: World | None = None  # the world of these plans
        self.moves = 0  # calls in another world since these plans were looked up
        self.vain = 0  # worlds in which no plan was found
        self.fetches = 0  # of this process when these plans were looked up
        self.building: set[str] = set()  # the calls, by their numbers, whose stubs are being built
        self.failed = 0  # traces
        self.strikes: Counter[Any] = Counter()  # those of calls of such sizes, see `_magnitude`
        self.refused = ""  # why the calls keep the Python launcher
        self.forgotten = False  # whether the launch function was declared again
        self.pause = 0.0  # seconds that these calls wait after a stub could not be built
        self.resumes = 0.0  # when they try again
        self.unavailable: Config | None = None  # the only settings under which they wait
        self.has_receipt: bool | None = None  # None: a receipt was not looked for yet

    def put_off(self, settings: Config | None = None) -> None:
        """Wait for a minute, and then for twice as long each time: what failed may work later.

        settings: the only ones under which to wait; None: wait under all.
        """
        if not self.waits():  # or a build that began earlier has failed, too
            self.pause = 2 * self.pause or launch.runner.RETRY
            self.unavailable, self.resumes = settings, monotonic() + self.pause

    def waits(self) -> bool:
        """Whether it is too early to try again under the present settings."""
        return monotonic() < self.resumes and self.unavailable in (None, config.current())


class Loaded(NamedTuple):
    """A stub that was loaded, with its digest, over kernels at `addresses`, while `world` holds."""

    stub: Any
    digest: str
    addresses: list[int]
    world: World


class Launcher(NamedTuple):
    """A launch function over the kernels of a source, built for a target, on a device."""

    function: Callable[..., Any]
    source: Source
    target: Target
    device: torch.device


class Slot:
    """The place of an op on a device type in the launch runtime, with its variants."""

    def __init__(self, number: int, signature: Signature) -> None:
        self.number = number
        self.signature = signature
        self.lock = threading.RLock()
        self.known: set[tuple[Any, ...]] = set()
        self._calls: dict[tuple[Any, ...], Calls] = {}
        self._counts: OrderedDict[str, int] = OrderedDict()  # of calls without a stub
        self._plans: OrderedDict[tuple[Any, ...], Plans] = OrderedDict()  # of the latest worlds
        self._frozen: list[Frozen] = []
        self._constant = 0  # variants that hold a value for constant, or are for another world
        self._worlds: set[str] = set()  # their identities
        self._places: dict[int, Any] = {}  # the members of `known`, by their places in C
        self.serving: frozenset[Any] = frozenset()  # those that C has
        self._full = False
        SLOTS.append(self)

    @property
    def misses(self) -> int:
        """The number of calls that asked Python."""
        launch_runtime = runtime()
        return launch_runtime.misses(self.number) if launch_runtime else 0

    @property
    def refused(self) -> dict[tuple[Any, ...], str]:
        """The reasons why calls keep the Python launcher, by their class."""
        return {kind: calls.refused for kind, calls in self._calls.items() if calls.refused}

    def calls(self, source: Source, device: torch.device, args: Sequence[Any]) -> Calls:
        """Return the state of calls like this one."""
        kind = (id(source), device.index, config.current().prefer, *map(_class_of, args))
        calls = self._calls.get(kind)
        return calls if calls is not None else self._calls.setdefault(kind, Calls())

    def recall(self, calls: Calls, launcher: Launcher, args: Sequence[Any]) -> bool:
        """Append the next variant that a plan names for calls like this one, if there is one.

        The variant serves as soon as the runtime is loaded. Returns whether a variant was appended.
        Raises nothing.
        """
        if calls.world and not calls.world.holds():
            calls.moves += 1
            if calls.moves < _patience(calls.vain):  # what keeps changing costs a look-up each time
                return False
        elif calls.world and calls.plans is None and not self.may_have_more(calls):
            return False
        if config.current().compiler == "exact":
            return False
        with self.lock:
            try:
                return self._append_next(calls, launcher, args)
            except (JitkernError, OSError, ValueError) as e:
                calls.plans = None
                _log.info("%s: cannot use its plans, tracing again: %s", self.signature.name, e)
                return False

    def may_have_more(self, calls: Calls) -> bool:
        """Return whether a remote may have brought plans since these calls looked for some."""
        return calls.fetches != events.fetches()

    def _append_next(self, calls: Calls, launcher: Launcher, args: Sequence[Any]) -> bool:
        world = world_of(launch.tuned.parts_of(launcher.function))
        if world is not calls.world or self.may_have_more(calls):
            calls.fetches, calls.moves = events.fetches(), 0
            plans = self.plans(launcher, world)
            calls.plans = plans.find(class_of(args), example_of(args), launcher.device)
            calls.vain += world is not calls.world
            calls.world = world
        for entry, plan in calls.plans or ():
            entries = [room.plans.entry_of(name) for name in (plan.stub, *plan.kernels)]
            if None in entries:
                continue
            stub, *kernels = (
                jit.load.load_entry(kind, entry)
                for kind, entry in zip((STUB, *[launcher.source] * len(plan.kernels)), entries)
                if entry
            )
            variant = Loaded(stub, plan.stub[2], [kernel.address for kernel in kernels], world)
            if self.append(calls, variant, launcher.device, config.current()):
                calls.vain = 0
                if not calls.has_receipt and not plan.constant:
                    calls.has_receipt = True
                    room.recall.leave_later(self, launcher, world, class_of(args), entry.path)
                return True
        calls.plans = None
        return False

    def plans(self, launcher: Launcher, world: World) -> Plans:
        """Return the plans of this launch function in this world."""
        function, source, target, _ = launcher
        key = (world, source, target)
        if key not in self._plans:
            op, schema = self.signature.name, self.signature.schema
            for known in [known for known in self._plans if not known[0].holds()]:
                del self._plans[known]  # a world keeps alive what its names were bound to
            self._plans[key] = room.plans.Plans(op, schema, function, world, source, target)
            while len(self._plans) > LATEST:
                self._plans.popitem(last=False)
        return self._plans[key]

    @property
    def patience(self) -> int:
        """How often a call must come before a stub is made for it."""
        return _patience(self._constant + max(0, len(self.known) - MANY))

    def wants_stub(self, calls: Calls, args: Sequence[Any]) -> bool:
        """Whether to build a stub for a call that no variant served."""
        if calls.failed >= FUTILE or calls.waits():
            return False
        if calls.strikes and calls.strikes[_magnitude(args)] >= STRIKES:
            return False
        call = example_of(args)
        if len(calls.building) >= AT_ONCE or call in calls.building:
            return False
        needed = self.patience
        if needed == 1:
            return True
        with self.lock:
            times = self._counts.pop(call, 0) + 1
            if times < needed:
                self._counts[call] = times
                while len(self._counts) > REMEMBERED:
                    self._counts.popitem(last=False)
        return times >= needed

    def refuse(self, calls: Calls, why: str, args: Sequence[Any] | None = None) -> None:
        """Note why calls keep the Python launcher.

        args: of the call whose trace failed. Another branch of the launch function, which calls of
            other sizes take, may be traced all the same. None: no call of the class has a chance.
        """
        if not calls.refused:
            _log.info("%s keeps to its Python launcher: %s", self.signature.name, why)
        calls.refused = why
        calls.failed = FUTILE if args is None else calls.failed + 1
        if args is not None:
            calls.strikes[_magnitude(args)] += 1

    def append(
        self,
        calls: Calls,
        variant: Loaded,
        device: torch.device,
        settings: Config,
        frozen: Sequence[Frozen] = (),
    ) -> bool:
        """Let a variant serve `calls` on a device, under these settings.

        Returns False if this variant is known already.
        """
        stub, _, addresses, world = variant
        known = known_as(variant, device, settings)
        with self.lock:
            calls.refused = ""
            if known in self.known or calls.forgotten:
                return False
            self.known.add(known)
            self._frozen += frozen
            self._constant += bool(frozen) or world.identity not in self._worlds
            self._worlds.add(world.identity)

        def add(loaded: Runtime) -> None:
            with self.lock:
                if calls.forgotten:
                    return
                place = loaded.append(self.number, stub, addresses, device, settings, world)
                if place is None:
                    self.known.discard(known)
                    if world.holds():  # else it has changed since the trace, and others will follow
                        self.refuse(calls, "C cannot check whether all that it reads is unchanged")
                    return
                replaced = self._places.get(place)
                self._places[place] = known
                self.serving = frozenset(self._places.values())
                self.known.discard(replaced)
                if replaced and not self._full:
                    self._full = True
                    _log.warning(
                        "%s has as many compiled variants as it may have; each new variant "
                        "replaces the one that served longest ago. Values that keep changing: %s",
                        self.signature.name, _changing(self._frozen),
                    )  # fmt: skip

        when_loaded(add)
        return True

    def forget(self) -> None:
        """Begin anew, because the op's launch function was declared again.

        Stubs that are being built for the earlier launch function will never serve.
        """
        launch_runtime = runtime()
        with self.lock:
            for calls in self._calls.values():
                calls.forgotten = True
            self._calls.clear()
            self._counts.clear()
            self._plans.clear()
            self._places.clear()
            self.serving = frozenset()
            self._frozen.clear()
            self._worlds.clear()
            self._constant = 0
            self.known.clear()
            if launch_runtime:
                launch_runtime.forget(self.number)


def known_as(variant: Loaded, device: torch.device, settings: Config) -> tuple[Any, ...]:
    """Return what tells a variant of a slot from its others."""
    digest, addresses, world = variant[1:]
    return (digest, device.index, settings.prefer, world, *addresses)


def _patience(count: int) -> int:
    """Return how often a call must come before there is another of `count` attempts at a stub."""
    return next((times for stubs, times in _PATIENCE if count < stubs), _OFTEN)


def _class_of(value: Any) -> Any:
    """Return an argument's part of the class of its call in this process."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim(), value.device
    if isinstance(value, list):
        if value and isinstance(value[0], torch.Tensor):
            return frozenset((tensor.dtype, tensor.device) for tensor in value)
        return tuple(map(_class_of, value))
    return value if value is None or isinstance(value, (bool, str)) else type(value)


def _magnitude(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the sizes and integers of a call, each by its number of bits."""

    def of(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(of, value))
        shape = getattr(value, "shape", None)
        if shape is not None:
            return tuple([size.bit_length() for size in shape])
        return value.bit_length() if isinstance(value, int) else None

    return tuple(map(of, args))


def _changing(frozen: Sequence[Frozen]) -> str:
    """Return, in words, the values that variants hold for constant and that differ most."""
    values: dict[str, set[Any]] = {}
    for what, value in frozen:
        values.setdefault(what, set()).add(value)
    counts = Counter({what: len(seen) for what, seen in values.items() if len(seen) > 1})
    named = [f"{what} ({count} values)" for what, count in counts.most_common(3)]
    return ", ".join(named) or "dtypes, ranks, and the branches that its launch function takes"


SLOTS: list[Slot] = []


def _forget_builds() -> None:
    """Forget, in a forked child, the locks and the builds of its parent's threads."""
    for slot in SLOTS:
        slot.lock = threading.RLock()
        for calls in slot._calls.values():
            calls.building.clear()


after_fork(_forget_builds)
