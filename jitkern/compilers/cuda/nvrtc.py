"""NVRTC, for `__global__` functions: an exact-arch cubin, with no nvcc, no CUDA_HOME and no GPU.

What NVRTC refuses goes to `nvcc -cubin`, if there is an nvcc. Code for the host that NVRTC should
not see is put between `#ifndef __CUDACC_RTC__` and `#endif`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jitkern.compilers import Compiler, cuda
from jitkern.source.closure import Closure
from jitkern.source.includes import including
from jitkern.source.kinds import Source, Variant
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.compilers.result import Built

RELAXED = "--expt-relaxed-constexpr"  # Torch's builds have it: device code may call std::min


class Nvrtc(Compiler):
    """The compiler of one instantiation of one kernel per cubin."""

    def target(self, source: Source, target: Target) -> Target:
        exact = target.for_device_code()
        return exact.arch_specific() if getattr(source, "arch_specific", False) else exact

    def flags(self, source: Source, target: Target) -> tuple[str, ...]:
        return ("-std=c++17", RELAXED, *source.flags)

    def with_headers(self, variant: Variant) -> Variant:
        return including(variant, "header", variant.source.paths[:1])

    def identities(self, source: Source, target: Target) -> list[dict[str, str]]:
        return cuda.nvrtc_build.identities(target)

    def compile(self, variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
        flags = self.flags(variant.source, target)
        return cuda.nvrtc_build.build(variant, target, closure, staging, flags)
