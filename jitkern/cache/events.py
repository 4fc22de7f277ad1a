"""Events of this process (hits, builds, uses of entries), counted and passed on to listeners.

This module imports nothing heavy, since a warm start counts its hits too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from jitkern.named_tuple import NamedTuple

RUNTIME = "runtime"  # the kind of source that launches kernels, and is not a kernel itself
_log = logging.getLogger(__name__)


class Event(NamedTuple):
    """An event of a variant. seconds: its duration.

    status: `hit`, `fetched` (from a remote), `built` or `failed`.
    """

    op: str
    variant: str
    target: str
    status: str
    seconds: float
    path: str = ""
    reason: str = ""


_callbacks: dict[object, Callable[[Event], None]] = {}
_counts = {"hits": 0, "fetched": 0, "compiles": 0, "failures": 0, "seconds": 0.0, "runtimes": 0}
_used: dict[Path, None] = {}
followers: list[Callable[[Path], None]] = []


def on_compile(callback: Callable[[Event], None]) -> Callable[[], None]:
    """Call `callback` with an Event for every hit and compile; return a function to stop it.

    Exceptions of the callback are logged: a callback never makes a call fail.
    """
    registration = object()
    _callbacks[registration] = callback

    def stop() -> None:
        _callbacks.pop(registration, None)

    return stop


def heard() -> bool:
    """Return whether events have a listener: a callback of `on_compile`, or a debug log."""
    return bool(_callbacks) or _log.isEnabledFor(logging.DEBUG)


def stats() -> dict[str, float]:
    """Return counts of this process: `hits`, `compiles`, `failures` and `seconds` of compiling.

    `fetched` counts the misses that a remote answered; one answer may bring many entries.
    `runtimes` counts compilations of the launch runtime, which `compiles` leaves out.
    """
    return dict(_counts)


def follow(follower: Callable[[Path], None]) -> None:
    """Call `follower` with the path of every entry that this process has used or will use."""
    followers.append(follower)
    for path in tuple(_used):
        follower(path)


def fetches() -> int:
    """Return how many misses remotes have answered: with each, the cache may hold more records."""
    return int(_counts["fetched"])


def use(path: Path) -> None:
    """Note that this process uses the entry at `path`."""
    if path not in _used:
        _used[path] = None
        for follower in followers:
            follower(path)


def count(what: str) -> None:
    """Count what listeners get no event for.

    That is `hits` of a shortcut, or `fetched`, misses that a remote answered.
    """
    _counts[what] += 1


def tell(event: Event, kind: str) -> None:
    """Count and log an event of a variant with a source of this kind, and call the callbacks."""
    if event.path:
        use(Path(event.path))
    if event.status == "fetched":
        pass  # counted where remotes are asked, for choices too
    elif kind == RUNTIME:
        _counts["runtimes"] += event.status == "built"
    else:
        _counts[{"hit": "hits", "built": "compiles", "failed": "failures"}[event.status]] += 1
        _counts["seconds"] += event.seconds if event.status == "built" else 0
    _log.log(
        logging.DEBUG if event.status == "hit" else logging.INFO,
        "%s %s for %s in %.3f s: %s",
        event.status,
        ".".join(filter(None, (event.op, event.variant))),
        event.target,
        event.seconds,
        event.path or event.reason,
    )
    for callback in tuple(_callbacks.values()):
        try:
            callback(event)
        except Exception:  # noqa: BLE001  a callback must not make a call fail
            _log.exception("a callback of on_compile failed on %s", event)
