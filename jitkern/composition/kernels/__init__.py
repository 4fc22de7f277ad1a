"""Composition of kernels that people wrote: a pointwise function around one, or several as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.composition.kernels import fused as fused, triton_functions as triton_functions
else:
    __getattr__ = on_first_use(__name__)
