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
    with one_at_a_time(f"load {digest}"):
        if digest not in LOADED:
            try:
                LOADED[digest] = load(variant.source, entry)
            except LoadError as e:
                if e.whole:
                    raise
                evicted = not entry.path.exists()  # since the lookup: a miss like any other
                if not evicted:
                    _log.warning("%s; compiling it again", e)
                    open_cache().quarantine(entry)
                LOADED[digest] = load(
                    variant.source,
                    jit.obtain.ensure(
                        variant, target, refresh=not evicted, may_compile=may_compile
                    ),
                )
        return LOADED[digest]


def load_entry(source: Source, entry: Entry) -> Any:
    """The loaded content of an entry of this kind of source, loaded once. Raises LoadError."""
    digest = entry.manifest.digest
    with one_at_a_time(f"load {digest}"):
        if digest in LOADED:
            return LOADED[digest]
        LOADED[digest] = load(source, entry)
    target = str(entry.manifest.inputs["target"])
    event = Event(entry.op, entry.variant, target, "hit", 0.0, str(entry.path))
    events.tell(event, source.kind)
    count_hit(entry)
    return LOADED[digest]
