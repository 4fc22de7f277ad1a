"""From a variant to its entry: look up, lock, compile, publish, load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

_HOMES = {
    "capturing": "request",
    "ensure": "get_or_compile",
    "ensure_and_tell": "get_or_compile",
    "key_of": "get_or_compile",
    "loaded": "load",
    "open_cache": "active_cache",
}

if TYPE_CHECKING:
    from jitkern.jit import (
        active_cache as active_cache,
        announcement as announcement,
        at_once as at_once,
        build as build,
        current_call as current_call,
        download as download,
        get_or_compile as get_or_compile,
        load as load,
        request as request,
    )
    from jitkern.jit.active_cache import open_cache as open_cache
    from jitkern.jit.get_or_compile import (
        ensure as ensure,
        ensure_and_tell as ensure_and_tell,
        key_of as key_of,
    )
    from jitkern.jit.load import loaded as loaded
    from jitkern.jit.request import capturing as capturing
else:
    __getattr__ = on_first_use(__name__, _HOMES)
