"""One file per compiler, behind one contract. A file is imported when its kind of source is met.

A lookup asks `nvrtc`, `cc` and `triton` for flags and targets. What they need to compile lies in
`nvrtc_build`, `cc_build` and `triton_build`, which a warm process does not import.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jitkern.source.closure import Closure, closure_of
from jitkern.source.kinds import Source, Variant
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.compilers.result import Built

COMPILERS: dict[str, Compiler] = {}  # by kind of source, as they are met


class Compiler(Protocol):
    """What a compiler file provides.

    `target` and `flags` are pure: they probe nothing, so a lookup needs no compiler on the machine.
    """

    def target(self, source: Source, target: Target) -> Target:
        """`target` with what the artifact depends on: platform, ABI, instruction set. No raise."""

    def flags(self, source: Source, target: Target) -> tuple[str, ...]:
        """Every flag that can change the artifact, free of paths. No raise."""

    def closure(self, source: Source) -> Closure:
        """The files that the artifact depends on. Raises DeclarationError for one not there."""
        return closure_of(source)

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


def compiler_for(source: Source) -> Compiler:
    """The compiler of this kind of source."""
    if source.kind not in COMPILERS:
        module, _, name = source.compiler.partition(":")
        COMPILERS[source.kind] = getattr(importlib.import_module(module), name)()
    return COMPILERS[source.kind]
