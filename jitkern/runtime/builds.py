"""Work in the background: builds of the launch runtime and of gradients, and a service's pushes.

A builder is one thread that lives while there is work. The interpreter waits for this thread before
it ends, so that a short process leaves something for the next, but no longer than `PATIENCE`.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import contextvars
import functools
import logging
import threading
import time
from collections.abc import Callable

from jitkern._fork import after_fork

PATIENCE = 5.0  # seconds that the end of a process waits for builds
WAITING = 128  # pieces of work that may wait; beyond that, later calls ask again
_log = logging.getLogger(__name__)


class WorkQueue:
    """A queue of work and the thread that does the work; empty in a forked child."""

    def __init__(self, name: str) -> None:
        self.name = name
        BUILDERS.append(self)
        self.forget()
        after_fork(self.forget)

    def forget(self) -> None:
        """Begin with an empty queue: a forked child has none of its parent's threads."""
        self._changed = threading.Condition()
        self._work: collections.deque[Callable[[], None]] = collections.deque()
        self._busy = False

    def later(self, work: Callable[[], None]) -> bool:
        """Queue `work`, to run under the present settings; returns False if too much is waiting."""
        with self._changed:
            if len(self._work) >= WAITING:
                return False
            self._work.append(functools.partial(contextvars.copy_context().run, work))
            if not self._busy:
                thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads, or the interpreter is ending
                    self._work.clear()
                    return False
                self._busy = True
            return True

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until no work is left; returns whether that happened within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._work:
                    self._busy = False
                    self._changed.notify_all()
                    return
                work = self._work.popleft()
            try:
                work()
            except Exception:  # noqa: BLE001  the next piece of work must run all the same
                _log.exception("%s: a build in the background failed", self.name)


BUILDERS: list[WorkQueue] = []
RUNTIME = WorkQueue("jitkern runtime")


def settle() -> None:
    """Wait until every build in the background has ended."""
    for builder in BUILDERS:
        builder.settle()


def _finish() -> None:
    deadline = time.monotonic() + PATIENCE
    for builder in BUILDERS:
        builder.settle(max(0.0, deadline - time.monotonic()))


def _at_exit() -> None:
    """Wait at exit, before Python stops starting threads and child processes if it tells when."""
    register = getattr(threading, "_register_atexit", atexit.register)
    with contextlib.suppress(RuntimeError):  # the interpreter is ending already
        register(_finish)


_at_exit()
