"""C++ and CUDA against Torch's headers: what an `Extension` says, as the builder takes it.

A lookup imports nothing of what compiling takes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern import closure as closures
from jitkern import cuda_arch
from jitkern.closure import Closure, pastes_unnamed
from jitkern.errors import CompileError, TargetError
from jitkern.inline import has_cuda
from jitkern.kernel import Extension, Source, Unit, Variant
from jitkern.target import Target, this_abi

if TYPE_CHECKING:
    from jitkern.compilers.cpp_commands import Build
    from jitkern.compilers.result import Built

_OPTIMIZED = "-O2"


class ExtensionCompiler:
    """One library, or Python module, from all units."""

    def target(self, source: Source, target: Target) -> Target:
        assert isinstance(source, Extension)
        return target.for_host_code(abi=target.abi or this_abi(python=source.pybind))

    def flags(self, source: Source, target: Target) -> tuple[str, ...]:
        return (_OPTIMIZED, "-fPIC", "-shared", *source.flags)

    def identities(self, source: Source, target: Target) -> list[dict[str, str]]:
        from jitkern.compilers import cpp_extension

        return [cpp_extension.identity(with_nvcc=has_cuda(source.files))]

    def compile(self, variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
        from jitkern.compilers import cpp_commands, cpp_extension
        from jitkern.compilers import opened as opened_files

        source = variant.source
        assert isinstance(source, Extension)
        with_cuda = has_cuda(source.files)
        cpp_extension.check_target(variant.op, target, python=source.pybind, with_cuda=with_cuda)
        if with_cuda and not target.cuda:
            raise TargetError(f"{variant.op}: it has CUDA files, and {target} is no CUDA target")
        build = _build_of(variant.op, source, target)
        built, opened = cpp_extension.make(build, variant, target, staging)
        known = cpp_commands.toolchain(build, opened)
        closures.check(source, closure, opened, known, variant.op)
        texts = [path.read_bytes() for path in closure.paths]
        if any(map(pastes_unnamed, texts)) and not cpp_extension.lists_binaries(build, staging):
            raise CompileError(f"{variant.op}: {opened_files.UNTOLD}", op=variant.op)
        loading = {"module": build.name if source.pybind else "", "function": source.function}
        return built._replace(meta={**built.meta, **loading})


def _build_of(op: str, source: Extension, target: Target) -> Build:
    from jitkern.compilers.cpp_commands import Build

    number = target.arch.removeprefix("sm_")
    machine_code = f"-gencode=arch=compute_{number},code=sm_{number}"

    def flags(file: str) -> tuple[str, ...]:
        given = (_OPTIMIZED, *source.flags_of(file))
        own_arch = not has_cuda((file,)) or cuda_arch.is_named(given)
        return given if own_arch else (machine_code, *given)

    return Build(
        kind=source.kind,
        name=re.sub(r"\W+", "_", op),
        output="module" if source.pybind else "library",
        units=[Unit(str(p.absolute()), flags(f)) for f, p in zip(source.files, source.paths)],
        texts={},
        include=[root.path for root in source.roots],
        with_cuda=has_cuda(source.files),
        environment=source.environment,
    )
