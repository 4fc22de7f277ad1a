"""The compilers that `load_inline` and `load` run: c++, nvcc, and the linker, with no ninja.

The command lines are those of `torch.utils.cpp_extension`. They run in our private staging, units
side by side; a lookup imports nothing of what that takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jitkern.inline import Inline
from jitkern.kernel import Source, Variant
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.closure import Closure
    from jitkern.compilers.result import Built


class InlineCompiler:
    """One library, Python module or program from all units."""

    def target(self, source: Source, target: Target) -> Target:
        assert isinstance(source, Inline)
        return source.exact(target)

    def flags(self, source: Source, target: Target) -> tuple[str, ...]:
        assert isinstance(source, Inline)
        return source.all_flags()

    def identities(self, source: Source, target: Target) -> list[dict[str, str]]:
        from jitkern.compilers import cpp_extension

        assert isinstance(source, Inline)
        return [cpp_extension.identity(source)]

    def compile(self, variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
        from jitkern.compilers import cpp_extension

        return cpp_extension.build(variant, target, closure, staging)
