"""The compiler of cuTile, NVIDIA's `cuda.tile`, which runs in a process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.compilers.cutile import build as build, compiler as compiler, cubin as cubin
else:
    __getattr__ = on_first_use(__name__)
