"""Modules that are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from jitkern._fork import after_fork

IMPORTED = time.time_ns()  # before any other module that runs; see runtime.code_version
FORK_WAITS = 10.0  # seconds, at most, for imports of other threads


def on_first_use(
    room: str, homes: Mapping[str, str] | None = None, *, elsewhere: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Return the `__getattr__` of a room (PEP 562), which imports its modules on first use.

    homes: public names of the room itself, with the modules that define them.
    elsewhere: names that are looked for in this room, with the modules that have them.
    """

    def attribute(name: str) -> Any:
        if homes and name in homes:
            value = getattr(_imported(f"{room}.{homes[name]}"), name)
            vars(sys.modules[room])[name] = value
            return value
        if not name.startswith("__"):
            try:
                return _imported(f"{room}.{name}")
            except ModuleNotFoundError as e:
                if e.name != f"{room}.{name}":
                    raise
        where = f": it is `{elsewhere[name]}.{name}`" if elsewhere and name in elsewhere else ""
        raise AttributeError(f"module `{room}` has no attribute `{name}`{where}")

    return attribute


class _Importing:
    """The threads that import on first use, for which a fork waits.

    A child has none of them, and would wait for ever for a module that one of them was importing.
    Imports never wait for each other, which could be for a lock of Python's that the other holds.
    """

    def __init__(self) -> None:
        self._gate = threading.Condition()
        self._depths: dict[int, int] = {}  # of imports within imports, by thread

    def __enter__(self) -> None:
        me = threading.get_ident()
        if me in self._depths:
            self._depths[me] += 1
            return
        with self._gate:
            self._depths[me] = 1

    def __exit__(self, *_: object) -> None:
        me = threading.get_ident()
        self._depths[me] -= 1
        if not self._depths[me]:
            with self._gate:
                del self._depths[me]
                self._gate.notify_all()

    def acquire(self) -> None:
        """Block new imports, and wait up to FORK_WAITS seconds for running ones."""
        self._gate.acquire()
        self._gate.wait_for(lambda: self._depths.keys() <= {threading.get_ident()}, FORK_WAITS)

    def release(self) -> None:
        """Let threads import again."""
        self._gate.release()

    def _at_fork_reinit(self) -> None:
        """Forget, in a forked child, the threads of its parent, as a lock of Python's does."""
        me = threading.get_ident()
        self._gate = threading.Condition()
        self._depths = {thread: n for thread, n in self._depths.items() if thread == me}


_importing = _Importing()


def _imported(name: str) -> ModuleType:
    with _importing:
        return importlib.import_module(name)


after_fork(held=_importing)
