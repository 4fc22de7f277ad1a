"""Tools for authors of kernels: checks of an op, its roofline, and timings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.devtools import (
        check as check,
        guard_bytes as guard_bytes,
        op_check as op_check,
        roofline as roofline,
        timing as timing,
    )
else:
    __getattr__ = on_first_use(__name__)
