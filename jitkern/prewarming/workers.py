"""Processes that perform tasks side by side, forked so that an import of Torch is paid for once.

A worker has all that its parent had when it was forked, so a task is sent as its number. It takes
one at a time, tells of it as it goes, and ends when its parent is gone. The parent has no threads
of its own, and starts no CUDA; what a package's import has started in Torch's threads is not used.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, NoReturn

from jitkern.cache import usage
from jitkern.compilers import child_process
from jitkern.errors import JitkernError

PATIENCE = 5.0  # seconds that a worker has for its end, after which it is killed
_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
Perform = Callable[[int], Iterator[Any]]


class Died(NamedTuple):
    """A worker ended in the middle of a task; why."""

    reason: str


class Done(NamedTuple):
    """A task was performed to its end."""


class Alone:
    """Performs tasks in this process, one after the other."""

    def __init__(self, perform: Perform) -> None:
        self._perform = perform
        self._task: int | None = None

    @property
    def busy(self) -> bool:
        """Whether a task is being performed."""
        return self._task is not None

    @property
    def free(self) -> bool:
        """Whether it can be given one more."""
        return self._task is None

    def give(self, task: int) -> None:
        """Begin a task."""
        self._task = task

    def messages(self) -> Iterator[tuple[int, Any]]:
        """What there is to tell, with the number of the task; waits for it."""
        assert self._task is not None
        for message in self._perform(self._task):
            yield self._task, message
        task, self._task = self._task, None
        yield task, Done()

    def close(self, *, at_once: bool) -> None:
        """End it; at_once: not after what it does."""


class Crew:
    """At most `count` processes, each forked when there is a task for it."""

    def __init__(self, count: int, perform: Perform) -> None:
        self._context = multiprocessing.get_context("fork")
        self._count = count
        self._perform = perform
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, _Worker] = {}
        gc.freeze()  # what is there now stays, and a collection in a worker would copy its pages

    @property
    def busy(self) -> bool:
        """Whether a task is being performed."""
        return bool(self._busy)

    @property
    def free(self) -> bool:
        """Whether it can be given one more."""
        return len(self._busy) < self._count

    def give(self, task: int) -> None:
        """Begin a task."""
        worker = self._idle.pop() if self._idle else self._fork()
        worker.task = task
        self._busy[worker.connection] = worker
        with contextlib.suppress(OSError):  # that it is dead is heard next
            worker.connection.send(task)

    def messages(self) -> Iterator[tuple[int, Any]]:
        """What there is to tell, with the number of the task; waits for it."""
        for connection in wait([*self._busy]):
            assert isinstance(connection, Connection)
            worker = self._busy[connection]
            try:
                message = connection.recv()
            except (EOFError, OSError):
                message = Died(worker.end(at_once=True))
                del self._busy[connection]
            if isinstance(message, BaseException):
                raise message
            if isinstance(message, Done):
                self._idle.append(self._busy.pop(connection))
            yield worker.task, message

    def close(self, *, at_once: bool) -> None:
        """End all workers; at_once: not after what they do."""
        workers = [*self._idle, *self._busy.values()]
        for worker in workers:
            worker.ask_to_end(at_once=at_once)
        for worker in workers:
            worker.end(at_once=at_once)
        gc.unfreeze()

    def _fork(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        others = [ours, *self._busy, *(worker.connection for worker in self._idle)]
        process = self._context.Process(
            target=_work, args=(theirs, others, self._perform, os.getpid()),
            name="jitkern prewarm", daemon=True,
        )  # fmt: skip
        for stream in (sys.stdout, sys.stderr):  # else the worker writes the rest of it, too
            stream.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until it is ready for them
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads of somebody else
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return _Worker(process, ours)


class _Worker:
    """As its parent has it: the process, our end of the pipe, and the task it is at."""

    def __init__(self, process: Any, connection: Connection) -> None:
        self.process = process
        self.connection = connection
        self.task = -1

    def ask_to_end(self, *, at_once: bool) -> None:
        """Tell it that there is no more to do."""
        if at_once:
            self.process.terminate()
        self.connection.close()

    def end(self, *, at_once: bool) -> str:
        """Wait for its end, but not long if it is to be at once; how it came."""
        self.process.join(PATIENCE if at_once else None)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.connection.close()
        code = self.process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            memory = "; if memory was short, give fewer --jobs" * (name == "SIGKILL")
            return f"the process that built it was ended by {name}{memory}"
        return f"the process that built it ended with status {code}"


def _work(connection: Connection, others: list[Connection], perform: Perform, parent: int) -> None:
    """The life of a worker."""
    signal.signal(signal.SIGINT, _ignore)  # a Ctrl-C reaches all: our parent ends us
    signal.signal(signal.SIGTERM, _interrupt)
    _end_with(parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    for other in others:
        other.close()  # else we would not see that our parent is gone
    import torch

    torch.set_num_threads(1)  # the threads that it may have had are not here
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            task = connection.recv()
            try:
                for message in perform(task):
                    connection.send(message)
                connection.send(Done())
            except ConnectionError:
                raise
            except Exception as e:  # noqa: BLE001  the edge of this process: the parent raises it
                connection.send(_portable(e))
    usage.flush()


def _end_with(parent: int) -> None:
    """Have the system interrupt this process when its parent ends: it may wait for a compiler."""
    with contextlib.suppress(OSError, AttributeError):  # Linux has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _ignore(*_: object) -> None:
    pass


def _interrupt(*_: object) -> NoReturn:
    child_process.end()
    raise KeyboardInterrupt


def _portable(e: Exception) -> Exception:
    """An error that can be sent."""
    if isinstance(e, JitkernError):
        e.__cause__ = None
        return e
    return RuntimeError(f"in a process that prewarms: {traceback.format_exc()}")


def workers(count: int, perform: Perform) -> Alone | Crew:
    """What performs tasks, `count` at once where this system can."""
    return Crew(count, perform) if count > 1 and hasattr(os, "fork") else Alone(perform)
