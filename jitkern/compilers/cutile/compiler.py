"""cuTile, for `@ct.kernel` functions: an exact-arch cubin, without a GPU or a driver."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jitkern.compilers import Compiler, cutile
from jitkern.source.closure import Closure
from jitkern.source.kinds import CuTile, Source, Variant
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.compilers.result import Built


class CuTileCompiler(Compiler):
    """The compiler of one specialisation of one kernel per cubin."""

    def target(self, source: Source, target: Target) -> Target:
        return target.for_device_code()

    def flags(self, source: Source, target: Target) -> tuple[str, ...]:
        assert isinstance(source, CuTile)
        return source.requirements

    def identities(self, source: Source, target: Target) -> list[dict[str, str]]:
        return [cutile.build.identity()]

    def compile(self, variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
        return cutile.build.build(variant, target, closure, staging)
