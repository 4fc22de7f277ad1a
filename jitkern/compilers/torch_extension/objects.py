"""Objects of units: each is an entry, which every build that has the unit shares.

The key of an object covers what that of the whole build does, for the unit alone, and the compiler:
objects of two compilers are never linked. An object is published as soon as its unit is compiled,
whatever becomes of the build. It is not published where the compiler read a file that the key does
not cover, or a file was edited meanwhile: then each build compiles the unit.
"""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path
from typing import ClassVar

from jitkern import config
from jitkern.cache.key import OBJECT, Key
from jitkern.cache.manifest import Manifest
from jitkern.cache.store import Cache
from jitkern.compilers import dependencies
from jitkern.compilers.cpp import cc_build
from jitkern.compilers.torch_extension import commands
from jitkern.compilers.torch_extension.commands import Build
from jitkern.errors import CacheError
from jitkern.source.closure import Closure, closures_of, states
from jitkern.source.flags import numbered, words_of
from jitkern.source.key import make_key, package_of
from jitkern.source.kinds import HOST, Extension, Include, Source, Variant
from jitkern.target import Target

ARTIFACT = "unit.o"
_NAME = "TORCH_EXTENSION_NAME"
_log = logging.getLogger(__name__)


class UnitSource(Source):
    """A unit by itself. include: all directories that are searched."""

    kind: ClassVar[str] = OBJECT
    suffixes: ClassVar[tuple[str, ...]] = ("",)
    runs: ClassVar[str] = HOST

    @property
    def roots(self) -> list[Include]:
        """The directories that `#include` searches, in order."""
        return [Include(self.home), *self.include]


class Objects:
    """The objects of the units of a build, in a cache.

    build: each of its units has the macro TORCH_EXTENSION_NAME only if its text has that word.
    """

    def __init__(
        self, build: Build, source: Extension, target: Target, closure: Closure, cache: Cache,
        *, anew: bool,
    ) -> None:  # fmt: skip
        """Find the keys. closure: of all units. anew: whether cached objects are replaced."""
        self._states = states(closure.paths)  # before the files are read
        self._cache = cache
        self._anew = anew
        self._target = target
        self._sources = [
            UnitSource(
                path.name, folder=str(path.parent), flags=unit.flags, include=source.roots,
                environment=source.environment,
            )
            for path, unit in zip(source.paths, build.units)
        ]  # fmt: skip
        self._closures = closures_of(self._sources)
        read = frozenset().union(*(closure.paths for closure in self._closures))
        naming = {path for path in read if _NAME.encode() in path.read_bytes()}
        units = [
            unit._replace(flags=(f"-D{_NAME}={build.name}", *unit.flags))
            if naming & closure.paths or _may_name(source) else unit
            for unit, source, closure in zip(build.units, self._sources, self._closures)
        ]  # fmt: skip
        self.build = build if build.output == "program" else build._replace(units=units)
        used = {*map(build.is_cuda, build.units)}
        self._compilers = {cuda: _compilers(cuda=cuda) for cuda in used}
        self.keys = [self._key_of(number) for number in range(len(units))]

    def _key_of(self, number: int) -> Key:
        import torch

        build, source, unit = self.build, self._sources[number], self.build.units[number]
        target = self._target
        if not build.is_cuda(unit):
            target = Target.current("cpu").for_host_code(abi=target.abi)
        flags = (
            f"torch {torch.__version__}",
            *((f"cuda {torch.version.cuda}",) if build.with_cuda else ()),
            f"{sys.implementation.cache_tag}{sys.abiflags}",
            commands.standard_of_torch(),
            *(("program",) if build.output == "program" else ()),
            *(("text",) if build.texts else ()),  # whose `__FILE__` has no folder
            *numbered(unit.flags, [root.path for root in source.roots]),
            *(
                f"{name} {version}"
                for name, version in self._compilers[build.is_cuda(unit)].items()
            ),
        )
        variant = Variant(f"{OBJECT}::{Path(source.files[0]).stem}", source)
        return make_key(variant, target, flags, self._closures[number])

    def find(self, number: int) -> bytes | None:
        """The object of a unit, or None."""
        key = self.keys[number]
        entry = self._cache.find(key)
        if entry is None:
            return None
        try:
            if not self._anew:
                return entry.read(ARTIFACT)
            self._cache.remove(entry.path)
        except (OSError, ValueError, CacheError):
            pass
        return None

    def keep(self, number: int, folder: Path) -> None:
        """Publish the object of a unit, compiled in `folder`, if its key tells all about it."""
        try:
            if not self._is_covered(number, folder):
                return
            key, cuda = self.keys[number], self.build.is_cuda(self.build.units[number])
            with self._cache.staging() as staging:
                shutil.copyfile(folder / f"{number}.o", staging / ARTIFACT)
                compiler = commands.identity(with_nvcc=cuda)
                package = package_of(self._sources[number])
                self._cache.publish(
                    key, staging, Manifest(key.inputs, compiler=compiler, package=package)
                )
        except (OSError, CacheError) as e:
            _log.info("%s is not kept: %s", self.build.units[number].file, e)

    def _is_covered(self, number: int, folder: Path) -> bool:
        """Whether the compiler read what the key covers, and that as it was when it was read."""
        source, closure = self._sources[number], self._closures[number]
        opened = dependencies.in_folder(folder, [str(number)])
        known = commands.toolchain(self.build, opened)
        edited = states(closure.paths).items() - self._states.items()
        uncovered = dependencies.uncovered(source, closure, opened, known)
        return not (edited or any(uncovered))


def _compilers(*, cuda: bool) -> dict[str, str]:
    """The compilers of a unit. Raises CompilerNotFound."""
    identity = commands.identity(with_nvcc=cuda)
    host = config.current().environment.get("CC") if cuda else None
    return {**identity, **({"CC": cc_build.identity(host)["version"]} if host else {})}


def _may_name(source: Source) -> bool:
    """Whether the flags of a unit, or headers that are not read, may have the macro."""
    words = words_of(source)
    return any(root.version for root in source.roots) or any(_NAME in word for word in words)
