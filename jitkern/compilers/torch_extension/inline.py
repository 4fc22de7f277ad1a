"""The arguments of `load_inline` and `load`, translated for the builder.

The command lines are those of `torch.utils.cpp_extension`. They run in our private staging; a
lookup imports none of the modules that compiling needs.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern import compilers
from jitkern.compilers import Compiler, torch_extension
from jitkern.compilers.torch_extension import inline_files
from jitkern.compilers.torch_extension.inline_files import digest_of, place_of
from jitkern.compilers.torch_extension.inline_source import Inline
from jitkern.source import includes
from jitkern.source.closure import Closure
from jitkern.source.kinds import Source, Unit, Variant
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.compilers.result import Built

CHANGED = "changed"  # no file has this digest
_ALWAYS = "this compiler does not list them, so the source is compiled again at each start"
_log = logging.getLogger(__name__)


class InlineCompiler(Compiler):
    """The compiler of one library, Python module or program from all units."""

    def target(self, source: Source, target: Target) -> Target:
        assert isinstance(source, Inline)
        return source.exact(target)

    def flags(self, source: Source, target: Target) -> tuple[str, ...]:
        assert isinstance(source, Inline)
        return source.all_flags()

    def closure(self, source: Source) -> Closure:
        assert isinstance(source, Inline)
        return inline_files.closure(source)

    def identities(self, source: Source, target: Target) -> list[dict[str, str]]:
        assert isinstance(source, Inline)
        return [
            torch_extension.compile_and_link.identity(
                with_nvcc=any(map(source.is_cuda, source.files))
            )
        ]

    def compile(self, variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
        source = variant.source
        assert isinstance(source, Inline)
        torch_extension.compile_and_link.check_target(
            variant.op, target, python=source.python, with_cuda=source.with_cuda
        )
        renamed = variant._replace(function=source.name)
        build = build_of(source)
        started = staging.stat().st_ctime_ns
        built, opened = torch_extension.compile_and_link.make(build, renamed, target, staging)
        known = torch_extension.commands.toolchain(build, opened)
        # Such as a header that a macro names: compared again whenever the entry is used.
        beyond = list(compilers.dependencies.beyond(source, closure, opened, known))
        watched = _digests(beyond, started)
        searched = _searched(source, closure, beyond, started) if beyond else {}
        texts = [*map(str.encode, source.texts), *(path.read_bytes() for path in closure.paths)]
        if any(map(includes.probes_anywhere, texts)):
            _log.warning("%s: write out the names in __has_include: %s", variant.op, _ALWAYS)
            watched["__has_include"] = CHANGED
        if torch_extension.compile_and_link.hides_binaries(build, staging, texts):
            _log.warning("%s: write out the names in .incbin and .include: %s", variant.op, _ALWAYS)
            watched[".incbin"] = CHANGED
        watching = {"opened": watched, "searched": searched, "place": place_of(source)}
        return built._replace(meta={**built.meta, **watching})


def build_of(source: Inline) -> torch_extension.commands.Build:
    """The build of the source, with Torch's split of flags between c++ and nvcc."""

    def flags(file: str) -> tuple[str, ...]:
        return (*source.arch, *source.cuda_cflags) if source.is_cuda(file) else source.cflags

    return torch_extension.commands.Build(
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


def _digests(paths: list[Path], started: int) -> dict[str, str]:
    """path -> SHA-256, or CHANGED for a file that is no longer as the compiler saw it."""
    return {str(p): digest_of(p) if _is_older(p, started) else CHANGED for p in paths}


def _is_older(path: Path, started: int) -> bool:
    try:
        return path.stat().st_ctime_ns < started
    except OSError:
        return False


def _searched(
    source: Inline, closure: Closure, paths: list[Path], started: int
) -> dict[str, list[str]]:
    """Other places for headers like these, and files there: see `dropin.extension._is_outdated`."""
    folders = {Path(root.path) for root in source.roots if not root.version}
    folders |= {path.parent for path in (*source.paths, *closure.paths, *paths)}
    names = {path.relative_to(f) for path in paths for f in folders if path.is_relative_to(f)}
    places = (folder / name for folder in folders for name in names)
    there = [path for path in places if path.is_file() and _is_older(path, started)]
    search = {"folders": folders, "names": names, "there": there}
    return {name: sorted(map(str, paths)) for name, paths in search.items()}
