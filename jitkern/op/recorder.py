"""The C++ node that records calls of ops for Autograd: `recorder.cpp`, an artifact like any other.

Python records (`op/autograd.py`) the calls that the node does not know, and all calls until the
node is loaded; that costs more than the call itself. The node is looked up in the cache at the
first call that Python records, and built once a process has recorded ENOUGH calls, as one that
trains does: both in the background.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern import after_fork, jit
from jitkern.errors import JitkernError
from jitkern.op import autograd
from jitkern.op.gradient import Gradient, described
from jitkern.runtime import binding
from jitkern.source.kinds import Extension, Variant
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.calls.signature import Signature
    from jitkern.runtime.binding import Runtime

ENOUGH = 1000  # calls: a build takes 20 s of one core
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

    def follow(self, recorded: autograd.Autograd) -> None:
        """Record the calls of an op with its present gradient; leave them to Python if it must."""
        with self._lock:
            slot, gradient, handle = recorded.slot, recorded.gradient, 0
            if slot is None:
                return
            if gradient and serves(recorded.op.signature, gradient):
                handle = self._made(recorded.op.signature, gradient)

            def use(runtime: Runtime) -> None:
                runtime.record(slot, self.record, handle)

            binding.when_loaded(use)

    def _made(self, signature: Signature, gradient: Gradient) -> int:
        """Return the address of a gradient as C++ has it."""
        order = gradient.order
        assert order and signature.parameters is not None
        kinds = "".join(parameter.kind for parameter in signature.parameters)
        places = order.tensors, order.saved, order.plain

        def check(found: tuple[Any, ...], needs: tuple[Any, ...], like: tuple[Any, ...]) -> None:
            gradient.check(found, needs, [described(tensor) for tensor in like])

        return self._gradient(kinds, *places, gradient.fills, gradient.of_values, check)


def serves(signature: Signature, gradient: Gradient | None) -> bool:
    """Whether the node can record calls of an op with this gradient."""
    if (
        gradient is None
        or gradient.order is None
        or signature.parameters is None
        or gradient.partial
    ):
        return False
    kinds = {parameter.kind for parameter in signature.parameters}
    return kinds <= _KINDS and {*signature.results} == {"T"}


def variant() -> Variant:
    """Return the variant from which the node is compiled."""
    folder = str(Path(__file__).parent)
    source = Extension("recorder.cpp", function="functions", name="jitkern_recorder", folder=folder)
    return Variant("jitkern::recorder", source)


class _State:
    """The calls that Python recorded in this process, and the thread that looks up or builds."""

    calls = 0
    thread: threading.Thread | None = None


_state = _State()


def count() -> None:
    """Count a call that Python recorded; see the module."""
    _state.calls += 1
    if _state.calls in (1, ENOUGH) and autograd.IN_C.recorder is None:
        context, may_compile = contextvars.copy_context(), _state.calls == ENOUGH
        _state.thread = threading.Thread(
            target=context.run, args=(_load, may_compile), name="jitkern recorder", daemon=True
        )
        _state.thread.start()


def settle() -> None:
    """Wait until the node is looked up or built, if one of these is under way."""
    if _state.thread:
        _state.thread.join()


def _load(may_compile: bool) -> None:  # noqa: FBT001  called by a thread
    """Load the node, and let it record the calls of all ops that it can."""
    try:
        with jit.announcement.silence():  # no call waits for it
            functions = jit.loaded(variant(), Target.current("cpu"), may_compile=may_compile)
    except (JitkernError, OSError) as e:
        _log.debug("Python records the calls that need a gradient: %s", e)
        return
    autograd.IN_C.recorder = recorder = Recorder(*functions())
    for recorded in [*autograd.ALL]:
        recorder.follow(recorded)


def _forget_thread() -> None:
    """Forget, in a forked child, the thread of its parent."""
    _state.thread = None


after_fork(_forget_thread)
