"""The cache as a remote: an index for each machine, and bundles by package.

Bundles are files of the service, made of the cache when an index is asked for and entries have
come or gone. So an index names what exists, whatever is evicted meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jitkern._fork import after_fork
from jitkern.cache.store import Cache, Entry
from jitkern.cache_tools import signing
from jitkern.cache_tools.bundle import SUFFIXES, fitting
from jitkern.cache_tools.listing import EntryFilter, rows
from jitkern.errors import JitkernError, TargetError
from jitkern.files.trust import Layer
from jitkern.remote.bundles import grouped, packed
from jitkern.remote.index import Bundle, Index
from jitkern.remote.layout import machine_of

REST = 1.0  # seconds for which an index is not compared with the cache again
COSTS = 5  # times the seconds that packing took: the rest after it
MOST_BYTES = 1 << 30  # of bundles that no index names; the least recently used go first
_log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=1024)
def _machine_of(target: str) -> str | None:
    """Return the machine of a target, or None for a text that is not a target."""
    try:
        return machine_of(target)
    except TargetError:
        return None


def _due_after(started: float) -> float:
    """Return when to look into the cache again, after a look that started then."""
    now = time.monotonic()
    return now + max(REST, COSTS * (now - started))


class _Known(NamedTuple):
    """The index of a machine as it was made.

    named: the files of its bundles. due: when to look again, by the monotonic clock.
    """

    places: frozenset[Path]
    content: bytes
    named: frozenset[str]
    due: float


class Catalog:
    """The entries of some ops in a cache.

    ops: the names that entries of these ops have. folder: the directory of bundles, in which builds
    put theirs, too. key: the private key that signs what is packed, or None.
    """

    def __init__(self, cache: Cache, ops: Collection[str], folder: Path, key: Path | None) -> None:
        self._cache = cache
        self._ops = ops
        self.folder = folder
        self._key = key
        self.known: dict[str, _Known] = {}
        self._packing = threading.Lock()
        self._held: list[tuple[str, str, int, int]] = []
        self._held_due = 0.0  # when to list again, by the monotonic clock
        self._listing = threading.Lock()
        after_fork(self._packing, self._listing)

    def index(self, machine: str) -> bytes | None:
        """Return the index of a machine, or None for an invalid name of a machine."""
        if _machine_of(machine) != machine:
            return None
        known = self.known.get(machine)
        if known and time.monotonic() < known.due:
            return known.content
        if not self._packing.acquire(blocking=known is None):
            assert known
            return known.content  # somebody else makes a new one
        try:
            content = self._renewed(machine)
        finally:
            self._packing.release()
        self.sweep()
        return content

    def bundle(self, machine: str, file: str) -> BinaryIO | None:
        """Return a bundle that an index of the machine names, or named a short time ago."""
        if machine not in self.known:  # the index may be of an earlier process
            self.index(machine)
        return self.opened(file) if machine in self.known else None

    def opened(self, file: str) -> BinaryIO | None:
        """Return an open bundle, which stays readable after its removal; None if it is not here."""
        try:
            opened = (self.folder / file).open("rb")
        except FileNotFoundError:
            return None
        os.utime(opened.fileno())  # by which the least recently used is known
        return opened

    def held(self) -> list[tuple[str, str, int, int]]:
        """Return op, target, number of entries, and their bytes, as they were a short time ago."""
        with self._listing:
            started = time.monotonic()
            if started >= self._held_due:
                found = rows(self._cache, EntryFilter(op=tuple(self._ops)), verify="none")
                sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
                for row in found:
                    sizes[row.op, row.target].append(row.bytes)
                self._held = [(*of, len(each), sum(each)) for of, each in sorted(sizes.items())]
                self._held_due = _due_after(started)
            return self._held

    def sweep(self) -> None:
        """Remove bundles that no index names, but for the newest, while they are too large.

        Nothing is done while an index is made, which will name bundles that are written already.
        """
        if not self._packing.acquire(blocking=False):
            return
        try:
            named = {file for known in [*self.known.values()] for file in known.named}
            found: list[tuple[int, int, Path]] = []
            for path in self.folder.iterdir():
                if path.name.endswith(SUFFIXES) and path.name not in named:
                    with contextlib.suppress(FileNotFoundError):
                        status = path.stat()
                        found.append((status.st_mtime_ns, status.st_size, path))
            left = sum(size for _, size, _ in found)
            for _, size, path in sorted(found)[:-1]:
                if left <= MOST_BYTES:
                    break
                left -= size
                path.unlink(missing_ok=True)
        finally:
            self._packing.release()

    def _renewed(self, machine: str) -> bytes:
        """Return the index of a machine, rebuilt if entries were added or removed."""
        started = time.monotonic()
        found = self._cache.places(lambda target, _: _machine_of(target) == machine)
        places: dict[tuple[str, str], tuple[Layer, Path]] = {}
        for layer, path in found:
            places.setdefault((path.parent.name, path.name), (layer, path))  # the first layer wins
        paths = frozenset(path for _, path in places.values())
        known = self.known.get(machine)
        if not paths and known is None:
            return Index().encode()  # nothing is kept of a machine without entries
        if known is None or paths != known.places:
            made = self._made(machine, places.values())
            named = frozenset(bundle.file for bundle in made.bundles)
            known = _Known(paths, made.encode(), named, 0)
        self.known[machine] = known._replace(due=_due_after(started))
        return known.content

    def _made(self, machine: str, places: Iterable[tuple[Layer, Path]]) -> Index:
        """Pack the entries at these places, and return the index of their bundles."""
        read = (self._cache.entry_at(layer, path, "always") for layer, path in places)
        entries = fitting(e for e in read if isinstance(e, Entry) and e.op in self._ops)
        bundles: list[Bundle] = []
        for package, members in sorted(grouped(entries)[machine].items()):
            try:
                if self._key:
                    signing.sign_missing(self._cache, members, self._key)
                made = packed(self._cache, package, members, self.folder)
            except JitkernError as e:
                _log.warning("the bundles of %s are not served: %s", package, e)
                continue
            bundles += [bundle for bundle, _ in made]
        return Index(tuple(bundles))
