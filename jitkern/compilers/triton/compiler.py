"""Triton, for `@triton.jit` functions: compiled without a GPU.

Cubin, metadata and signature go into our entry. Triton runs in a child process (`triton.worker`)
with a scrubbed environment: neither its 500 MB library nor its own cache enters the user's process,
and a crash of the compiler is an error message.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jitkern.compilers import Compiler, triton
from jitkern.source.closure import Closure
from jitkern.source.kinds import Source, Variant
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.compilers.result import Built


class TritonCompiler(Compiler):
    """The compiler of one specialisation of one function per cubin."""

    def target(self, source: Source, target: Target) -> Target:
        return target.for_device_code()

    def flags(self, source: Source, target: Target) -> tuple[str, ...]:
        return tuple(source.flags)

    def identities(self, source: Source, target: Target) -> list[dict[str, str]]:
        return [triton.build.identity()]

    def compile(self, variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
        return triton.build.build(variant, target, closure, staging)
