"""What `load_inline` and `load` were given, as the builder takes it.

The command lines are those of `torch.utils.cpp_extension`. They run in our private staging; a
lookup imports nothing of what that takes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern.inline import Inline
from jitkern.kernel import Source, Unit, Variant
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.closure import Closure
    from jitkern.compilers.cpp_commands import Build
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
        return [cpp_extension.identity(with_nvcc=any(map(source.is_cuda, source.files)))]

    def compile(self, variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
        from jitkern.compilers import cpp_extension

        source = variant.source
        assert isinstance(source, Inline)
        cpp_extension.check_target(
            variant.op, target, python=source.python, with_cuda=source.with_cuda
        )
        named = variant._replace(function=source.name)
        built, opened = cpp_extension.make(build_of(source), named, target, staging)
        return built._replace(meta={**built.meta, "opened": _beyond(closure, opened)})


def build_of(source: Inline) -> Build:
    """Its units, with Torch's names for what goes to which compiler."""
    from jitkern.compilers.cpp_commands import Build

    def flags(file: str) -> tuple[str, ...]:
        return (*source.arch, *source.cuda_cflags) if source.is_cuda(file) else source.cflags

    return Build(
        kind=source.kind,
        name=source.name,
        output=source.output,
        units=[Unit(str(p), flags(f)) for f, p in zip(source.files, source.places or source.files)],
        texts=dict(zip(source.files, source.texts)),
        include=[root.path for root in source.include],
        with_cuda=source.with_cuda,
        ldflags=source.ldflags,
        environment=source.environment,
    )


def _beyond(closure: Closure, opened: list[Path]) -> dict[str, str]:
    """What the compiler opened beyond the key and the toolchain: path -> SHA-256.

    A header that a macro names, say. It is looked at again whenever the entry is used.
    """
    from jitkern.compilers import toolkit
    from jitkern.compilers.cpp_commands import torch_folder

    known = [torch_folder().resolve(), *toolkit.cuda_homes()]
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in opened
        if path not in closure.paths and not any(map(path.is_relative_to, known))
    }
