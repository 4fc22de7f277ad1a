"""jitkern's entries in Torch's mega-cache, beside the artifacts of `torch.compile`.

`torch.compiler.save_cache_artifacts()` includes the entries that this process found or built:
kernels, launch records and the launch runtime. `load_cache_artifacts()` publishes these entries in
the user's cache: each is a bundle. Torch loads registered kinds only, so import this module, or a
module that declares ops (which imports this module), before you load.

Torch 2.11 imports its module of the mega-cache when that is first used, and the module takes longer
to import than any of ours. So our kind of artifact is registered as soon as Torch imports that
module, and not before.

Until the artifacts are saved, each used entry costs only a note of its path.
"""

from __future__ import annotations

import importlib.machinery
import io
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import jitkern
from jitkern import cache, jit
from jitkern.cache.entry import Entry
from jitkern.cache.manifest import NAME, Manifest
from jitkern.errors import JitkernError

KIND = "jitkern"
_HOME = "torch.compiler._cache"  # Torch's module of the mega-cache
_log = logging.getLogger(__name__)


class _Path(bytes):
    """The path of an entry, in place of its content until that is saved."""

    __slots__ = ()


def _register() -> None:
    try:
        from torch.compiler._cache import (
            CacheArtifact,
            CacheArtifactFactory,
            CacheArtifactManager,
        )
    except ImportError:
        return  # this Torch has no mega-cache, or another one

    class KernelArtifact(CacheArtifact):
        """An entry of the cache, whose files are read only when they are saved."""

        __hash__ = object.__hash__  # a hash of the content would read the files at once
        __eq__ = object.__eq__

        def __init__(self, key: str, content: bytes) -> None:
            self.__dict__.update(key=key, source=content)

        @property
        def content(self) -> bytes:
            """The bytes to save, or b"" if the entry is gone by now."""
            source: bytes = self.__dict__["source"]
            if not isinstance(source, _Path):
                return source
            path = Path(os.fsdecode(source))
            try:
                entry = Entry(path, Manifest.decode((path / NAME).read_bytes()))
                return jitkern.cache_tools.bundle.packed(jit.open_cache(), [entry])
            except (OSError, ValueError) as e:
                _log.warning("the entry %s is not saved in the mega-cache: %s", path, e)
                return b""

        @staticmethod
        def type() -> str:
            """Return the name of this kind of artifact in Torch."""
            return KIND

        @staticmethod
        def encode(content: Any) -> bytes:
            """Return a path in place of content, which is read when it is saved."""
            return _Path(os.fsencode(content))

        def populate_cache(self) -> None:
            """Publish the entry in the user's cache, or log why this failed."""
            bundle, (target, _, name) = jitkern.cache_tools.bundle, self.key.partition("/")
            try:
                if content := self.content:
                    file = io.BytesIO(content)
                    bundle.adopt(jit.open_cache(), file, compressed=False, only=(target, name))
            except (JitkernError, ValueError, OSError) as e:
                _log.warning("the entry %s of the mega-cache is not published: %s", self.key, e)

    def note(path: Path) -> None:
        CacheArtifactManager.record_artifact(KIND, f"{path.parent.name}/{path.name}", path)

    CacheArtifactFactory.register(KernelArtifact)
    cache.events.follow(note)


class _Hook:
    """A finder of modules that only waits for `_HOME`, and registers our kind after its import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, _: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of `_HOME`, whose import registers our kind, or None for others."""
        if name != _HOME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if hasattr(torch.compiler, "_cache"):  # imported before us
    _register()
else:
    sys.meta_path.insert(0, _Hook())
