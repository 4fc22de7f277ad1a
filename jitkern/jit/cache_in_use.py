"""The cache that the settings name; a private cache if that cache cannot be trusted or written."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from jitkern import cache, config
from jitkern.cache import usage
from jitkern.cache.store import Cache, Entry
from jitkern.config import Config
from jitkern.errors import CacheError, UntrustedCache
from jitkern.files.owned import Trust, installed_layers

_OPENED_BY = (  # the settings that select the cache and its rules
    "cache_dir", "system_cache", "trusted", "trusted_keys", "signed", "verify", "fsync", "fallback",
    "max_size", "max_age",
)  # fmt: skip
_log = logging.getLogger(__name__)
_locks: weakref.WeakValueDictionary[str, threading.Lock] = weakref.WeakValueDictionary()
_guard = threading.Lock()
spilled: list[bool] = []  # not empty if this process compiled into the private root


def open_cache() -> Cache:
    """The cache of the settings, or, with one warning, a private cache if it is not trusted."""
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
            cache.process_root.private_root(), (*settings.system_cache, *installed_layers()),
            verify=settings.verify, fsync=False, rules=Trust.of(settings),
        )  # fmt: skip


def warn_of_private_root(why: CacheError) -> None:
    """Warn that kernels are compiled into the private root, and why."""
    root = cache.process_root.private_root()
    _log.warning("%s. Using the temporary cache %s for this process only", why, root)


def spill() -> Cache:
    """The cache in the private root of this process."""
    return Cache(cache.process_root.private_root(), fsync=False)


def count_hit(entry: Entry) -> None:
    """Count a hit of this process on an entry."""
    usage.hit(open_cache().root, entry.root, entry.manifest.seconds)


@contextlib.contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Let at most one thread of this process be in a block of this name."""
    with _guard:
        lock = _locks.setdefault(name, threading.Lock())
    with lock:
        yield


def _after_fork() -> None:
    """Forget, in a child, the locks of its parent's threads and the private root of its parent."""
    global _guard  # noqa: PLW0603
    _guard = threading.Lock()
    _locks.clear()
    _open_cache.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
