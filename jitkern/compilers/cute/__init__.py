"""The compiler of the CuTe DSL, NVIDIA's `cutlass.cute`, which runs in a process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.compilers.cute import build as build, compiler as compiler
else:
    __getattr__ = on_first_use(__name__)
