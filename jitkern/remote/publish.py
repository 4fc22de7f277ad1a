"""Push entries of a cache to a store: signed, in bundles, and then named by the machine's index.

A bundle is there before an index names it. The index is the one object that changes, and only by
conditional writes, so that pushes from many machines at once lose nothing. A store that ignores the
conditions takes pushes one after the other.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from jitkern.cache.entry import Entry
from jitkern.cache.store import Cache
from jitkern.cache_tools import bundle as packing, signing
from jitkern.cache_tools.check import counted
from jitkern.cache_tools.ustar import BundleError
from jitkern.errors import JitkernError
from jitkern.named_tuple import NamedTuple
from jitkern.remote import bundles, layout
from jitkern.remote.index import Bundle, update_index
from jitkern.remote.patience import RETRIES, retry
from jitkern.remote.store import AccessDenied, Store, Unavailable

KEEP = 3  # pushes of a package that an index names
FRESH = 12 * 3600  # seconds; an older bundle is written again: a bucket may delete what is old


class Pushed(NamedTuple):
    """The outcome of a push for one machine.

    bundles: now in the index. uploaded: bytes sent. dropped: bundles of these packages that the
    index no longer names.
    """

    machine: str
    bundles: tuple[Bundle, ...]
    uploaded: int
    dropped: tuple[Bundle, ...]


def push(
    cache: Cache,
    chosen: Iterable[Entry],
    store: Store,
    *,
    key: Path | None = None,
    unsigned: bool = False,
    keep: int = KEEP,
    part_of: str = "",
    tell: Callable[[str], object] = lambda _: None,
) -> list[Pushed]:
    """Push entries to a store, and return what was done for each machine.

    Entries whose names do not fit into a bundle are left out, with a warning.

    key: a private key, which signs the entries that it has not signed yet. unsigned: whether to
    push entries without any signature, which machines take only from `trusted_remotes`. keep: how
    many pushes of a package an index names. part_of: a text that all pushes have in common which
    count as one push, e.g. those of the shards of a prewarm. tell: called with a line of text
    before each step. Raises JitkernError, and Unavailable if the store fails for good.
    """
    entries = packing.fitting(chosen)
    if not entries:
        raise BundleError(f"nothing to push: no entry of {cache.root} is chosen")
    _sign(cache, entries, key, unsigned=unsigned)
    if retry(store.get, layout.ROOT, limit=1 << 16) is None:
        retry(store.create, layout.ROOT, layout.ROOT_CONTENT)
    done = []
    for machine, groups in sorted(bundles.grouped(entries).items()):
        tell(f"{machine}: {counted(sum(map(len, groups.values())), 'entry')}")
        with tempfile.TemporaryDirectory(prefix="jitkern-push-") as folder:
            packed = [
                packed
                for package, members in sorted(groups.items())
                for packed in bundles.packed(cache, package, members, Path(folder), part_of)
            ]
            done.append(_push_bundles(store, machine, packed, keep))
    return done


def _sign(cache: Cache, entries: Sequence[Entry], key: Path | None, *, unsigned: bool) -> None:
    """Sign the entries that the key has not signed. Raises JitkernError for what stays unsigned."""
    if key is None:
        for entry in () if unsigned else entries:
            if not signing.signers_of(entry) and entry.path.exists():
                raise JitkernError(
                    f"{entry.path.name} is not signed, so machines would not use it: push with "
                    "--key FILE (`jitkern cache keygen` makes a key), or with --unsigned, and then "
                    "add the URL to `trusted_remotes` in every machine's settings file"
                )
        return
    public = signing.public_key_of(key)
    for entry in signing.sign_missing(cache, entries, key):
        if public not in signing.signers_of(entry) and entry.path.exists():
            raise JitkernError(
                f"{entry.path} is not signed with {key}, and lies in a read-only layer: leave it "
                f"out with --layer {cache.root}, or sign it where it was made"
            )


def _push_bundles(
    store: Store,
    machine: str,
    packed: Sequence[tuple[Bundle, Path]],
    keep: int,
) -> Pushed:
    """Write the bundles of a machine, and name them in its index."""
    made = tuple(bundle for bundle, _ in packed)
    uploaded = sum(_sent(store, machine, bundle, path) for bundle, path in packed)
    old, new = update_index(store, machine, lambda index: index.merged(made, keep))
    dropped = tuple(bundle for bundle in old.bundles if bundle not in new.bundles)
    return Pushed(machine, made, uploaded, dropped)


def _sent(store: Store, machine: str, bundle: Bundle, path: Path) -> int:
    """Write a bundle that is not there, or that the store may soon delete; return bytes sent."""
    name = layout.bundle_of(machine, bundle.file)
    try:
        for _ in range(RETRIES):
            there = retry(store.stat, name)
            if there is None:
                if retry(store.create, name, path.read_bytes()):
                    return bundle.bytes
            elif there.bytes == bundle.bytes and time.time() - there.modified < FRESH:
                return 0
            else:
                found = retry(store.get, name, limit=packing.MAX_ENTRY)
                if found and retry(store.replace, name, path.read_bytes(), found.tag):
                    return bundle.bytes
    except AccessDenied:
        there = retry(store.stat, name)
        if there and there.bytes == bundle.bytes:  # a policy lets nobody write a bundle again
            return 0
        raise
    raise Unavailable(f"{name} does not exist and cannot be created")
