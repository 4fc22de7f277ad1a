"""What must go for a cache to keep to limits, and what this machine cannot use."""

from __future__ import annotations

from pathlib import Path

from jitkern.cache import eviction
from jitkern.cache.entry import Entry
from jitkern.cache.eviction import Use, after_publish, remove
from jitkern.cache.pins import pin, pinned, unpin
from jitkern.cache.store import Cache
from jitkern.cache_tools.installed import Installed

__all__ = ["Use", "after_publish", "evictable", "pin", "pinned", "remove", "unpin"]


def evictable(
    cache: Cache, *, max_size: int = 0, max_age: float = 0, stale: bool = False
) -> list[Use]:
    """What must go for the user root to keep to these limits (0 = none), oldest use first.

    max_size: bytes; max_age: seconds since the last use; stale: what this machine's Torch, CUDA,
    GPUs and package versions cannot use, too.
    """
    useless = _stale(cache) if stale else set()
    return eviction.evictable(cache, max_size=max_size or None, max_age=max_age, stale=useless)


def _stale(cache: Cache) -> set[Path]:
    """The entries of the user root that nothing here can use.

    They are for another Torch, CUDA or GPU, or of another version of the package they came in.
    """
    here = Installed.found()
    return {
        path
        for path, entry in cache.entries()
        if path.is_relative_to(cache.root)
        and isinstance(entry, Entry)
        and (not here.uses_target(path.parent.name) or not here.has(entry.manifest.package))
    }
