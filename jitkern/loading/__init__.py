"""Compiled code brought into this process, each artifact once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern import on_first_use

if TYPE_CHECKING:
    from jitkern.loading import (
        cuda_driver as cuda_driver,
        library as library,
        loader as loader,
    )

__getattr__ = on_first_use(__name__)
