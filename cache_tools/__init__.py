"""Tools that work on a cache directory, without kernels, compilers and Torch.

The names below load on first use, so that a command imports only the modules that it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.cache_tools.bundle import Unpacked as Unpacked, pack as pack, unpack as unpack
    from jitkern.cache_tools.explain import differences as differences, nearest as nearest
    from jitkern.cache_tools.listing import (
        SORTS as SORTS,
        EntryFilter as EntryFilter,
        Row as Row,
        chosen as chosen,
        find as find,
        rows as rows,
        stats as stats,
    )
    from jitkern.cache_tools.prune import evictable as evictable, remove as remove
    from jitkern.cache_tools.signing import keygen as keygen, sign as sign
    from jitkern.cache_tools.ustar import BundleError as BundleError
    from jitkern.cache_tools.wheel import pack_wheel as pack_wheel

_HOMES = {
    "BundleError": "ustar",
    "Unpacked": "bundle",
    "pack": "bundle",
    "unpack": "bundle",
    "differences": "explain",
    "nearest": "explain",
    "SORTS": "listing",
    "Row": "listing",
    "EntryFilter": "listing",
    "chosen": "listing",
    "find": "listing",
    "rows": "listing",
    "stats": "listing",
    "evictable": "prune",
    "remove": "prune",
    "keygen": "signing",
    "sign": "signing",
    "pack_wheel": "wheel",
}

__all__ = sorted(_HOMES)
if not TYPE_CHECKING:
    __getattr__ = on_first_use(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
