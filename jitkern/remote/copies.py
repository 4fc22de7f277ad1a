"""The copies of indexes in the user root, so that the processes of a host need not read them again.

    <root>/v1/remote/<digest>.json      {"builds":…,"index":…,"tag":…}; its time is that of the read

A copy is a hint like the index itself: whatever is odd about it counts as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from jitkern.cache import VERSION
from jitkern.cache.store import Cache
from jitkern.errors import CacheError
from jitkern.files import atomic
from jitkern.named_tuple import NamedTuple
from jitkern.remote.index import Index
from jitkern.remote.layout import LARGEST_INDEX
from jitkern.remote.store import Tag

FRESH = 60.0  # seconds for which an index, or that there is none, is taken for granted


class Copy(NamedTuple):
    """An index as it was read. builds: whether a service answered. at: Unix time of the read."""

    listing: Index
    tag: Tag = None
    builds: bool = False
    at: float = 0.0

    @property
    def fresh(self) -> bool:
        """Whether the index was read a moment ago."""
        return 0 <= time.time() - self.at < FRESH


def read(root: Path, url: str, machine: str) -> Copy | None:
    """Return the copy of a machine's index, or None."""
    path = _path(root, url, machine)
    try:
        with path.open("rb") as file:
            at = os.fstat(file.fileno()).st_mtime
            fields = json.loads(file.read(2 * LARGEST_INDEX))
        index = Index.decode(fields["index"].encode())
        return Copy(index, fields["tag"], fields["builds"] is True, at)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def write(cache: Cache, url: str, machine: str, copy: Copy) -> None:
    """Keep a copy; raises nothing."""
    path = _path(cache.root, url, machine)
    with contextlib.suppress(OSError, CacheError, TypeError):  # a tag may be no JSON
        fields = {"builds": copy.builds, "index": copy.listing.encode().decode(), "tag": copy.tag}
        data = json.dumps(fields).encode()
        if not path.parent.is_dir():
            with cache.staging():  # which makes the root of a new cache
                atomic.make_directory(path.parent, 0o700, fsync=False)
        atomic.write(path, data)


def _path(root: Path, url: str, machine: str) -> Path:
    name = hashlib.sha256(f"{url} {machine}".encode()).hexdigest()[:32]
    return root / VERSION / "remote" / f"{name}.json"
