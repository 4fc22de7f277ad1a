"""The cache that the settings name; a private one where that cannot be trusted or written."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from jitkern import config
from jitkern.cache import usage
from jitkern.cache.process_root import private_root
from jitkern.cache.store import Cache, Entry
from jitkern.config import Config
from jitkern.errors import CacheError, UntrustedCache
from jitkern.files.owned import Trust, installed_layers

_OPENED_BY = (  # the settings that say which cache it is, and how it is used
    "cache_dir", "system_cache", "trusted", "trusted_keys", "signed", "verify", "fsync", "fallback",
    "max_size", "max_age",
)  # fmt: skip
_log = logging.getLogger(__name__)
spilled: list[bool] = []  # something was compiled into the private root


def open_cache() -> Cache:
    """The cache of the settings, or, warned of once, a private one where that is not trusted."""
    settings = config.current()
    return _open_cache(*(getattr(settings, name) for name in _OPENED_BY))


@functools.lru_cache(maxsize=8)
def _open_cache(*values: Any) -> Cache:
    settings = Config(**dict(zip(_OPENED_BY, values)))
    try:
        return Cache.open(settings)
    except UntrustedCache as e:
        if settings.fallback == "raise":
            raise
        warn_of_private_root(e)
        return Cache(
            private_root(), (*settings.system_cache, *installed_layers()),
            verify=settings.verify, fsync=False, rules=Trust.of(settings),
        )  # fmt: skip


def warn_of_private_root(why: CacheError) -> None:
    """Say where kernels are compiled instead, and why."""
    _log.warning(
        "%s. Until then kernels are compiled into %s, for this process alone", why, private_root()
    )


def spill() -> Cache:
    """The private root of this process."""
    return Cache(private_root(), fsync=False)


def count_hit(entry: Entry) -> None:
    """Count that this process found an entry."""
    usage.hit(open_cache().root, entry.root, entry.manifest.seconds)


if hasattr(os, "register_at_fork"):  # it may be in the private root of the parent
    os.register_at_fork(after_in_child=_open_cache.cache_clear)
