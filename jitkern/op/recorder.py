"""The C++ node that records calls of ops for Autograd: `recorder.cpp`, an artifact like any other.

Python records (`op/autograd_functions.py`) the calls that the node does not know, and all calls
until the node is loaded; that costs more than the call itself. The node is looked up in the cache
at the first call that Python records, and built once a process has recorded ENOUGH calls, as one
that trains does: both in the background.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern import config, jit
from jitkern._fork import after_fork
from jitkern.errors import JitkernError
from jitkern.op import recording
from jitkern.op.gradient import Gradient, spec_of
from jitkern.runtime import binding
from jitkern.source.kinds import Extension, Variant
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.calls.signature import Signature
    from jitkern.op.autograd import Autograd
    from jitkern.runtime.binding import Runtime

ENOUGH = 10_000  # calls, with which Python has lost 0.3 s; a build takes 20 s of one core
NAME = "jitkern_recorder"
_KINDS = frozenset("TtiIfFbBsS")  # of arguments that the node knows; see runtime.c
_log = logging.getLogger(__name__)


class Recorder:
    """The loaded node. record: the address of its C++ function.

    recording: whether this thread is inside the forward of a call that the node records.
    """

    def __init__(
        self, record: int, recording: Callable[[], bool], gradient: Callable[..., int]
    ) -> None:
        self.record, self.recording, self._gradient = record, recording, gradient
        self._lock = threading.Lock()
        after_fork(self._lock)

    def follow(self, recorded: Autograd) -> None:
        """Record the calls of an op with its present gradient; leave them to Python if it must."""
        binding.when_loaded(lambda runtime: self._install(runtime, recorded))

    def _install(self, runtime: Runtime, recorded: Autograd) -> None:
        with self._lock:
            gradient, slot = recorded.gradient, recorded.slot
            if slot is not None:
                known = gradient if serves(recorded.op.signature, gradient) else None
                handle = self._made(recorded.op.signature, known) if known else 0
                runtime.record(slot, self.record, handle)

    def _made(self, signature: Signature, gradient: Gradient) -> int:
        """Return the address of a gradient as C++ has it."""
        order = gradient.order
        assert order and signature.parameters is not None
        kinds = "".join(parameter.kind for parameter in signature.parameters)
        places = order.tensors, order.saved, order.plain

        def check(found: tuple[Any, ...], needs: tuple[Any, ...], like: tuple[Any, ...]) -> None:
            gradient.check(found, needs, [spec_of(tensor) for tensor in like])

        taken = gradient.taken() if gradient.op else None
        op = gradient.op.name if gradient.op and taken else ""
        return self._gradient(
            signature.name, kinds, *places, gradient.fills, gradient.of_values, check, op,
            taken or [],
        )  # fmt: skip


def serves(signature: Signature, gradient: Gradient | None) -> bool:
    """Whether the node can record calls of an op with this gradient."""
    if gradient is None or gradient.order is None or gradient.partial:
        return False
    kinds = {parameter.kind for parameter in signature.parameters or ()}
    return kinds <= _KINDS and {*signature.results} == {"T"} and signature.parameters is not None


def variant() -> Variant:
    """Return the variant from which the node is compiled."""
    folder = str(Path(__file__).parent)
    source = Extension("recorder.cpp", function="functions", name=NAME, folder=folder)
    return Variant(NAME, source)


class _State:
    """The numbers of the calls that Python recorded in this process and the node could have."""

    numbers = itertools.count(1)


_state = _State()


def count(recorded: Autograd) -> None:
    """Count a call that Python recorded; see the module."""
    if recorded.by_c is None:
        gradient = recorded.gradient
        recorded.by_c = recorded.slot is not None and serves(recorded.op.signature, gradient)
    if not recorded.by_c or recording.cpp:
        return
    number = next(_state.numbers)  # each number comes once, in whatever thread
    if number in (1, ENOUGH):
        config.background.BUILDS.later(lambda: _load(may_compile=number == ENOUGH))


def _load(*, may_compile: bool) -> None:
    """Load the node, and let it record the calls of all ops that it can."""
    try:
        with jit.announcement.silence():  # no call waits for it
            functions = jit.loaded(variant(), Target.current("cpu"), may_compile=may_compile)
    except (JitkernError, OSError) as e:
        _log.debug("Python records the calls that need a gradient: %s", e)
        return
    recording.cpp = recorder = Recorder(*functions())
    for recorded in [*recording.ALL]:
        recorder.follow(recorded)


def _count_anew() -> None:
    """Count from 1 in a forked child, which has none of its parent's threads."""
    _state.numbers = itertools.count(1)


after_fork(_count_anew)
