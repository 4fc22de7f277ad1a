"""Pull bundles of a remote into a cache ahead of the first call: for init containers and images."""

from __future__ import annotations

import copy
import hashlib
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from jitkern.cache.store import Cache, Entry
from jitkern.cache_tools import bundle as packing
from jitkern.errors import TargetError
from jitkern.named_tuple import NamedTuple
from jitkern.remote import layout
from jitkern.remote.conditions import insist, read_index
from jitkern.remote.index import Bundle
from jitkern.remote.store import Readable, Store, Unavailable


class Pulled(NamedTuple):
    """What a pull did.

    new, present: entries that were added, and that were there. bytes: received. bundles: objects
    that were fetched. failed: a line for each object that was refused or missing.
    """

    new: int = 0
    present: int = 0
    bytes: int = 0
    bundles: int = 0
    failed: tuple[str, ...] = ()


def pull(
    cache: Cache,
    store: Readable,
    machines: Iterable[str],
    keys: tuple[str, ...],
    *,
    packages: Collection[str] = (),
    tell: Callable[[str], object] = lambda _: None,
) -> Pulled:
    """Add the entries that a remote has for some machines to the cache, each bundle all or none.

    keys: public keys, one of which must have signed each entry; empty where none is needed, see
    `trust`. packages: the only ones to pull, with the launch runtime; empty for all. tell: called
    with a line of text before each object. Raises Unavailable, JitkernError for an index that
    cannot be used, and CacheError where the cache cannot be written.
    """
    cache = _without_fsync(cache)
    have = {
        path.name.rpartition("-")[2]
        for path, entry in cache.entries(cache.verify)
        if isinstance(entry, Entry)
    }
    done = Pulled()
    for name, size, digests in _objects(store, dict.fromkeys(machines), packages):
        present = sum(digest in have for digest in digests)
        if present == len(digests):
            done = done._replace(present=done.present + present)
            continue
        tell(f"{name.rpartition('/')[2][:12]}…, entries: {len(digests)}")
        try:
            data = _fetched(store, name, size)
            with tempfile.TemporaryDirectory(prefix="jitkern-pull-") as folder:
                path = Path(folder, name.rpartition("/")[2])
                path.write_bytes(data)
                added = packing.unpack(cache, path, keys=keys)
        except (packing.BundleError, Unavailable) as e:  # the other bundles may be good
            done = done._replace(failed=(*done.failed, _without_folder(str(e), name)))
            continue
        have.update(digests)
        done = done._replace(
            new=done.new + added.new, present=done.present + added.present,
            bytes=done.bytes + len(data), bundles=done.bundles + 1,
        )  # fmt: skip
    return done


def _without_fsync(cache: Cache) -> Cache:
    """Return the cache for entries that a reader verifies each time, and that can be pulled again.

    To wait for the disk would take ten times as long as all the rest.
    """
    quick = copy.copy(cache)
    quick.fsync = cache.fsync and cache.verify != "always"
    return quick


def _objects(
    store: Readable, machines: Iterable[str], packages: Collection[str]
) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Yield name, most bytes and digests of each bundle that is wanted, then of loose entries."""
    wanted = dict.fromkeys(machines, packages)
    for machine in [*wanted]:  # their stubs need the runtime, which lies under the host
        wanted.setdefault(layout.host_of(machine), (layout.RUNTIME_PACKAGE,))
    has_loose = []
    for machine, only in wanted.items():
        index, _ = read_index(store, machine)
        for bundle in index.bundles if index else ():
            if not only or bundle.package in (*only, layout.RUNTIME_PACKAGE):
                yield _object_of(machine, bundle)
        if index is None or index.loose:
            has_loose += [machine] if only is packages else []
    if has_loose and not packages and isinstance(store, Store):
        for found in insist(lambda: [*store.list(f"{layout.ENTRIES}/")]):
            target, _, file = found.name.removeprefix(f"{layout.ENTRIES}/").partition("/")
            if _machine_or_none(target) in has_loose:
                digest = file.removesuffix(".tar").rpartition("-")[2]
                yield found.name, packing.MAX_ENTRY, (digest,)


def _object_of(machine: str, bundle: Bundle) -> tuple[str, int, tuple[str, ...]]:
    limit = min(bundle.bytes, 2 * layout.LARGEST_BUNDLE)  # the index is not signed
    return layout.bundle_of(machine, bundle.file), limit, bundle.entries


def _machine_or_none(target: str) -> str | None:
    try:
        return layout.machine_of(target)
    except TargetError:
        return None


def _fetched(store: Readable, name: str, limit: int) -> bytes:
    """Return the content of a bundle. Raises BundleError if it is missing, or not what it says."""
    found = insist(store.get, name, limit=limit)
    if found is None:
        raise packing.BundleError(f"{name} is missing")
    file = name.rpartition("/")[2]
    if layout.is_bundle(file) and hashlib.sha256(found.data).hexdigest() != file[:64]:
        raise packing.BundleError(f"{name} does not have the content that its name says")
    return found.data


def _without_folder(text: str, name: str) -> str:
    """Return an error with the name of the object, not of the temporary file."""
    file = name.rpartition("/")[2]
    words = (name if word.endswith(file) else word for word in text.split(" "))
    return " ".join(words)
