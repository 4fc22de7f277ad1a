"""Torch's mega-cache, which carries our artifacts beside those of `torch.compile`.

`torch.compiler.save_cache_artifacts()` then holds what this process found or built: kernels, stubs,
plans and the launch runtime. `load_cache_artifacts()` publishes them in the user's cache, each
checked as an entry of a bundle is. Torch reads only kinds that are registered, so whoever loads
imports this module before, or a module that declares ops, which imports it.

Until somebody saves, an entry that is used costs a note of where it lies.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from jitkern import events, jit
from jitkern.entry import Entry
from jitkern.errors import JitkernError
from jitkern.manifest import NAME, Manifest

KIND = "jitkern"
_log = logging.getLogger(__name__)


class _Place(bytes):
    """Where an entry lies, in place of its content."""

    __slots__ = ()


def content_of(entry: Entry) -> bytes:
    """The files of an entry in one: a line of JSON with names and sizes, then the files.

    Raises ValueError or OSError if it is not whole.
    """
    files = entry.files()
    sizes = {name: len(data) for name, data in files.items()}
    return b"".join((json.dumps(sizes).encode(), b"\n", *files.values()))


def publish(place: str, content: bytes) -> None:
    """Put what `content_of` gave into the user's cache, as the entry `target/name`, if it is new.

    Raises ValueError for anything else, and CacheError where the cache cannot be written.
    """
    target, _, name = place.partition("/")
    files = _files(content)
    digest = Manifest.decode(files[NAME]).digest
    cache = jit.open_cache()
    if cache.look_up(target, name, digest).entry is None:
        cache.adopt(target, name, files)


def _files(content: bytes) -> dict[str, bytes]:
    line, _, data = content.partition(b"\n")
    files, start = {}, 0
    try:
        for name, size in json.loads(line).items():
            files[name] = data[start : start + size]
            start += size
    except (AttributeError, TypeError, RecursionError) as e:
        raise ValueError("its first line is no table of files") from e
    if start != len(data) or NAME not in files:
        raise ValueError("it is not as long as its first line says, or has no manifest")
    return files


def _register() -> None:
    try:
        from torch.compiler._cache import (
            CacheArtifact,
            CacheArtifactFactory,
            CacheArtifactManager,
        )
    except ImportError:
        return  # a Torch without, or with another mega-cache

    class KernelArtifact(CacheArtifact):
        """An entry of the cache; its files are read when they are saved."""

        __hash__ = object.__hash__  # by content, it would be read at once
        __eq__ = object.__eq__

        def __init__(self, key: str, content: bytes) -> None:
            self.__dict__.update(key=key, given=content)

        @property
        def content(self) -> bytes:
            """The bytes that are saved; none for an entry that is gone by then."""
            given: bytes = self.__dict__["given"]
            if not isinstance(given, _Place):
                return given
            path = Path(os.fsdecode(given))
            try:
                return content_of(Entry(path, Manifest.decode((path / NAME).read_bytes())))
            except (OSError, ValueError) as e:
                _log.warning("%s is not saved: %s", path, e)
                return b""

        @staticmethod
        def type() -> str:
            """What Torch knows these by."""
            return KIND

        @staticmethod
        def encode(content: Any) -> bytes:
            """Of a path: itself, until it is saved."""
            return _Place(os.fsencode(content))

        def populate_cache(self) -> None:
            """Publish the entry; where that cannot be, say why."""
            try:
                if self.content:
                    publish(self.key, self.content)
            except (JitkernError, ValueError, OSError) as e:
                _log.warning("%s of the mega-cache is not taken in: %s", self.key, e)

    def note(path: Path) -> None:
        CacheArtifactManager.record_artifact(KIND, f"{path.parent.name}/{path.name}", path)

    CacheArtifactFactory.register(KernelArtifact)
    events.follow(note)


_register()
