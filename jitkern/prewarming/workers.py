"""Processes that perform tasks side by side, forked so that an import of Torch is paid for once.

A worker has all objects that its parent had at the fork, so a task is sent as its number. The
worker takes one task at a time, sends messages while it works, and ends when its parent is gone.
The parent has no threads of its own, and starts no CUDA; a worker uses no thread of Torch that the
import of a package has started.
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

from jitkern.compilers import child_process
from jitkern.errors import JitkernError

PATIENCE = 5.0  # seconds that a worker has for its end, after which it is killed
_PR_SET_PDEATHSIG = 1
SIGNALS = (signal.SIGINT, signal.SIGTERM)
Perform = Callable[[int], Iterator[Any]]


class Died(NamedTuple):
    """The end of a worker in the middle of a task, with the reason."""

    reason: str


class Done(NamedTuple):
    """The end of a task."""


class Alone:
    """A performer of tasks in this process, one after the other."""

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
        """Yield messages, with the numbers of their tasks; waits for the first one."""
        assert self._task is not None
        for message in self._perform(self._task):
            yield self._task, message
        task, self._task = self._task, None
        yield task, Done()

    def close(self, *, at_once: bool) -> None:
        """Do nothing: there are no workers to end."""


class Crew:
    """At most `count` workers, each forked when there is a task for it."""

    def __init__(self, count: int, perform: Perform) -> None:
        self._count = count
        self._perform = perform
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, _Worker] = {}
        gc.freeze()  # else a collection in a worker would copy the pages of all present objects

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
        with contextlib.suppress(OSError):  # a dead worker is noticed in messages()
            worker.connection.send(task)

    def messages(self) -> Iterator[tuple[int, Any]]:
        """Yield messages, with the numbers of their tasks; waits for the first one."""
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
        """End all workers, after their tasks, or in the middle of them with `at_once`."""
        workers = [*self._idle, *self._busy.values()]
        for worker in workers:
            worker.ask_to_end(at_once=at_once)
        for worker in workers:
            worker.end(at_once=at_once)
        gc.unfreeze()

    def _fork(self) -> _Worker:
        others = [*self._busy, *(worker.connection for worker in self._idle)]
        return _Worker(*forked(_work, others, self._perform, name="jitkern prewarm", daemon=True))


class _Worker:
    """A worker as its parent sees it: the process, our end of the pipe, and its present task."""

    def __init__(self, process: Any, connection: Connection) -> None:
        self.process = process
        self.connection = connection
        self.task = -1

    def ask_to_end(self, *, at_once: bool) -> None:
        """Tell the worker to end, by closing its pipe, or with `at_once` by a signal."""
        if at_once:
            self.process.terminate()
        self.connection.close()

    def end(self, *, at_once: bool) -> str:
        """Wait for the worker's end, PATIENCE seconds at most with `at_once`; returns the cause."""
        cause = ended(self.process, PATIENCE if at_once else None)
        self.connection.close()
        was = "was " * cause.startswith("by ")
        memory = "; if memory was short, use fewer --jobs" * cause.endswith("SIGKILL")
        return f"the process that built it {was}ended {cause}{memory}"


def forked(
    work: Callable[..., object], *args: Any, name: str, daemon: bool = False
) -> tuple[Any, Connection]:
    """Fork a process that does `work`; return it, and our end of a pipe to it.

    work: called with `args`, its end of the pipe, our end, which it is to close, and the number of
    this process. Signals are blocked in it until `begin`.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=work, args=(*args, theirs, ours, os.getpid()), name=name, daemon=daemon
    )
    for stream in (sys.stdout, sys.stderr):  # else the process would write buffered text, too
        stream.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return process, ours


def ended(process: Any, seconds: float | None) -> str:
    """Wait for a process, which is killed after `seconds`; return how it ended."""
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
    code = process.exitcode or 0
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"


def _work(
    others: list[Connection],
    perform: Perform,
    connection: Connection,
    ours: Connection,
    parent: int,
) -> None:
    """Perform the tasks that come through the pipe, until it is closed."""
    begin(parent)
    for other in (ours, *others):
        other.close()  # else the pipes would stay open after the end of our parent
    with contextlib.suppress(EOFError, ConnectionError):
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


def begin(parent: int) -> None:
    """Make a forked process a worker, as `follow` says. The signals may be blocked before."""
    follow(parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    import torch

    torch.set_num_threads(1)  # a fork does not copy the threads of Torch


def follow(parent: int) -> None:
    """Let this process end with its parent, and leave a Ctrl-C, which reaches both, to the parent.

    SIGTERM ends what the process does: no compiler outlives it.
    """
    signal.signal(signal.SIGINT, _ignore)
    signal.signal(signal.SIGTERM, _interrupt)
    _end_with(parent)


def _end_with(parent: int) -> None:
    """Let the system end this process with its parent, even while it waits for a compiler."""
    with contextlib.suppress(OSError, AttributeError):  # only Linux has prctl
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _ignore(*_: object) -> None:
    pass


def _interrupt(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, _ignore)  # the end of the parent sends one more, into the cleanup
    child_process.end()
    raise SystemExit(1)  # which `multiprocessing` takes without a traceback


def _portable(e: Exception) -> Exception:
    """Return the error in a form that can be sent through a pipe."""
    if isinstance(e, JitkernError):
        e.__cause__ = None
        return e
    return RuntimeError(f"a prewarm worker failed: {traceback.format_exc()}")


def workers(count: int, perform: Perform) -> Alone | Crew:
    """Return a performer of tasks, `count` at once if this process can fork."""
    # A daemon, as the workers of Dask are, may have no children.
    forks = count > 1 and hasattr(os, "fork") and not multiprocessing.current_process().daemon
    return Crew(count, perform) if forks else Alone(perform)
