"""What happens to variants, told to whoever listens: the log, the counters and callbacks."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

from jitkern import used
from jitkern.entry import Entry
from jitkern.kernel import Generated, Source, Variant
from jitkern.key import Key
from jitkern.named_tuple import NamedTuple

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


def on_compile(callback: Callable[[Event], None]) -> Callable[[], None]:
    """Call `callback` with an Event for every hit and compile; returns a function that stops it.

    What the callback raises is logged: it never makes a call fail.
    """
    registration = object()
    _callbacks[registration] = callback

    def stop() -> None:
        _callbacks.pop(registration, None)

    return stop


def use(entry: Entry) -> None:
    """Note that this process uses an entry."""
    used.note(entry.path)


def stats() -> dict[str, float]:
    """This process so far: kernels found (`hits`), compiled and failed, and the seconds that took.

    `stubs` counts the stubs, and the runtime they need, that were compiled beside them.
    """
    if receipts := sys.modules.get("jitkern.receipts"):  # what it found came by none of this
        receipts.settle()
    return dict(_counts)


def report(
    variant: Variant,
    key: Key,
    status: str,
    started: float,
    entry: Entry | None = None,
    reason: str = "",
) -> None:
    """Tell that `variant` was a hit, built or failed; `started` is its time.perf_counter()."""
    seconds = time.perf_counter() - started
    path = str(entry.path) if entry else ""
    if entry:
        use(entry)
    event = Event(variant.op, variant.label, key.target, status, seconds, path, reason)
    _tell(event, variant.source)
    _log.debug("key inputs: %s", key.inputs)


def recall(source: Source, entry: Entry) -> None:
    """Tell of an entry that was found by its name alone."""
    use(entry)
    target = str(entry.manifest.inputs["target"])
    _tell(Event(entry.op, entry.variant, target, "hit", 0.0, str(entry.path)), source)


def _tell(event: Event, source: Source) -> None:
    if isinstance(source, Generated):
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
