"""`load_inline` and `load` of `torch.utils.cpp_extension`, over the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.dropin import (
        api as api,
        extension as extension,
        memo as memo,
        patch as patch,
        pybind as pybind,
    )
else:
    __getattr__ = on_first_use(__name__)
