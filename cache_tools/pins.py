"""Pins: entries that are never evicted. One empty file each, `v1/pins/<target>/<folder name>`.

They lie beside the entries, so that an entry is never edited and one that is built again keeps its
pin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from jitkern.cache import VERSION, Cache


def pin(cache: Cache, paths: Iterable[Path]) -> None:
    """Keep these entries of the user root. Raises CacheError."""
    try:
        for path in paths:
            place = _place(cache, path)
            place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            place.touch()
    except OSError as e:
        raise cache.write_error(e) from e


def unpin(cache: Cache, paths: Iterable[Path]) -> None:
    """Keep them no longer. Raises CacheError."""
    try:
        for path in paths:
            _place(cache, path).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                _place(cache, path).parent.rmdir()
    except OSError as e:
        raise cache.write_error(e) from e


def pinned(cache: Cache) -> set[Path]:
    """The paths of pinned entries."""
    version = cache.root / VERSION
    return {version / pin.parent.name / pin.name for pin in (version / "pins").glob("*/*")}


def _place(cache: Cache, path: Path) -> Path:
    return cache.root / VERSION / "pins" / path.parent.name / path.name
