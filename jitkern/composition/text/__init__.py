"""The texts of pointwise kernels: a formula as a function in C++, and the kernels around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.composition.text import (
        formula as formula,
        helpers as helpers,
        kernels as kernels,
    )
else:
    __getattr__ = on_first_use(__name__)
