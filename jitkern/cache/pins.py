"""Pins mark entries that are never evicted, each by an empty file `v1/pins/<target>/<folder name>`.

Pins lie outside of the entries, so that pinning edits no entry, and an entry that is built again
keeps its pin.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from jitkern.cache import VERSION, layout
from jitkern.cache.root import Root
from jitkern.errors import CacheError


def pin(cache: Root, paths: Iterable[Path]) -> None:
    """Pin entries of the user root. Raises CacheError."""
    try:
        for path in paths:
            file = _pin_file(cache, path)
            file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            file.touch()
    except OSError as e:
        raise cache.write_error(e) from e


def unpin(cache: Root, paths: Iterable[Path]) -> list[Path]:
    """Remove the pins of entries, existing or not; return the paths that had a pin.

    Raises CacheError.
    """
    unpinned = []
    try:
        for path in paths:
            file = _pin_file(cache, path)
            with contextlib.suppress(FileNotFoundError):
                file.unlink()
                unpinned.append(path)
            with contextlib.suppress(OSError):
                file.parent.rmdir()
    except OSError as e:
        raise cache.write_error(e) from e
    return unpinned


def pinned(cache: Root) -> set[Path]:
    """Return the paths of pinned entries. Raises CacheError where the pins cannot be read."""
    version = cache.root / VERSION
    try:
        return {
            version / target / name
            for target in filter(layout.is_target, _names(version / "pins"))
            for name in filter(layout.is_entry_name, _names(version / "pins" / target))
        }
    except OSError as e:
        raise CacheError(
            f"the pins of {cache.root} cannot be read: {e.strerror}; make its directories "
            "readable, or point JITKERN_CACHE_DIR at another",
            path=str(cache.root),
            errno=e.errno,
        ) from e


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _pin_file(cache: Root, path: Path) -> Path:
    return cache.root / VERSION / "pins" / path.parent.name / path.name
