"""The CuTe DSL, for `@cute.jit` functions: host code with cubins in it, without a GPU or driver."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jitkern.compilers import Compiler, cute
from jitkern.source.closure import Closure
from jitkern.source.kinds import Cute, Source, Variant
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.compilers.result import Built

PROCESSOR = "-mtriple=x86_64-unknown-linux-gnu -mcpu=x86-64-v2"  # that host code is for


class CuteCompiler(Compiler):
    """The compiler of one specialisation of one host function per library."""

    def target(self, source: Source, target: Target) -> Target:
        return target.arch_specific().for_host_code()

    def flags(self, source: Source, target: Target) -> tuple[str, ...]:
        assert isinstance(source, Cute)
        return (*source.flags, PROCESSOR, *source.requirements)

    def identities(self, source: Source, target: Target) -> list[dict[str, str]]:
        return [cute.build.identity(target)]

    def compile(self, variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
        return cute.build.build(variant, target, closure, staging)
