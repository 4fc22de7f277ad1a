"""Tools that work on a cache directory: they need no kernel, no compiler and no Torch.

The names below load on first use: every publish needs one of these modules, and not the others.
"""

from __future__ import annotations

import importlib
from typing import Any

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
    "pin": "pins",
    "pinned": "pins",
    "unpin": "pins",
    "Use": "prune",
    "after_publish": "prune",
    "evictable": "prune",
    "remove": "prune",
    "keygen": "signing",
    "sign": "signing",
    "stats": "statistics",
    "pack_wheel": "wheel",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module `jitkern.cache_tools` has no attribute `{name}`")
    value = getattr(importlib.import_module(f"jitkern.cache_tools.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
