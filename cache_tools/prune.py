"""Choose the entries to remove, by limits of the cache or because this machine cannot use them."""

from __future__ import annotations

from pathlib import Path

from jitkern.cache import eviction
from jitkern.cache.entry import Entry
from jitkern.cache.eviction import Use, after_publish, remove
from jitkern.cache.store import Cache
from jitkern.cache_tools.installed import Installed

__all__ = ["Use", "after_publish", "evictable", "remove"]


def evictable(
    cache: Cache, *, max_size: int = 0, max_age: float = 0, stale: bool = False
) -> list[Use]:
    """Return the entries to remove so that the user root keeps to limits, oldest use first.

    max_size: bytes (0 = no limit). max_age: seconds since the last use (0 = no limit).
    stale: whether entries that no Torch, CUDA, GPU or package of this machine fits go as well.
    """
    useless = _stale(cache) if stale else set()
    return eviction.evictable(cache, max_size=max_size or None, max_age=max_age, stale=useless)


def _stale(cache: Cache) -> set[Path]:
    """Return the entries of the user root that this machine cannot use.

    Such entries are for another Torch, CUDA or GPU, or of another version of their package.
    """
    here = Installed.found()
    return {
        path
        for path, entry in cache.entries()
        if path.is_relative_to(cache.root)
        and isinstance(entry, Entry)
        and (not here.uses_target(path.parent.name) or not here.has(entry.manifest.package))
    }
