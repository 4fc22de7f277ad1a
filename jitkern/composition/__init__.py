"""Kernels from formulas: pointwise functions written once, composed, differentiated, compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.composition import (
        arrange as arrange,
        backward as backward,
        definition as definition,
        derivative as derivative,
        eager as eager,
        expression as expression,
        formula as formula,
        function as function,
        functions as functions,
        helpers as helpers,
        kernel_texts as kernel_texts,
        launch as launch,
        pointwise as pointwise,
        reference as reference,
        registration as registration,
        symbol as symbol,
        table as table,
        triton_functions as triton_functions,
    )
else:
    __getattr__ = on_first_use(__name__)
