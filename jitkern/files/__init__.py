"""Files that no other user could have written, and files that stay whole after a crash."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.files import (
        atomic as atomic,
        signature as signature,
        trust as trust,
    )
else:
    __getattr__ = on_first_use(__name__)
