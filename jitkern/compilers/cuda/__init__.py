"""CUDA C++ for one arch: NVRTC, and nvcc where NVRTC cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.compilers.cuda import (
        arch_flags as arch_flags,
        nvcc as nvcc,
        nvrtc as nvrtc,
        nvrtc_api as nvrtc_api,
        nvrtc_build as nvrtc_build,
        nvrtc_hints as nvrtc_hints,
        ptx as ptx,
        stand_ins as stand_ins,
        toolkit as toolkit,
    )
else:
    __getattr__ = on_first_use(__name__)
