"""What calls need, built ahead of the first of them, for any target; nothing here prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern import on_first_use

if TYPE_CHECKING:
    from jitkern.prewarm import (
        agenda as agenda,
        ahead as ahead,
        builder as builder,
        identity as identity,
        records as records,
        tasks as tasks,
        workers as workers,
    )

__getattr__ = on_first_use(__name__)
