"""One folder for each toolchain, behind one contract; modules are imported when first used.

A lookup asks `cuda.nvrtc`, `cpp.cc` and `triton.compiler` for flags and targets. All that compiling
needs is in `cuda.nvrtc_build`, `cpp.cc_build` and `triton.build`, which a warm process does not
import.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jitkern._lazy import on_first_use
from jitkern.source.closure import Closure, closure_of
from jitkern.source.kinds import Source, Variant
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.cache.store import Cache
    from jitkern.compilers import (
        child_process as child_process,
        cpp as cpp,
        cuda as cuda,
        cute as cute,
        cutile as cutile,
        dependencies as dependencies,
        kernel_modules as kernel_modules,
        kernel_process as kernel_process,
        kernel_worker as kernel_worker,
        parallelism as parallelism,
        result as result,
        torch_extension as torch_extension,
        triton as triton,
    )
    from jitkern.compilers.result import Built
else:
    __getattr__ = on_first_use(__name__)

COMPILERS: dict[str, Compiler] = {}  # by kind of source, added when first used


class Compiler(Protocol):
    """The contract of a compiler.

    `target` and `flags` are pure: they probe nothing, so a lookup needs no compiler on the machine.
    """

    def target(self, source: Source, target: Target) -> Target:
        """Return `target` with platform, ABI or instruction set as the artifact needs. No raise."""

    def flags(self, source: Source, target: Target) -> tuple[str, ...]:
        """Return every flag that can change the artifact, free of paths. No raise."""

    def closure(self, source: Source) -> Closure:
        """Return the files the artifact depends on. Raises DeclarationError for a missing file."""
        return closure_of(source)

    def with_headers(self, variant: Variant) -> Variant:
        """Return the variant with the headers that declare its element types. Raises nothing."""
        return variant

    def identities(self, source: Source, target: Target) -> list[dict[str, str]]:
        """Return `name` and `version` of the compilers here that could build, the likeliest first.

        One of them goes into the manifest. Raises CompilerNotFound, TargetError.
        """

    def compile(self, variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
        """Write the artifacts and `compile.log` into `staging`, and nothing outside it.

        Raises CompilerNotFound, TargetError (this machine cannot build for this target),
        CompileError (the source is at fault); never leaves a child process behind on success. Many
        threads may call this at once.
        """

    def compile_parts(
        self,
        variant: Variant,
        target: Target,
        closure: Closure,
        staging: Path,
        cache: Cache,
        *,
        anew: bool,
    ) -> Built:
        """Compile as `compile` does, with parts of the artifact from `cache`; new parts go there.

        anew: whether the parts that the cache has are to be compiled again.
        """
        return self.compile(variant, target, closure, staging)


def compiler_for(source: Source) -> Compiler:
    """Return the compiler of this kind of source."""
    if source.kind not in COMPILERS:
        module, _, name = source.compiler.partition(":")
        COMPILERS[source.kind] = getattr(importlib.import_module(module), name)()
    return COMPILERS[source.kind]
