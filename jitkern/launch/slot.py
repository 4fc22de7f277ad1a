"""An op's place in the launch runtime: its compiled variants in this process, and those kept."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from jitkern import config, jit
from jitkern.errors import JitkernError
from jitkern.kernel import Generated, Source
from jitkern.launch.plans import Plans, entry_of, situation_of
from jitkern.launch.runtime import runtime
from jitkern.target import Target

_log = logging.getLogger(__name__)
_STUB = Generated("stub.c", text="")  # what a stub is loaded as; its text is in the entry's key


class Parameter(NamedTuple):
    """One argument of an op's schema: its name, and its kind as `runtime.c` letters them."""

    name: str
    kind: str


class Frozen(NamedTuple):
    """A value that a variant holds for constant, and what it is the value of."""

    what: str
    value: Any


class Slot:
    """One op on one device type. `refused` says why situations keep to the Python launcher.

    number: None in a process without the runtime, which only leaves stubs behind for the next.
    """

    def __init__(
        self,
        device: str,
        number: int | None,
        op: str,
        schema: str,
        parameters: list[Parameter],
        returns: int,
    ) -> None:
        self.device = device
        self.number = number
        self.op = op
        self.schema = schema
        self.parameters = parameters
        self.returns = returns
        self.refused: dict[tuple[Any, ...], str] = {}
        self.strikes: Counter[tuple[Any, ...]] = Counter()
        self.full = False
        self.lock = threading.RLock()
        self.known: set[tuple[Any, ...]] = set()
        self._recalled: set[tuple[Any, ...]] = set()
        self._plans: dict[tuple[Any, ...], Plans] = {}
        self._frozen: list[Frozen] = []
        self._retrying = threading.local()
        SLOTS.append(self)

    @property
    def misses(self) -> int:
        """How many calls asked Python."""
        found = runtime()
        return found.misses(self.number) if found and self.number is not None else 0

    def complete(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments by position."""
        return (*args, *(kwargs[p.name] for p in self.parameters[len(args) :]))

    def recall(
        self,
        function: Callable[..., Any],
        source: Source,
        target: Target,
        device: torch.device,
        args: Sequence[Any],
    ) -> bool:
        """Append the variants that the cache keeps for calls like this one; whether there are any.

        Asked once for each situation. Raises nothing.
        """
        preference = config.current().prefer
        situation = situation_of(args)
        asked = (source, device.index, preference, situation)
        if asked in self._recalled or config.current().compiler == "exact":
            return False
        with self.lock:
            if asked in self._recalled:
                return True  # another thread has, just now
            self._recalled.add(asked)
            try:
                return self._append_kept(function, source, target, device, situation)
            except (JitkernError, OSError, ValueError) as e:
                _log.info("%s is traced again: %s", self.op, e)
                return False

    def _append_kept(
        self,
        function: Callable[..., Any],
        source: Source,
        target: Target,
        device: torch.device,
        situation: tuple[str, ...],
    ) -> bool:
        found = False
        for _, plan in self.plans(function, source, target).find(situation, device):
            entries = [entry_of(reference) for reference in (plan.stub, *plan.kernels)]
            if None in entries:
                continue
            stub, *kernels = (
                jit.load_entry(kind, entry)
                for kind, entry in zip((_STUB, *[source] * len(plan.kernels)), entries)
                if entry
            )
            addresses = [kernel.address for kernel in kernels]
            self.append(stub, plan.stub[2], addresses, device, config.current())
            found = True
        return found

    def plans(self, function: Callable[..., Any], source: Source, target: Target) -> Plans:
        """What the cache keeps for this launch function."""
        key = (function, source, target)
        if key not in self._plans:
            self._plans[key] = Plans(self.op, self.schema, function, source, target)
        return self._plans[key]

    def refuse(self, situation: tuple[Any, ...], why: str, strikes: int = 1) -> None:
        """Note why a situation keeps to the Python launcher; after some strikes, for good."""
        if situation not in self.refused:
            _log.info("%s keeps to its Python launcher: %s", self.op, why)
        self.refused[situation] = why
        self.strikes[situation] += strikes

    def append(
        self,
        stub: Any,
        digest: str,
        addresses: list[int],
        device: torch.device,
        settings: config.Config,
        frozen: Sequence[Frozen] = (),
    ) -> None:
        """Let a loaded stub serve, over kernels at these addresses, under these settings."""
        known = (digest, device.index, settings.prefer, *addresses)
        with self.lock:
            if known in self.known:
                return
            self.known.add(known)
            self._frozen += frozen
            found = runtime()
            if not found or self.number is None:
                return
            if found.append(self.number, stub, addresses, device, settings) or self.full:
                return
            self.full = True
            _log.warning(
                "%s has as many compiled variants as it may have; further ones go through the "
                "Python launcher. What keeps changing: %s", self.op, _changing(self._frozen),
            )  # fmt: skip

    def retry(self, call: Callable[[], Any]) -> Any:
        """Call the op again, now that there are variants; what misses then goes on to Python."""
        self._retrying.now = True
        try:
            return call()
        finally:
            self._retrying.now = False

    @property
    def retrying(self) -> bool:
        """Whether this thread is in `retry`."""
        return getattr(self._retrying, "now", False)


def _changing(frozen: Sequence[Frozen]) -> str:
    """The values that variants hold for constant and that differ most among them."""
    values: dict[str, set[Any]] = {}
    for what, value in frozen:
        values.setdefault(what, set()).add(value)
    counts = Counter({what: len(seen) for what, seen in values.items() if len(seen) > 1})
    named = [f"{what} ({count} values)" for what, count in counts.most_common(3)]
    return ", ".join(named) or "dtypes, ranks, and the branches that its launch function takes"


SLOTS: list[Slot] = []


def _after_fork() -> None:
    """A child may have a lock that another thread of its parent held."""
    for slot in SLOTS:
        slot.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
