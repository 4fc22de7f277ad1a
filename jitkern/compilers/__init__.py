"""One file per compiler, behind one contract."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from jitkern.closure import Closure
from jitkern.compilers.cc import Cc
from jitkern.compilers.extension import LoadInline
from jitkern.compilers.nvrtc import Nvrtc
from jitkern.compilers.result import Built
from jitkern.compilers.triton import TritonCompiler
from jitkern.kernel import Source, Variant
from jitkern.target import Target

__all__ = ["COMPILERS", "Built", "Compiler", "compiler_for"]


class Compiler(Protocol):
    """What a compiler file provides.

    `target` and `flags` are pure: they probe nothing, so a lookup needs no compiler on the machine.
    """

    def target(self, source: Source, target: Target) -> Target:
        """`target` with what the artifact depends on: platform, ABI, instruction set. No raise."""

    def flags(self, source: Source, target: Target) -> tuple[str, ...]:
        """Every flag that can change the artifact, free of paths. No raise."""

    def identities(self, source: Source, target: Target) -> list[dict[str, str]]:
        """`name` and `version` of what is installed here and could build it, the likeliest first.

        One of them goes into the manifest. Raises CompilerNotFound, TargetError.
        """

    def compile(self, variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
        """Write the artifacts and `compile.log` into `staging`, and nothing outside it.

        Raises CompilerNotFound, TargetError (not possible here for this target), CompileError (the
        source is at fault); never leaves a child process behind on success. It may be called from
        many threads.
        """


COMPILERS: dict[str, Compiler] = {
    "nvrtc": Nvrtc(),
    "cc": Cc(),
    "triton": TritonCompiler(),
    "extension": LoadInline(),
}


def compiler_for(source: Source) -> Compiler:
    """The compiler of this kind of source."""
    return COMPILERS[source.kind]
