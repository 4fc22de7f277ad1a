"""The cache as a remote: an index for each machine, bundles by package, and single entries.

Bundles are files of the service, made of the cache when an index is asked for and entries have
come or gone. So an index names what exists, whatever is evicted meanwhile.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jitkern import after_fork, cache_tools
from jitkern.cache.store import Cache, Entry
from jitkern.errors import JitkernError, TargetError
from jitkern.files.owned import Layer
from jitkern.remote.index import Bundle, Index
from jitkern.remote.layout import LARGEST_BUNDLE, LARGEST_BUNDLED, machine_of
from jitkern.service.build import Signer, digest_of
from jitkern.service.shelf import Shelf

REST = 1.0  # seconds for which an index is not compared with the cache again
COSTS = 5  # times the seconds that packing took: the rest after it
_log = logging.getLogger(__name__)


class Package(NamedTuple):
    """The name and version of a package, or of a module that no package brought."""

    name: str
    version: str


class _Known(NamedTuple):
    """The index of a machine as it was made. due: when to look again, by the monotonic clock."""

    places: frozenset[Path]
    content: bytes
    due: float


class Catalog:
    """What a cache holds of some ops.

    packages: the package of each op, by the names that entries have. sign: signs what is packed.
    suffix: of bundles, `.tar` or `.tar.zst`.
    """

    def __init__(
        self, cache: Cache, packages: Mapping[str, Package], shelf: Shelf, sign: Signer, suffix: str
    ) -> None:
        self._cache = cache
        self._packages = packages
        self._shelf = shelf
        self._sign = sign
        self._suffix = suffix
        self._known: dict[str, _Known] = {}
        self._packing = threading.Lock()
        after_fork(self._packing)

    def index(self, machine: str) -> bytes | None:
        """Return the index of a machine, or None for what is no machine."""
        if _machine_of(machine) != machine:
            return None
        known = self._known.get(machine)
        if known and time.monotonic() < known.due:
            return known.content
        if not self._packing.acquire(blocking=known is None):
            assert known
            return known.content  # somebody else makes a new one
        try:
            return self._renewed(machine)
        finally:
            self._packing.release()

    def bundle(self, machine: str, file: str) -> BinaryIO | None:
        """Return a bundle that an index of the machine names, or named a short time ago."""
        if machine not in self._known:  # the index may be of an earlier process
            self.index(machine)
        return self._shelf.opened(file) if machine in self._known else None

    def entry(self, target: str, name: str) -> BinaryIO | None:
        """Return the bundle of one entry, or None if it is not there."""
        file = f"{hashlib.sha256(f'{target}/{name}'.encode()).hexdigest()}.entry.tar"
        if opened := self._shelf.opened(file):
            return opened
        entry = self._cache.look_up(target, name).entry
        if entry is None or entry.op not in self._packages:
            return None
        try:
            self._sign(self._cache, [entry])
            return self._shelf.made(
                file, lambda path: cache_tools.pack(self._cache, [(None, entry)], path)
            )
        except JitkernError as e:
            _log.warning("%s is not served: %s", entry.path, e)
            return None

    def _renewed(self, machine: str) -> bytes:
        """Return the index of a machine, made anew if its entries are not those of the last."""
        started = time.monotonic()
        found = self._cache.places(lambda target, _: _machine_of(target) == machine)
        places: dict[tuple[str, str], tuple[Layer, Path]] = {}
        for layer, path in found:
            places.setdefault((path.parent.name, path.name), (layer, path))  # the first layer wins
        paths = frozenset(path for _, path in places.values())
        known = self._known.get(machine)
        if not paths and known is None:
            return Index(loose=False).encode()  # nothing is kept of a machine that has no entries
        index = known.content if known else b""
        if known is None or paths != known.places:
            made = self._made(machine, places.values())
            self._shelf.hold(machine, [bundle.file for bundle in made.bundles])
            index = made.encode()
        now = time.monotonic()
        self._known[machine] = _Known(paths, index, now + max(REST, COSTS * (now - started)))
        return index

    def _made(self, machine: str, places: Iterable[tuple[Layer, Path]]) -> Index:
        """Pack the entries at these places, and return the index of their bundles."""
        groups: dict[Package, list[Entry]] = defaultdict(list)
        loose = False
        for layer, path in places:
            entry = self._cache.entry_at(layer, path, "always")
            if not isinstance(entry, Entry) or entry.op not in self._packages:
                continue
            if entry.size > LARGEST_BUNDLED:
                loose = True
            else:
                groups[self._packages[entry.op]].append(entry)
        bundles = []
        for package in sorted(groups):
            for part in _parts(sorted(groups[package], key=lambda e: (e.op, e.path))):
                bundle = self._packed(machine, package, part)
                loose |= bundle is None
                bundles += [bundle] if bundle else []
        return Index(tuple(bundles), loose)

    def _packed(self, machine: str, package: Package, entries: list[Entry]) -> Bundle | None:
        """Pack entries into a bundle named by its content; None if that is not possible."""
        path = self._shelf.folder / f"packing{self._suffix}"
        try:
            self._sign(self._cache, entries)
            cache_tools.pack(self._cache, ((None, entry) for entry in entries), path)
        except JitkernError as e:
            _log.warning("the bundle of %s is not served: %s", package.name, e)
            return None
        data = path.read_bytes()
        name = f"{hashlib.sha256(data).hexdigest()}{self._suffix}"
        path.rename(self._shelf.folder / name)
        self._shelf.add(name, machine)
        digests = tuple(sorted({digest_of(entry) for entry in entries if entry.path.exists()}))
        return Bundle(name, len(data), *package, digests)


def _parts(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yield entries in lists that fit into a bundle."""
    part: list[Entry] = []
    size = 0
    for entry in entries:
        if part and size + entry.size > LARGEST_BUNDLE // 2:  # half of it for headers, manifests
            yield part
            part, size = [], 0
        part.append(entry)
        size += entry.size
    if part:
        yield part


@functools.lru_cache(maxsize=1024)
def _machine_of(target: str) -> str:
    """Return the machine of a target, or "" for a text that is no target."""
    try:
        return machine_of(target)
    except TargetError:
        return ""
