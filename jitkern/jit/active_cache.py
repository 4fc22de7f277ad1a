"""The cache that the settings name; a private cache if that cache cannot be trusted or written."""

from __future__ import annotations

import errno
import functools
import logging
import threading
from typing import Any

from jitkern import config
from jitkern._fork import after_fork
from jitkern.cache.store import Cache
from jitkern.config import Config
from jitkern.errors import CacheError, UntrustedCache
from jitkern.files.trust import Trust, installed_layers

_OPENED_BY = (  # the settings that select the cache and its rules
    "cache_dir", "system_cache", "trusted", "trusted_keys", "signed", "verify", "fsync", "fallback",
    "max_size", "max_age",
)  # fmt: skip
_log = logging.getLogger(__name__)
_spilling = threading.Lock()
spilled: list[Cache] = []  # the cache in the private root, if this process compiled into it


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
        layers = (*settings.system_cache, *installed_layers())
        return _private(e, settings, layers, verify=settings.verify, rules=Trust.of(settings))


def use_temporary(why: CacheError) -> Cache:
    """The private cache, for what could not be written into the cache of the settings.

    Raises `why` if that is no matter of the root's permissions, and where the settings want it.
    """
    settings = config.current()
    code = getattr(why, "errno", None)
    no_home = code in (errno.ENOTDIR, errno.EEXIST) and settings.cache_dir_origin == "default"
    if not no_home and code not in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOENT):
        raise why
    with _spilling:
        if not spilled or settings.fallback == "raise":
            spilled.append(_private(why, settings))
    return spilled[0]


def _private(why: CacheError, settings: Config, *args: Any, **rules: Any) -> Cache:
    """Return the cache in the private root, with a warning. Raises `why` if the settings say so."""
    if settings.fallback == "raise":
        raise why
    private = Cache.private(*args, **rules)
    _log.warning("%s. Using the temporary cache %s for this process only", why, private.root)
    return private


after_fork(_spilling, spilled.clear, _open_cache.cache_clear)  # of the parent
