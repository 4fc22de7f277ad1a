"""Eviction: which entries are removed when a cache is too large, or entries are old or stale.

The least recently used entries are removed first, by the times of their manifests. A look through
a large cache takes a while, so publishing an entry makes it due in two cases alone: this process
has published a tenth of the limit since the last look of any process, or that look is an hour ago.
The time of the file `v1/pruned` is that of the last look. The automatic run keeps entries that were
used within the last hour. Like ccache, it trims to nine tenths of the limit.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

from jitkern import cache as cache_room
from jitkern.cache import VERSION, layout
from jitkern.cache.key import OBJECT
from jitkern.cache.manifest import NAME
from jitkern.cache.root import Root
from jitkern.errors import CacheError
from jitkern.files import atomic

HOUR = 3600.0  # seconds for which an entry is safe from the automatic run, and between two looks
TRIM = 0.9
MARKER = "pruned"


class Use(NamedTuple):
    """The size and use of an entry: bytes of its files, Unix times of publication and last hit."""

    path: Path
    bytes: int
    published: float
    used: float

    @classmethod
    def of(cls, path: Path) -> Use:
        """Return the use of the entry at `path`, as far as readable. Raises OSError if gone."""
        published = path.lstat().st_mtime
        size, used = 0, published
        with contextlib.suppress(OSError), os.scandir(path) as files:
            for file in files:
                status = file.stat(follow_symlinks=False)
                size += status.st_size
                used = status.st_mtime if file.name == NAME else used
        return cls(path, size, published, used)


def evictable(
    cache: Root,
    *,
    max_size: int | None = None,
    max_age: float = 0,
    stale: AbstractSet[Path] = frozenset(),
) -> list[Use]:
    """Return the entries to evict so that the user root keeps to limits, oldest use first.

    Objects of units go before all others, since no process loads one. max_size: bytes, or None for
    any size. max_age: seconds since the last use, or 0 for any age.
    stale: entries to evict in any case.
    """
    ordered = sorted(uses(cache), key=lambda u: (not u.path.name.startswith(f"{OBJECT}."), u.used))
    size = sum(use.bytes for use in ordered)
    old = time.time() - max_age
    found = []
    for use in ordered:
        too_old = max_age and use.used < old
        too_large = max_size is not None and size > max_size
        if (use.path in stale or too_old or too_large) and layout.is_entry(use.path):
            found.append(use)
            size -= use.bytes
    return found


def remove(cache: Root, paths: Iterable[Path]) -> list[Path]:
    """Remove entries of the user root, atomically for readers, and then free their space.

    Returns the paths removed; a path that is not an entry of the user root is left alone. Raises
    CacheError, and removes nothing, where the root holds other files.
    """
    paths = list(paths)
    if paths and not cache.claim():
        raise CacheError(
            f"nothing is removed from {cache.root}: it has no {layout.TAG} of jitkern, since it "
            "held other files at its first use. Point JITKERN_CACHE_DIR at a directory of "
            f"its own, and delete the entries in {cache.root / VERSION} by hand",
            path=str(cache.root),
            errno=None,
        )
    removed = [path for path in paths if cache.remove(path)]
    cache.purge(0.0)
    return removed


def after_publish(cache: Root, size: int, *, max_size: int, max_age: float) -> None:
    """Evict if a look is due now that this process has published entries of `size` bytes.

    Failures are ignored, since the next run tries again. Two processes may evict at once: each
    skips the entries that the other has removed.
    """
    if not layout.is_tagged(cache.root):
        return
    with contextlib.suppress(OSError, CacheError):
        last_look = _last_look(cache)
        published = size + (cache.published if cache.known_look == last_look else 0)
        cache.known_look, cache.published = last_look, published
        much = max_size and published > max_size * (1 - TRIM)
        if much or abs(time.time() - last_look) >= HOUR:
            _note_look(cache)  # so that no other process begins now
            _evict(cache, max_size=max_size, max_age=max_age)


def uses(cache: Root) -> Iterator[Use]:
    """Yield the use of every entry of the user root, damaged entries too."""
    for path in cache.paths():
        with contextlib.suppress(OSError):
            yield Use.of(path)


def _evict(cache: Root, *, max_size: int, max_age: float) -> None:
    cache.purge()
    trimmed = int(max_size * TRIM) if max_size else None
    for use in evictable(cache, max_size=trimmed, max_age=max_age):
        if not _used_lately(use.path):  # asked now: there may have been a hit since
            cache.remove(use.path)
    cache_room.lock.sweep()


def _used_lately(path: Path) -> bool:
    """Return whether an entry was used within the hour, or its time cannot be read."""
    try:
        return 0 <= time.time() - (path / NAME).stat().st_mtime < HOUR
    except OSError:
        return True


def _last_look(cache: Root) -> float:
    """Return the Unix time of the last look of any process, or 0."""
    try:
        return (cache.root / VERSION / MARKER).lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def _note_look(cache: Root) -> None:
    """Note a look by the clock of this process: that of a network file system may differ."""
    version = cache.root / VERSION
    atomic.write(version / MARKER, b"", staging=version / "tmp")
    os.utime(version / MARKER, (time.time(), time.time()), follow_symlinks=False)
