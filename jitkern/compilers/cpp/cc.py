"""The C++ compiler, for CPU kernels: functions and templates over pointers, no Torch header."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jitkern import config
from jitkern.compilers import Compiler, cpp
from jitkern.source.closure import Closure, closure_of
from jitkern.source.includes import including
from jitkern.source.kinds import Cpp, Source, Variant
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.compilers.result import Built


class Cc(Compiler):
    """g++ or clang++."""

    def target(self, source: Source, target: Target) -> Target:
        assert isinstance(source, Cpp)
        return target.for_host_code(native=source.native)

    def flags(self, source: Source, target: Target) -> tuple[str, ...]:
        assert isinstance(source, Cpp)
        _, _, level = target.arch.partition("_v")
        native = (f"-march=x86-64-v{level}",) if source.native and level else ()
        openmp = ("-fopenmp",) if source.openmp else ()
        return ("-O3", "-fPIC", "-std=c++17", *native, *openmp, *source.flags)

    def with_headers(self, variant: Variant) -> Variant:
        source = variant.source
        assert isinstance(source, Cpp)
        if including(variant, "host_header", source.paths) is variant:
            return variant
        # Its own headers may define such a type.
        return including(variant, "host_header", closure_of(source).paths)

    def identities(self, source: Source, target: Target) -> list[dict[str, str]]:
        return [cpp.cc_build.identity(config.current().cxx)]

    def compile(self, variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
        flags = self.flags(variant.source, target)
        return cpp.cc_build.build(variant, target, closure, staging, flags)
