"""Processes that are forked to work for this one, and end with it.

Threads would share NVRTC's own lock, and the interpreter's: with 16 jobs they take 2.2 to 2.7 times
as long. A fork pays for an import of Torch once, and has all that its parent had. Its parent starts
no CUDA; threads of the parent hold no lock of Torch, since they use none of it, and the locks of
jitkern are renewed in the child (`jitkern._fork.after_fork`).
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from jitkern._fork import DIE_WITH_PARENT
from jitkern.compilers import child_process
from jitkern.errors import JitkernError

PATIENCE = 5.0  # seconds that a worker has for its end, after which it is killed
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Died(Exception):
    """The end of a process in the middle of a task. how: `by SIGKILL`, or `with status 1`."""

    def __init__(self, how: str) -> None:
        was = "was " * how.startswith("by ")
        memory = "; if memory was short, use fewer --jobs" * how.endswith("SIGKILL")
        super().__init__(f"the process that built it {was}ended {how}{memory}")


@dataclass(eq=False)
class Worker:
    """A process that performs one task at a time; after its end it is forked again.

    perform: called in the process with the arguments of each task. begun: called there first, with
    its end of the pipe.
    """

    perform: Callable[..., Any]
    name: str
    begun: Callable[[Connection], object] = lambda _: None
    daemon: bool = False

    def __post_init__(self) -> None:
        self._context = contextvars.copy_context()  # the settings of who made this object
        self.process: Any = None
        self.connection: Any = None

    def start(self) -> None:
        """Fork the process, if it does not run. Raises OSError."""
        if self.process is not None:
            return
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        process = context.Process(
            target=self._context.run, args=(self._work, theirs, os.getpid()),
            name=self.name, daemon=self.daemon,
        )  # fmt: skip
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
        self.process = process

    def send(self, *task: Any) -> None:
        """Begin a task. Raises OSError if no process can be started."""
        self.start()
        with contextlib.suppress(OSError):  # whoever asks for the result is told of the death
            self.connection.send(task)

    def result(self, seconds: float | None = None) -> Any:
        """Return what `perform` returned, or raise what it raised.

        Raises TimeoutError after so many seconds, and Died.
        """
        try:
            is_there = self.connection.poll(seconds)
            result = self.connection.recv() if is_there else None
        except (EOFError, OSError):
            self.connection.close()
            raise Died(self.ended()) from None
        if not is_there:
            raise TimeoutError
        if isinstance(result, BaseException):
            raise result
        return result

    def stop(self, *, at_once: bool) -> None:
        """Let the process end, in the middle of its task with `at_once`, and do not wait for it."""
        if self.process is not None:
            if at_once:
                self.process.terminate()  # its compilers are killed before it ends
            self.connection.close()

    def ended(self, seconds: float | None = PATIENCE) -> str:
        """Wait for the end of the process, which is killed after `seconds`; return how it ended."""
        process, self.process = self.process, None
        if process is None:
            return ""
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
        code = process.exitcode or 0
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"

    def _work(self, connection: Connection, parent: int) -> None:
        """Perform the tasks that come through the pipe, until it is closed."""
        follow(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        import torch

        torch.set_num_threads(1)  # a fork does not copy the threads of Torch
        self.connection.close()  # else the pipe would stay open after the end of our parent
        self.begun(connection)
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                task = connection.recv()
                try:
                    result = self.perform(*task)
                except JitkernError as e:
                    e.__cause__ = None  # which may be none that can be sent
                    result = e
                except Exception:  # noqa: BLE001  the edge of this process: the parent raises it
                    result = RuntimeError(f"a worker failed: {traceback.format_exc()}")
                connection.send(result)


def results(
    tasks: deque[int], perform: Callable[[int], Any], jobs: int
) -> Generator[tuple[int, Any], None, None]:
    """Yield each task with the result of `perform`; `jobs` of them run at once.

    A process has all that its parent had at the fork, so a task is sent as its number. Tasks may be
    taken away meanwhile. The result of a task whose process died is Died. Raises what `perform`
    raises.
    """
    # A daemon, as the workers of Dask are, may have no children.
    if jobs > 1 and hasattr(os, "fork") and not multiprocessing.current_process().daemon:
        yield from _in_processes(tasks, perform, min(jobs, len(tasks)))
    while tasks:
        task = tasks.popleft()
        yield task, perform(task)


def _in_processes(
    tasks: deque[int], perform: Callable[[int], Any], jobs: int
) -> Generator[tuple[int, Any], None, None]:
    workers = [Worker(perform, "jitkern prewarm", daemon=True) for _ in range(jobs)]
    idle = [*workers]
    busy: dict[Any, tuple[Worker, int]] = {}
    gc.freeze()  # else a collection in a process would copy the pages of all present objects
    try:
        while tasks or busy:
            while tasks and idle:
                worker, task = idle.pop(), tasks.popleft()
                worker.send(task)
                busy[worker.connection] = worker, task
            for ready in wait([*busy]):
                worker, task = busy.pop(ready)
                try:
                    result = worker.result()
                except Died as e:
                    result = e
                idle.append(worker)
                yield task, result
    finally:
        for worker in workers:
            worker.stop(at_once=bool(busy))
        for worker in workers:
            worker.ended(PATIENCE if busy else None)
        gc.unfreeze()


def follow(parent: int) -> None:
    """Let this process end with its parent, and leave a Ctrl-C, which reaches both, to the parent.

    SIGTERM ends what the process does: no compiler outlives it.
    """
    signal.signal(signal.SIGINT, _ignore)
    signal.signal(signal.SIGTERM, _interrupt)
    with contextlib.suppress(OSError, AttributeError):  # only Linux has prctl
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGTERM)
    if os.getppid() != parent:  # which has ended before this could be told of it
        os.kill(os.getpid(), signal.SIGTERM)


def _ignore(*_: object) -> None:
    pass


def _interrupt(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, _ignore)  # the end of the parent sends one more, into the cleanup
    child_process.end()
    raise SystemExit(1)  # which `multiprocessing` takes without a traceback
