"""From a variant to its entry: look up, lock, compile, publish, load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

_HOMES = {
    "capturing": "request",
    "ensure": "obtain",
    "ensure_and_tell": "obtain",
    "exact_target": "obtain",
    "key_of": "obtain",
    "loaded": "load",
    "open_cache": "cache_in_use",
}

if TYPE_CHECKING:
    from jitkern.jit import (
        announcement as announcement,
        build as build,
        cache_in_use as cache_in_use,
        download as download,
        load as load,
        mega_cache_entries as mega_cache_entries,
        obtain as obtain,
        request as request,
        served_call as served_call,
    )
    from jitkern.jit.cache_in_use import open_cache as open_cache
    from jitkern.jit.load import loaded as loaded
    from jitkern.jit.obtain import (
        ensure as ensure,
        ensure_and_tell as ensure_and_tell,
        exact_target as exact_target,
        key_of as key_of,
    )
    from jitkern.jit.request import capturing as capturing
else:
    __getattr__ = on_first_use(__name__, _HOMES)
