"""C++ and CUDA with Torch's headers: an `Extension`, translated for the builder.

A lookup imports none of the modules that compiling needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jitkern import compilers, config
from jitkern.compilers import Compiler, torch_extension
from jitkern.compilers.cuda import arch_flags
from jitkern.errors import TargetError
from jitkern.files import trust
from jitkern.source.closure import Closure
from jitkern.source.flags import linked, words_of
from jitkern.source.kinds import Extension, Source, Unit, Variant
from jitkern.target import Target, gpus_for, this_abi

if TYPE_CHECKING:
    from jitkern.cache.store import Cache
    from jitkern.compilers.result import Built
    from jitkern.compilers.torch_extension.commands import Build

_OPTIMIZED = "-O2"


class ExtensionCompiler(Compiler):
    """The compiler of one library or Python module from all units."""

    def target(self, source: Source, target: Target) -> Target:
        assert isinstance(source, Extension)
        return target.for_host_code(abi=target.abi or this_abi(python=source.pybind))

    def flags(self, source: Source, target: Target) -> tuple[str, ...]:
        assert isinstance(source, Extension)
        linking = ("ld", *source.link_words) if source.link_words else ()
        return (_OPTIMIZED, "-fPIC", "-shared", *source.flags, *linking)

    def closure(self, source: Source) -> Closure:
        """The files that the units include or are linked with, except for those of the system.

        Raises DeclarationError, as `closure_of` does.
        """
        assert isinstance(source, Extension)
        found = super().closure(source)
        if not source.link_words:
            return found
        files, paths = dict(found.files), set(found.paths)
        labels = {path: f"<library {n}>" for n, path in enumerate(source.library_folders)}
        told = "LIBRARY_PATH" in source.environment and config.current().environment
        searched = told.get("LIBRARY_PATH", "").split(":") if told else []
        for path in map(Path, linked(_ldflags(source), searched)):
            home = labels.get(str(path.parent), str(path.parent))
            files[f"{home}/{path.name}"] = self.library_digest(path)
            paths.add(path.resolve())
        return Closure(files, found.versions, frozenset(paths))

    def library_digest(self, path: Path) -> str:
        """The digest of a library for the key."""
        return trust.digest(path)

    def identities(self, source: Source, target: Target) -> list[dict[str, str]]:
        assert isinstance(source, Extension)
        with_nvcc = any(map(source.is_cuda, source.files))
        return [torch_extension.commands.identity(with_nvcc=with_nvcc)]

    def compile_parts(
        self, variant: Variant, target: Target, closure: Closure, staging: Path, cache: Cache,
        *, anew: bool,
    ) -> Built:  # fmt: skip
        """Compile the units whose objects the cache lacks, and link."""
        source = variant.source
        assert isinstance(source, Extension)
        build = self.build_of(source, target)
        torch_extension.compile_and_link.check_target(variant.op, target, build)
        self.refuse(variant, build, target)
        objects = torch_extension.objects.Objects(build, source, target, closure, cache, anew=anew)
        built, opened = torch_extension.compile_and_link.make(objects, variant, target, staging)
        known = torch_extension.commands.toolchain(build, opened)
        compilers.dependencies.check(source, closure, opened, known, variant.op)
        return built._replace(meta={**built.meta, "module": build.name if build.python else ""})

    def build_of(self, source: Extension, target: Target) -> Build:
        """The build of a source for a target."""
        number = target.arch.removeprefix("sm_")
        machine_code = f"-gencode=arch=compute_{number},code=sm_{number}"

        def flags(file: str) -> tuple[str, ...]:
            words = (_OPTIMIZED, *source.flags_of(file))
            own_arch = not source.is_cuda(file) or arch_flags.is_named(words)
            return words if own_arch else (machine_code, *words)

        return torch_extension.commands.Build(
            name=source.owner.rpartition(".")[2],
            output="module" if source.pybind else "library",
            python=source.pybind,
            units=[Unit(str(p.absolute()), flags(f)) for f, p in zip(source.files, source.paths)],
            texts={},
            include=source.searched,
            with_cuda=any(map(source.is_cuda, source.files)),
            ldflags=_ldflags(source),
            environment=source.environment,
        )

    def refuse(self, variant: Variant, build: Build, target: Target) -> None:
        """Raise TargetError for files and flags that do not fit the target."""
        if build.with_cuda and not target.cuda:
            raise TargetError(f"{variant.op}: it has CUDA files, and {target} is no CUDA target")
        gpus = gpus_for(words_of(variant.source)) if build.with_cuda else ()
        if gpus and target.arch.rstrip("af") not in gpus:
            raise TargetError(
                f"{variant.op} for {target}: its flags say -arch=native, which means the GPUs of "
                f"this machine ({', '.join(gpus)}): leave it out, and the target sets the arch"
            )


def _ldflags(source: Extension) -> list[str]:
    return [*(f"-L{folder}" for folder in source.library_folders), *source.link_words]
