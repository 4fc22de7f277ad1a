"""Build all that calls need ahead of the first call, for any target; nothing here prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.prewarming import (
        ahead as ahead,
        api as api,
        builder as builder,
        engines as engines,
        parts as parts,
        shards as shards,
        tasks as tasks,
        wanted as wanted,
        workers as workers,
    )
else:
    __getattr__ = on_first_use(__name__)
