"""The C++ node that records calls of ops for Autograd: `recorder.cpp`, an artifact like any other.

Python records (`op/autograd_functions.py`) the calls that the node does not know, and all calls
until the node is loaded; that costs more than the call itself. Once a runtime is loaded, which
calls the node, Python counts the calls. The node is looked up in the cache at the first one, and
built after ENOUGH, as a process that trains makes: both in the background.
"""

from __future__ import annotations

import itertools
import logging
import threading
from pathlib import Path
from typing import Any

from jitkern import config, jit
from jitkern._fork import after_fork
from jitkern.errors import JitkernError
from jitkern.op import recording
from jitkern.op.gradient import Gradient, spec_of
from jitkern.op.recording import CppRecorder
from jitkern.runtime import binding
from jitkern.source.kinds import Extension, Variant
from jitkern.target import Target

ENOUGH = 10_000  # calls, with which Python has lost 0.3 s; a build takes 20 s of one core
NAME = "jitkern_recorder"
_lock = threading.Lock()
after_fork(_lock)
_numbers = itertools.count(1)  # of the calls that Python recorded and the node could have
_log = logging.getLogger(__name__)


def follow(node: CppRecorder, slot: int) -> None:
    """Record the calls of an op with its present gradient; leave them to Python if it must."""
    with _lock:
        gradient, runtime = recording.GRADIENTS[slot], binding.runtime()
        handle = _in_cpp(node, gradient) if gradient and gradient.in_cpp else 0
        assert runtime
        runtime.record(slot, node.record, handle)


def _in_cpp(node: CppRecorder, gradient: Gradient) -> int:
    """Return the address of a gradient as C++ has it."""
    order, parameters = gradient.order, gradient.signature.parameters
    assert order and parameters is not None
    kinds = "".join(parameter.kind for parameter in parameters)
    places = order.tensors, order.saved, order.plain

    def check(found: tuple[Any, ...], needs: tuple[Any, ...], like: tuple[Any, ...]) -> None:
        gradient.check(found, needs, [spec_of(tensor) for tensor in like])

    taken = gradient.taken() if gradient.op else None
    op = gradient.op.name if gradient.op and taken else ""
    return node.gradient(
        gradient.name, kinds, *places, gradient.fills, gradient.of_values, check, op, taken or []
    )


def variant() -> Variant:
    """Return the variant from which the node is compiled."""
    folder = str(Path(__file__).parent)
    source = Extension("recorder.cpp", function="functions", name=NAME, folder=folder)
    return Variant(NAME, source)


def count(slot: int | None, gradient: Gradient) -> None:
    """Count a call that Python recorded; see the module."""
    if slot is None or recording.cpp or not gradient.in_cpp:
        return
    if not (binding.is_looked_up() and binding.runtime()):
        return
    number = next(_numbers)  # each number comes once, in whatever thread
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
    recording.cpp = node = CppRecorder(*functions())
    for slot in [*recording.GRADIENTS]:
        follow(node, slot)


def _count_anew() -> None:
    """Count from 1 in a forked child, which has none of its parent's threads."""
    global _numbers  # noqa: PLW0603
    _numbers = itertools.count(1)


after_fork(_count_anew)
