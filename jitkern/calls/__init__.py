"""Calls as data: signatures, samples and recordings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.calls import (
        autocast as autocast,
        record as record,
        samples as samples,
        signature as signature,
    )
else:
    __getattr__ = on_first_use(__name__)
