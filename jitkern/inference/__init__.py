"""Weights of models that generate text; the code lies beside the kernels that read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.inference import converters as converters, int4 as int4, linears as linears
else:
    __getattr__ = on_first_use(__name__)
