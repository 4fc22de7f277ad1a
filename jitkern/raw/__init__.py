"""Kernels of other people's code, called without an op: a file, or a Triton function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.raw import (
        from_file as from_file,
        from_triton as from_triton,
        kernel as kernel,
        patch as patch,
    )
else:
    __getattr__ = on_first_use(__name__)
