"""Entries on disk: lookup, verification, publication and eviction. No compiler and no Torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.cache import (
        entry as entry,
        events as events,
        eviction as eviction,
        key as key,
        layout as layout,
        lock as lock,
        manifest as manifest,
        records as records,
        root as root,
        store as store,
        temporary_cache as temporary_cache,
    )
else:
    __getattr__ = on_first_use(__name__)

VERSION = "v1"  # the folder of a root that holds entries, in the layout of `layout`
MANIFEST = "manifest.json"  # the file of an entry that `manifest` describes
