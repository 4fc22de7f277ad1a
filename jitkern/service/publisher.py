"""What the service has built, pushed to a store for those who cannot reach the service."""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from jitkern import cache_tools, remote
from jitkern.cache.store import Cache
from jitkern.errors import JitkernError
from jitkern.remote.layout import machine_of
from jitkern.remote.store import Store, Unavailable

REST = 5.0  # seconds after a build, in which others may end: each push writes an index
LAST = 30.0  # seconds for the last push
_log = logging.getLogger(__name__)


class Publisher:
    """A thread that calls `push` with the machines that have new entries."""

    def __init__(self, push: Callable[[Sequence[str]], object], rest: float = REST) -> None:
        self._push = push
        self._rest = rest
        self._machines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._closing = threading.Event()
        run = contextvars.copy_context().run  # with the settings of who made this object
        self._thread = threading.Thread(target=run, args=(self._run,), name="jitkern push")
        self._thread.daemon = True
        self._thread.start()

    def note(self, machines: Sequence[str]) -> None:
        """Have the entries of these machines pushed soon."""
        for machine in machines:
            self._machines.put(machine)

    def close(self) -> None:
        """Push what is left."""
        self._closing.set()
        self._machines.put("")
        self._thread.join(LAST)

    def _run(self) -> None:
        left: set[str] = set()
        last = False
        while not last:
            left.add(self._machines.get())
            self._closing.wait(self._rest)
            while not self._machines.empty():
                left.add(self._machines.get())
            last = "" in left  # behind all others: whoever closes while this pushes is heard
            left.discard("")
            if left and self._is_pushed(sorted(left)):
                left.clear()

    def _is_pushed(self, machines: Sequence[str]) -> bool:
        try:
            self._push(machines)
        except (JitkernError, Unavailable, OSError) as e:
            _log.warning("what was built is not pushed, and will be with the next build: %s", e)
            return False
        return True


def pusher(
    cache: Cache, ops: Collection[str], store: Store, key: Path | None
) -> Callable[[Sequence[str]], None]:
    """Return a function that pushes all entries of some ops for some machines.

    All of them each time: an index keeps the last pushes of a package alone. ops: the names that
    entries have. key: signs what is pushed, or None to push it as it is.
    """

    def push(machines: Sequence[str]) -> None:
        chosen = [
            entry
            for entry in cache_tools.chosen(cache, cache_tools.EntryFilter())
            if entry.op in ops and machine_of(entry.path.parent.name) in machines
        ]
        if chosen:
            remote.publish.push(cache, chosen, store, key=key, unsigned=key is None)

    return push
