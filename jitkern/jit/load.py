"""What entries hold, loaded once in a process."""

from __future__ import annotations

import logging
from typing import Any

from jitkern import jit
from jitkern.cache import events
from jitkern.cache.entry import Entry
from jitkern.cache.events import Event
from jitkern.errors import LoadError
from jitkern.jit.cache_in_use import count_hit, one_at_a_time, open_cache
from jitkern.loading.loader import load
from jitkern.source.kinds import Source, Variant
from jitkern.target import Target

_log = logging.getLogger(__name__)
_loaded: dict[str, Any] = {}


def loaded(variant: Variant, target: Target, *, may_compile: bool = True) -> Any:
    """What `variant` compiles to, callable in this process (see `jitkern.loading.loader.load`).

    Raises what `ensure` does, and LoadError.
    """
    entry = jit.obtain.ensure(variant, target, may_compile=may_compile)
    digest = entry.manifest.digest
    with one_at_a_time(f"load {digest}"):
        if digest not in _loaded:
            try:
                _loaded[digest] = load(variant.source, entry)
            except LoadError as e:
                if e.whole:
                    raise
                gone = not entry.path.exists()  # evicted since it was found, which is a miss
                if not gone:
                    _log.warning("%s; compiling it again", e)
                    open_cache().quarantine(entry)
                _loaded[digest] = load(
                    variant.source,
                    jit.obtain.ensure(variant, target, refresh=not gone, may_compile=may_compile),
                )
        return _loaded[digest]


def load_entry(source: Source, entry: Entry) -> Any:
    """What an entry of this kind of source holds, loaded once in a process. Raises LoadError."""
    digest = entry.manifest.digest
    with one_at_a_time(f"load {digest}"):
        new = digest not in _loaded
        if new:
            _loaded[digest] = load(source, entry)
    if new:
        target = str(entry.manifest.inputs["target"])
        event = Event(entry.op, entry.variant, target, "hit", 0.0, str(entry.path))
        events.tell(event, source.kind)
        count_hit(entry)
    return _loaded[digest]
