"""Tools that work on a cache directory, without kernels, compilers and Torch.

The names below load on first use, so that a command imports only the modules that it needs.
"""

from __future__ import annotations

from jitkern import on_first_use

_HOMES = {
    "BundleError": "bundle",
    "Unpacked": "bundle",
    "pack": "bundle",
    "unpack": "bundle",
    "differences": "explain",
    "nearest": "explain",
    "SORTS": "listing",
    "Row": "listing",
    "Wanted": "listing",
    "chosen": "listing",
    "find": "listing",
    "rows": "listing",
    "evictable": "prune",
    "Use": "prune",
    "after_publish": "prune",
    "remove": "prune",
    "pin": "prune",
    "pinned": "prune",
    "unpin": "prune",
    "keygen": "signing",
    "sign": "signing",
    "stats": "statistics",
    "pack_wheel": "wheel",
}

__all__ = sorted(_HOMES)
__getattr__ = on_first_use(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
