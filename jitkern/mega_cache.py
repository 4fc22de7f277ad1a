"""Torch's mega-cache, which carries our artifacts beside those of `torch.compile`.

`torch.compiler.save_cache_artifacts()` then holds what this process found or built: kernels, stubs,
plans and the launch runtime. `load_cache_artifacts()` publishes them in the user's cache, each
checked as an entry of a bundle is. Torch reads only kinds that are registered, so whoever loads
imports this module before, or a module that declares ops, which imports it.

Until somebody saves, an entry that is used costs a note of where it lies.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from jitkern import jit
from jitkern.cache import events
from jitkern.errors import JitkernError

KIND = "jitkern"
_log = logging.getLogger(__name__)


class _Place(bytes):
    """Where an entry lies, in place of its content."""

    __slots__ = ()


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
                return jit.mega_cache_entries.content_at(path)
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
                    jit.mega_cache_entries.publish(self.key, self.content)
            except (JitkernError, ValueError, OSError) as e:
                _log.warning("%s of the mega-cache is not taken in: %s", self.key, e)

    def note(path: Path) -> None:
        CacheArtifactManager.record_artifact(KIND, f"{path.parent.name}/{path.name}", path)

    CacheArtifactFactory.register(KernelArtifact)
    events.follow(note)


_register()
