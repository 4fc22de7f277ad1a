"""Background work: in daemon threads, under the settings of the caller.

The threads of a queue live while there is work. The interpreter waits for the queues before it
ends, so that a short process leaves something for the next, but no longer than `PATIENCE`. A forked
child has nothing of its parent's queues. What a piece of work raises is logged.
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
from collections.abc import Callable, Iterator

from jitkern._fork import after_fork

PATIENCE = 5.0  # seconds that the end of a process waits for work
THREADS = 16  # that build: most wait for a compiler, a remote or a lock
_log = logging.getLogger(__name__)


def start(name: str, work: Callable[[], object]) -> bool:
    """Start `work` in a new thread; returns False if no thread can be started."""
    run = contextvars.copy_context().run
    try:
        threading.Thread(target=run, args=(work,), name=name, daemon=True).start()
    except RuntimeError:  # too many threads, or the interpreter is ending
        return False
    return True


@contextlib.contextmanager
def overdue(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Call `act` in another thread if the block takes longer than `seconds`."""
    timer = threading.Timer(max(0.0, seconds), act)
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # as for `start`
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class WorkQueue:
    """A queue of work, and up to `threads` threads that do it; empty in a forked child."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._name = name
        self._most = threads
        QUEUES.append(self)
        self._forget()
        after_fork(self._forget)

    def _forget(self) -> None:
        self._changed = threading.Condition()
        self._work: collections.deque[Callable[[], object]] = collections.deque()
        self._running = 0  # threads

    def later(self, work: Callable[[], object]) -> bool:
        """Queue `work`, to run under the present settings; returns False if no thread can."""
        with self._changed:
            self._work.append(functools.partial(contextvars.copy_context().run, work))
            if self._running < self._most and start(self._name, self._run):
                self._running += 1
            if not self._running:
                self._work.clear()
            return self._running > 0

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until no work is left; returns whether that happened within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._work:
                    self._running -= 1
                    self._changed.notify_all()
                    return
                work = self._work.popleft()
            try:
                work()
            except BaseException:  # noqa: BLE001  the next piece of work must run all the same
                _log.exception("%s: work in the background failed", self._name)


QUEUES: list[WorkQueue] = []
BUILDS = WorkQueue("jitkern build", THREADS)


def settle() -> None:
    """Wait until all that was begun in the background has ended."""
    for queue in QUEUES:
        queue.settle()


def _finish() -> None:
    deadline = time.monotonic() + PATIENCE
    for queue in QUEUES:
        queue.settle(max(0.0, deadline - time.monotonic()))


def _at_exit() -> None:
    """Wait at exit, before Python stops starting threads and child processes if it tells when."""
    register = getattr(threading, "_register_atexit", atexit.register)
    with contextlib.suppress(RuntimeError):  # the interpreter is ending already
        register(_finish)


_at_exit()
