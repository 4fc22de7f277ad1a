"""Pins: entries that are never evicted. One empty file each, `v1/pins/<target>/<folder name>`.

They lie beside the entries, so that an entry is never edited and one that is built again keeps its
pin.
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
    """Keep these entries of the user root. Raises CacheError."""
    try:
        for path in paths:
            place = _place(cache, path)
            place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            place.touch()
    except OSError as e:
        raise cache.write_error(e) from e


def unpin(cache: Root, paths: Iterable[Path]) -> list[Path]:
    """Keep them no longer, whether they are there or not; those that were pinned.

    Raises CacheError.
    """
    freed = []
    try:
        for path in paths:
            place = _place(cache, path)
            with contextlib.suppress(FileNotFoundError):
                place.unlink()
                freed.append(path)
            with contextlib.suppress(OSError):
                place.parent.rmdir()
    except OSError as e:
        raise cache.write_error(e) from e
    return freed


def pinned(cache: Root) -> set[Path]:
    """The paths of pinned entries. Raises CacheError where that cannot be known."""
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


def _place(cache: Root, path: Path) -> Path:
    return cache.root / VERSION / "pins" / path.parent.name / path.name
