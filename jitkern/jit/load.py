"""Load entries, each once in a process."""

from __future__ import annotations

import logging
from typing import Any

from jitkern import jit
from jitkern.cache import events
from jitkern.cache.entry import Entry
from jitkern.cache.events import Event
from jitkern.errors import LoadError
from jitkern.jit.cache_in_use import count_hit, one_at_a_time, open_cache
from jitkern.loading import LOADED
from jitkern.loading.loader import load
from jitkern.source.kinds import Source, Variant
from jitkern.target import Target

_log = logging.getLogger(__name__)


def loaded(variant: Variant, target: Target, *, may_compile: bool = True) -> Any:
    """The loaded entry of `variant`, as a callable (see `jitkern.loading.loader.load`).

    Raises the errors of `ensure`, and LoadError.
    """
    entry = jit.obtain.ensure(variant, target, may_compile=may_compile)
    digest = entry.manifest.digest
    content = _content(entry, variant.source)
    with one_at_a_time(f"load {digest}"):
        if content not in LOADED:
            try:
                LOADED[content] = load(variant.source, entry, variant.op)
            except LoadError as e:
                if e.whole:
                    raise
                evicted = not entry.path.exists()  # since the lookup: a miss like any other
                if not evicted:
                    _log.warning("%s; compiling it again", e)
                    open_cache().quarantine(entry)
                again = jit.obtain.ensure(
                    variant, target, refresh=not evicted, may_compile=may_compile
                )
                LOADED[content] = load(variant.source, again, variant.op)
        return LOADED[content]


def load_entry(source: Source, entry: Entry) -> Any:
    """The loaded content of an entry of this kind of source, loaded once. Raises LoadError."""
    content = _content(entry, source)
    with one_at_a_time(f"load {entry.manifest.digest}"):
        new = content not in LOADED
        if new:
            LOADED[content] = load(source, entry)
    if new:
        target = str(entry.manifest.inputs["target"])
        event = Event(entry.op, entry.variant, target, "hit", 0.0, str(entry.path))
        events.tell(event, source.kind)
        count_hit(entry)
    return LOADED[content]


def _content(entry: Entry, source: Source) -> str:
    """The name of the loaded content of an entry, of which an Extension has several functions."""
    return f"{entry.manifest.digest} {source.function}"
