"""What this process does with entries: finds, builds and uses them; told to whoever listens.

Nothing here is heavy to import: a warm start counts its hits too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from jitkern.named_tuple import NamedTuple

STUB = "stub"  # the kind of source that launches kernels, and is none itself
_log = logging.getLogger(__name__)


class Event(NamedTuple):
    """What happened to a variant: status is `hit`, `built` or `failed`; seconds is what it took."""

    op: str
    variant: str
    target: str
    status: str
    seconds: float
    path: str = ""
    reason: str = ""


_callbacks: dict[object, Callable[[Event], None]] = {}
_counts = {"hits": 0, "compiles": 0, "failures": 0, "seconds": 0.0, "stubs": 0}
_used: dict[Path, None] = {}
_followers: list[Callable[[Path], None]] = []


def on_compile(callback: Callable[[Event], None]) -> Callable[[], None]:
    """Call `callback` with an Event for every hit and compile; returns a function that stops it.

    What the callback raises is logged: it never makes a call fail.
    """
    registration = object()
    _callbacks[registration] = callback

    def stop() -> None:
        _callbacks.pop(registration, None)

    return stop


def heard() -> bool:
    """Whether anybody listens: to `on_compile`, or to the log."""
    return bool(_callbacks) or _log.isEnabledFor(logging.DEBUG)


def stats() -> dict[str, float]:
    """This process so far: kernels found (`hits`), compiled and failed, and the seconds that took.

    `stubs` counts the stubs, and the runtime they need, that were compiled beside them.
    """
    return dict(_counts)


def follow(follower: Callable[[Path], None]) -> None:
    """Call `follower` with the path of every entry that this process used, and of each to come."""
    _followers.append(follower)
    for path in tuple(_used):
        follower(path)


def use(path: Path) -> None:
    """Note that this process uses the entry at a path."""
    if path not in _used:
        _used[path] = None
        for follower in _followers:
            follower(path)


def count_hit() -> None:
    """Count an entry that was found by a shorter way, of which nothing more is told."""
    _counts["hits"] += 1


def tell(event: Event, kind: str) -> None:
    """Tell of what happened to a variant of this kind of source."""
    if event.path:
        use(Path(event.path))
    if kind == STUB:
        _counts["stubs"] += event.status == "built"
    else:
        _counts[{"hit": "hits", "built": "compiles", "failed": "failures"}[event.status]] += 1
        _counts["seconds"] += event.seconds if event.status == "built" else 0
    _log.log(
        logging.DEBUG if event.status == "hit" else logging.INFO,
        "%s %s.%s for %s in %.3f s: %s",
        event.status,
        event.op,
        event.variant,
        event.target,
        event.seconds,
        event.path or event.reason,
    )
    for callback in tuple(_callbacks.values()):
        try:
            callback(event)
        except Exception:  # noqa: BLE001  the kernel is there all the same
            _log.exception("a callback of on_compile failed on %s", event)
