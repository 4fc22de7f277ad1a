"""Perform tasks side by side in processes, forked so that an import of Torch is paid for once.

Threads would share NVRTC's own lock, and the interpreter's: with 16 jobs they take 2.2 to 2.7 times
as long. A process has all that its parent had at the fork, so a task is sent as its number. The
parent has no threads of its own, and starts no CUDA.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import traceback
from collections import deque
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from jitkern.errors import JitkernError
from jitkern.prewarming.workers import PATIENCE, begin, ended, forked

Perform = Callable[[int], Any]


class Died(NamedTuple):
    """The end of a process in the middle of a task, in place of its result."""

    reason: str


def results(
    tasks: deque[int], perform: Perform, jobs: int
) -> Generator[tuple[int, Any], None, None]:
    """Yield each task with what `perform` returns for it, of which `jobs` are performed at once.

    More tasks may be added meanwhile. Raises what `perform` raises.
    """
    # A daemon, as the workers of Dask are, may have no children.
    if jobs > 1 and hasattr(os, "fork") and not multiprocessing.current_process().daemon:
        yield from _in_processes(tasks, perform, jobs)
    while tasks:
        task = tasks.popleft()
        yield task, perform(task)


def _in_processes(
    tasks: deque[int], perform: Perform, jobs: int
) -> Generator[tuple[int, Any], None, None]:
    idle: list[tuple[Any, Connection]] = []
    busy: dict[Connection, tuple[Any, int]] = {}
    gc.freeze()  # else a collection in a process would copy the pages of all present objects
    try:
        while tasks or busy:
            while tasks and len(busy) < jobs:
                others = [*busy, *(connection for _, connection in idle)]
                process, connection = (
                    idle.pop()
                    if idle
                    else forked(_work, others, perform, name="jitkern prewarm", daemon=True)
                )
                busy[connection] = process, tasks[0]
                with contextlib.suppress(OSError):  # a dead process is noticed below
                    connection.send(tasks.popleft())
            for ready in wait([*busy]):
                assert isinstance(ready, Connection)
                connection, (process, task) = ready, busy.pop(ready)
                try:
                    result = connection.recv()
                    idle.append((process, connection))
                except (EOFError, OSError):
                    result = _death_of(process, connection)
                if isinstance(result, BaseException):
                    raise result
                yield task, result
    finally:
        at_once = bool(busy)
        running = [(process, connection) for connection, (process, _) in busy.items()]
        for process, connection in (*running, *idle):
            if at_once:
                process.terminate()  # its compilers are killed before it ends
            connection.close()
        for process, _ in (*running, *idle):
            ended(process, PATIENCE if at_once else None)
        gc.unfreeze()


def _death_of(process: Any, connection: Connection) -> Died:
    connection.close()
    cause = ended(process, PATIENCE)
    was = "was " * cause.startswith("by ")
    memory = "; if memory was short, use fewer --jobs" * cause.endswith("SIGKILL")
    return Died(f"the process that built it {was}ended {cause}{memory}")


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
                result = perform(task)
            except JitkernError as e:
                e.__cause__ = None  # which may be none that can be sent
                result = e
            except Exception:  # noqa: BLE001  the edge of this process: the parent raises it
                result = RuntimeError(f"a prewarm worker failed: {traceback.format_exc()}")
            connection.send(result)
