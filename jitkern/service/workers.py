"""Processes in which the service builds, so that a crash, a hang or a Ctrl-C takes no answer away.

A worker is forked from a process with threads. Those threads hold no lock of Torch, since they use
none of it, and the locks of jitkern are renewed in the child (`jitkern._fork.after_fork`).
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import signal
import stat
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from jitkern.prewarming.workers import PATIENCE, begin, ended, forked
from jitkern.service.build import Outcome

Perform = Callable[..., Outcome]
_log = logging.getLogger(__name__)


class Worker:
    """A process that performs one task at a time; it is forked anew after its death."""

    def __init__(self, perform: Perform) -> None:
        self._perform = perform
        self._context = contextvars.copy_context()  # the settings of who made this object
        self._process: Any = None
        self._connection: Connection | None = None

    def ask(self, *task: Any, seconds: float) -> Outcome:
        """Return the outcome of a task; a worker that takes longer than `seconds` is ended."""
        try:
            connection = self._connection or self.start()
        except OSError as e:
            return Outcome(503, f"no process can be started: {e.strerror}", failed=True)
        try:
            connection.send(task)
            if not connection.poll(seconds):
                self.end()
                return Outcome(422, f"the build took more than {seconds:.0f} s", failed=True)
            outcome: Outcome = connection.recv()
            return outcome
        except (EOFError, OSError):
            return Outcome(422, f"the process that built it ended {self.end()}", failed=True)

    def start(self) -> Connection:
        """Fork the process, if it does not run."""
        if self._connection:
            return self._connection
        self._process, self._connection = forked(
            self._context.copy().run, _work, self._perform, name="jitkern serve"
        )
        return self._connection

    def kill(self, number: signal.Signals) -> None:
        """Send the process a signal, from any thread; who asked it is told of its death."""
        process = self._process  # another thread may take it away
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def end(self, *, at_once: bool = True) -> str:
        """End the process, in the middle of its task with `at_once`; return how it ended."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if process is None or connection is None:
            return ""
        if at_once:
            process.terminate()  # its compilers are killed before it ends
        else:
            connection.close()
        how = ended(process, PATIENCE)
        connection.close()
        return how


def _work(perform: Perform, connection: Connection, _: Connection, parent: int) -> None:
    """Perform the tasks that come through the pipe, until it is closed."""
    begin(parent)
    _close_sockets(connection.fileno())
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            task = connection.recv()
            try:
                outcome = perform(*task)
            except Exception:  # noqa: BLE001  the edge of this process
                _log.exception("a build failed")
                outcome = Outcome(500, "the service has a fault, which its log describes")
            connection.send(outcome)


def _close_sockets(own: int) -> None:
    """Close the sockets of the parent, clients and pipes of other workers; their ends would wait.

    Standard streams stay, which may be sockets of a system log.
    """
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):
            of_parent = descriptor > 2 and descriptor != own
            if of_parent and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)
