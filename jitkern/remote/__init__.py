"""Caches elsewhere: names that can be read below a URL. No compiler and no Torch.

A bucket, a static web server, a directory and `jitkern serve` look the same. `layout` says what
lies under which name; `store` is the contract of what holds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.remote import (
        bundles as bundles,
        fetch as fetch,
        index as index,
        layout as layout,
        opening as opening,
        patience as patience,
        publish as publish,
        pull as pull,
        store as store,
        stores as stores,
        trust as trust,
    )
else:
    __getattr__ = on_first_use(__name__)
