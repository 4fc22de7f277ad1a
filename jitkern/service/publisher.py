"""Push entries that the service has built to a store, for those who cannot reach the service."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from jitkern import cache_tools, config, remote
from jitkern.cache.store import Cache
from jitkern.errors import JitkernError
from jitkern.remote.layout import machine_of
from jitkern.remote.store import Store, Unavailable

REST = 5.0  # seconds after a build, in which others may end: each push writes an index
LAST = 30.0  # seconds for the last push
_log = logging.getLogger(__name__)


class Publisher:
    """Calls `push` in the background with the machines that have new entries."""

    def __init__(self, push: Callable[[Sequence[str]], object], rest: float = REST) -> None:
        self._push = push
        self._rest = rest
        self._context = contextvars.copy_context()  # the settings of who made this object
        self._machines: deque[str] = deque()
        self._closing = threading.Event()
        self._queue = config.background.WorkQueue("jitkern push")

    def note(self, machines: Iterable[str] = ()) -> None:
        """Have the entries of these machines pushed soon, with what is left of failed pushes."""
        self._machines.extend(machines)
        self._queue.later(lambda: self._context.run(self._push_all))

    def close(self) -> None:
        """Push what is left."""
        self._closing.set()
        self.note()
        self._queue.settle(LAST)

    def _push_all(self) -> None:
        if self._machines:
            self._closing.wait(self._rest)
        machines = {self._machines.popleft() for _ in range(len(self._machines))}
        try:
            if machines:
                self._push(sorted(machines))
        except (JitkernError, Unavailable, OSError) as e:
            _log.warning("what was built is not pushed, and will be with the next build: %s", e)
            self._machines.extend(machines)


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
