"""Bounds: which entries go when a cache is too large, too old or stale.

The least recently used go first. What was used within the last hour stays unless the size is asked
for, and what is pinned always. After ccache, the automatic run trims to nine tenths of the limit,
so that it does not run at every publish, and as Go's build cache does, it looks once a day.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

from jitkern.cache import VERSION, layout, lock, pins, receipts, usage
from jitkern.cache.manifest import NAME
from jitkern.cache.root import Root
from jitkern.errors import CacheError
from jitkern.files import atomic

DAY = 86400.0
YOUNG = 3600.0  # seconds for which an entry is safe from the automatic run
TRIM = 0.9
STATE = "prune.json"


class Use(NamedTuple):
    """An entry: bytes of its files, when it was published, and when it was last found."""

    path: Path
    bytes: int
    published: float
    used: float

    @classmethod
    def of(cls, path: Path) -> Use:
        """As far as it can be read. Raises OSError where it is gone."""
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
    """What must go for the user root to keep to these limits, oldest use first.

    max_size: bytes, or None; max_age: seconds since the last use, or 0 for any; stale: entries that
    go in any case.
    """
    pinned = pins.pinned(cache)
    found = sorted(uses(cache), key=lambda use: use.used)
    size = sum(use.bytes for use in found)
    old = time.time() - max_age
    going = []
    for use in found:
        too_old = max_age and use.used < old
        if use.path in pinned or not (
            use.path in stale or too_old or (max_size is not None and size > max_size)
        ):
            continue
        if layout.is_entry(use.path):
            going.append(use)
            size -= use.bytes
    return going


def remove(cache: Root, paths: Iterable[Path]) -> list[Path]:
    """Take entries out of the user root, at once for readers, and then free their space.

    Returns those that went: what is no entry of the user root is left alone. Raises CacheError, and
    removes nothing, where the root holds other files.
    """
    paths = list(paths)
    if paths and not cache.claim():
        raise CacheError(
            f"nothing is removed from {cache.root}: it has no {layout.TAG} of jitkern, since it "
            "held other files when it was first used. Point JITKERN_CACHE_DIR at a directory of "
            f"its own, and delete the entries in {cache.root / VERSION} by hand",
            path=str(cache.root),
            errno=None,
        )
    gone = [path for path in paths if cache.remove(path)]
    cache.purge(0.0)
    receipts.forget(cache.root)
    return gone


def after_publish(cache: Root, size: int, *, max_size: int, max_age: float) -> None:
    """Evict, if the cache grew over its limit with an entry of `size` bytes, or a day has gone by.

    A failure is nobody's: the next run tries again. Two processes may both evict: what one took is
    gone for the other.
    """
    if not layout.is_tagged(cache.root):
        return
    with contextlib.suppress(OSError, CacheError):
        at, known = _state(cache)
        total = known + size
        due = not 0 <= time.time() - at < DAY
        if not due and (not max_size or total <= max_size):
            _write(cache, at, total)
            return
        _write(cache, time.time(), 0)  # so that no other process begins now
        _evict(cache, max_size=max_size, max_age=max_age)
        usage.compact(cache.root)
        _write(cache, time.time(), sum(use.bytes for use in uses(cache)))


def uses(cache: Root) -> Iterator[Use]:
    """Every entry of the user root, damaged ones too."""
    for path in cache.paths():
        with contextlib.suppress(OSError):
            yield Use.of(path)


def _evict(cache: Root, *, max_size: int, max_age: float) -> None:
    cache.purge()
    trimmed = int(max_size * TRIM) if max_size else None
    for use in evictable(cache, max_size=trimmed, max_age=max_age):
        with contextlib.suppress(OSError):
            used = (use.path / NAME).stat().st_mtime  # now: it may have been found since
            if 0 <= time.time() - used < YOUNG:
                continue
        cache.remove(use.path)
    receipts.forget(cache.root)
    lock.sweep()


def _state(cache: Root) -> tuple[float, int]:
    """When the last run was, and the bytes of the cache as far as is known."""
    try:
        at, known = json.loads((cache.root / VERSION / STATE).read_bytes())
        return float(at), int(known)
    except (OSError, ValueError, TypeError, RecursionError, OverflowError):
        return 0.0, 0


def _write(cache: Root, at: float, known: int) -> None:
    version = cache.root / VERSION
    atomic.write(version / STATE, json.dumps([at, known]).encode(), staging=version / "tmp")
