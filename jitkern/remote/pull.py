"""Pull bundles of a remote into a cache ahead of the first call: for init containers and images."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from jitkern.cache.store import Cache, Entry
from jitkern.cache_tools.ustar import BundleError
from jitkern.named_tuple import NamedTuple
from jitkern.remote import bundles, layout
from jitkern.remote.index import Bundle, read_index
from jitkern.remote.patience import retry
from jitkern.remote.store import Readable, Unavailable


class Pulled(NamedTuple):
    """The outcome of a pull.

    new, present: entries that were added, and that were there. bytes: received. bundles: objects
    that were fetched. failed: a line for each object that was refused. gone: names of bundles that
    the index has and the store has not.
    """

    new: int = 0
    present: int = 0
    bytes: int = 0
    bundles: int = 0
    failed: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


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
    have = {
        path.name.rpartition("-")[2]
        for path, entry in cache.entries(cache.verify)
        if isinstance(entry, Entry)
    }
    done = Pulled()
    for name, bundle in _objects(store, dict.fromkeys(machines), packages):
        present = sum(digest in have for digest in bundle.entries)
        if present == len(bundle.entries):
            done = done._replace(present=done.present + present)
            continue
        tell(f"{bundle.file[:12]}…, entries: {len(bundle.entries)}")
        try:
            found = retry(store.get, name, limit=bundle.bytes)
            if found is None:  # deleted, since it was old: a miss
                done = done._replace(gone=(*done.gone, name))
                continue
            data = bundles.checked(found, bundle)
            added = bundles.adopt(cache, data, keys)
        except (BundleError, Unavailable) as e:  # the other bundles may be good
            done = done._replace(failed=(*done.failed, f"{name} is refused: {e}"))
            continue
        have.update(bundle.entries)
        done = done._replace(
            new=done.new + added.new, present=done.present + added.present,
            bytes=done.bytes + len(data), bundles=done.bundles + 1,
        )  # fmt: skip
    return done


def _objects(
    store: Readable, machines: Iterable[str], packages: Collection[str]
) -> Iterator[tuple[str, Bundle]]:
    """Yield each bundle to pull, with its name."""
    wanted = dict.fromkeys(machines, packages)
    for machine in [*wanted]:  # their launch records need the runtime, which lies under the host
        wanted.setdefault(layout.host_of(machine), (layout.RUNTIME_PACKAGE,))
    for machine, only in wanted.items():
        index, _ = read_index(store, machine)
        for bundle in index.bundles if index else ():
            if not only or bundle.package in (*only, layout.RUNTIME_PACKAGE):
                limit = min(bundle.bytes, layout.LARGEST_BUNDLE)  # the index is not signed
                yield layout.bundle_of(machine, bundle.file), bundle._replace(bytes=limit)
