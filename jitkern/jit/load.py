"""Load entries, each once in a process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jitkern import jit
from jitkern.cache import events
from jitkern.cache.entry import Entry
from jitkern.cache.events import Event
from jitkern.errors import LoadError
from jitkern.loading import LOADED, one_at_a_time
from jitkern.loading.loader import load
from jitkern.source.kinds import Source, Variant
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.cache.key import Key

Tell = Callable[[Event, str], object]
_log = logging.getLogger(__name__)


def loaded(variant: Variant, target: Target, *, may_compile: bool = True) -> Any:
    """The loaded entry of `variant`, as a callable (see `jitkern.loading.loader.load`).

    Raises the errors of `ensure`, and LoadError.
    """
    entry = jit.get_or_compile.ensure(variant, target, may_compile=may_compile)
    digest = entry.manifest.digest
    content = f"{digest} {variant.source.function}"
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
                    jit.open_cache().quarantine(entry)
                again = jit.get_or_compile.ensure(
                    variant, target, refresh=not evicted, may_compile=may_compile
                )
                LOADED[content] = load(variant.source, again, variant.op)
        return LOADED[content]


def loaded_here(variant: Variant, *, may_compile: bool = True) -> Any:
    """The loaded entry of `variant` for the CPU of this machine; see `loaded`."""
    return loaded(variant, Target.current("cpu"), may_compile=may_compile)


def key_here(variant: Variant) -> Key:
    """The key of `variant` for the CPU of this machine."""
    return jit.key_of(variant, Target.current("cpu"))


def load_entry(source: Source, entry: Entry, tell: Tell = events.tell) -> Any:
    """The loaded content of an entry of this kind of source, loaded once. Raises LoadError.

    tell: takes the event of a load, and the kind of source.
    """
    content = f"{entry.manifest.digest} {source.function}"
    with one_at_a_time(f"load {entry.manifest.digest}"):
        new = content not in LOADED
        if new:
            LOADED[content] = load(source, entry)
    if new:
        target = str(entry.manifest.inputs["target"])
        event = Event(entry.op, entry.variant, target, "hit", 0.0, str(entry.path))
        tell(event, source.kind)
    return LOADED[content]
