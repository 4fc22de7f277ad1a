"""Kernels from formulas: pointwise functions written once, composed, differentiated, compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern import on_first_use

if TYPE_CHECKING:
    from jitkern.composition import (
        arrange as arrange,
        c_text as c_text,
        derivative as derivative,
        expression as expression,
        functions as functions,
        helpers as helpers,
        launch as launch,
        pointwise as pointwise,
        promotion as promotion,
        reference as reference,
        registration as registration,
        source as source,
        symbol as symbol,
        table as table,
    )
else:
    __getattr__ = on_first_use(__name__)
