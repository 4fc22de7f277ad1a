"""From a call that no compiled variant served to one that serves the next: trace, stub, append."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitkern import config, jit
from jitkern.errors import CompilerNotFound, JitkernError, NotCached
from jitkern.kernel import Generated, Variant
from jitkern.launch.arguments import SHORT
from jitkern.launch.python import Runner
from jitkern.launch.runtime import runtime
from jitkern.launch.stub import text_of_stub
from jitkern.launch.symbols import Frozen, Unsupported
from jitkern.launch.trace import Parameter, Traced, trace

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

_log = logging.getLogger(__name__)
class Linker:
    """Makes stubs for one op on one device type, and appends them to its slot of the runtime."""

    def __init__(
        self, slot: int, op: str, schema: str, parameters: list[Parameter], returns: int
    ) -> None:
        found = runtime()
        assert found  # it gave the slot
        self.runtime = found
        self.slot = slot
        self.op = op
        self.schema = schema
        self.parameters = parameters
        self.returns = returns
        self.refused: dict[tuple[Any, ...], str] = {}  # situation -> why it stays with Python
        self._known: set[tuple[Any, ...]] = set()
        self._frozen: list[Frozen] = []
        self._full = False
        self._lock = threading.RLock()
        _linkers.append(self)

    def link(
        self,
        function: Callable[..., Any],
        runner: Runner,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Have the next call like this one served without Python. Raises nothing."""
        args = (*args, *(kwargs[p.name] for p in self.parameters[len(args) :]))
        situation = (id(runner.source), runner.device.index, *map(_concrete, args))
        if self._full or situation in self.refused:
            return
        with self._lock:
            try:
                traced = trace(
                    self.op, function, self.parameters, args, frozenset(kwargs), self.returns,
                    runner.device, runner.where, runner,
                )  # fmt: skip
            except (Unsupported, JitkernError) as e:
                self.refused[situation] = str(e)
                _log.info("%s keeps to its Python launcher: %s", self.op, e)
                return
            variant = stub_variant(self.op, self.schema, traced, self.parameters, args)
            addresses = [kernel.function.address for kernel in traced.kernels]
            known = (variant, runner.device.index, config.current().prefer, *addresses)
            if known in self._known:
                return
            self._known.add(known)
        self._ready(variant, runner, traced, addresses)

    def _ready(self, variant: Variant, runner: Runner, traced: Traced, addresses: list[int]) -> None:
        try:
            stub = jit.loaded(variant, runner.target, may_compile=False)
        except NotCached:
            if config.current().compile == "never":
                _log.info("%s: its stub is not cached, and compiling is off", self.op)
            else:
                _build_later(lambda: self._build(variant, runner, traced, addresses))
        except JitkernError as e:
            _log.warning("%s keeps to its Python launcher: %s", self.op, e)
        else:
            self._append(stub, runner, traced, addresses)

    def _build(self, variant: Variant, runner: Runner, traced: Traced, addresses: list[int]) -> None:
        try:
            stub = jit.loaded(variant, runner.target)
        except CompilerNotFound as e:
            _announce(f"calls go through the Python launcher, which is slower: {e}")
        except JitkernError as e:
            _log.warning("%s keeps to its Python launcher: %s", self.op, e)
        else:
            self._append(stub, runner, traced, addresses)

    def _append(self, stub: Any, runner: Runner, traced: Traced, addresses: list[int]) -> None:
        with self._lock:
            self._frozen += traced.frozen
            if self.runtime.append(self.slot, stub, addresses, runner.device):
                return
            if not self._full:
                self._full = True
                _log.warning(
                    "%s has as many compiled variants as it may have; further ones go through the "
                    "Python launcher. What keeps changing: %s", self.op, _changing(self._frozen),
                )  # fmt: skip


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


def _changing(frozen: Sequence[Frozen]) -> str:
    """The values that variants hold for constant and that differ most among them."""
    values = {what: {f.value for f in frozen if f.what == what} for what in {f.what for f in frozen}}
    counts = Counter({what: len(seen) for what, seen in values.items() if len(seen) > 1})
    named = [f"{what} ({count} values)" for what, count in counts.most_common(3)]
    return ", ".join(named) or "dtypes, ranks, and the branches that its launch function takes"


_linkers: list[Linker] = []
_builders: ThreadPoolExecutor | None = None
_pending: list[Future[None]] = []
_announced: set[str] = set()


def settle() -> None:
    """Wait until every stub that is being compiled serves."""
    while _pending:
        _pending.pop().result()


def _build_later(build: Callable[[], None]) -> None:
    """In a thread that the interpreter waits for at its end."""
    global _builders  # noqa: PLW0603
    if _builders is None:
        from concurrent.futures import ThreadPoolExecutor

        _builders = ThreadPoolExecutor(2, thread_name_prefix="jitkern stub")
    try:
        _pending.append(_builders.submit(build))
    except RuntimeError:
        return  # the interpreter is ending
    _pending[:] = [future for future in _pending if not future.done()]


def _announce(message: str) -> None:
    if message not in _announced:
        _announced.add(message)
        _log.warning("%s", message)


def _after_fork() -> None:
    """A child has not its parent's threads: what they were building, it will ask for again."""
    global _builders  # noqa: PLW0603
    _builders = None
    _pending.clear()
    for linker in _linkers:
        linker._lock = threading.RLock()
        linker._known.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
