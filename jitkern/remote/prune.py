"""Remove unused bundles from a store.

Buckets have no eviction of their own. A bundle is deleted only when no index names it and it is a
day old by the store's own clock: a push that is under way writes what it names again if that is
older than `publish.FRESH`. Between the look and the deletion a whole push may pass: therefore a
push looks once more after its index is written, and a prune reads the indexes once more afterwards.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Collection, Iterable

from jitkern.cache import VERSION
from jitkern.cache_tools import bundle as packing, signing
from jitkern.cache_tools.ustar import BundleError
from jitkern.errors import JitkernError
from jitkern.files import signature
from jitkern.named_tuple import NamedTuple
from jitkern.remote import bundles, layout
from jitkern.remote.index import Index, read_index, update_index
from jitkern.remote.patience import retry
from jitkern.remote.store import Listed, Store

AGE = 24 * 3600  # seconds: what is younger may be of a push that is under way


class Pruned(NamedTuple):
    """The outcome of a prune, or of a dry run.

    dropped: names of bundles that indexes no longer name. deleted: objects.
    """

    dropped: tuple[str, ...]
    deleted: tuple[Listed, ...]


def prune(store: Store, *, keep: int, signer: str = "", dry_run: bool = False) -> Pruned:
    """Trim the indexes of a store, and delete what no index names.

    keep: how many pushes of a package an index keeps naming. signer: a public key in base64 that is
    revoked: bundles with entries that it signed are named no longer. dry_run: change nothing.
    Raises Unavailable, and JitkernError for an index that cannot be used.
    """
    now = _now(store)
    there = {found.name: found for found in retry(lambda: [*store.list(f"{VERSION}/")])}
    revoked = {name for name in there if signer and _is_signed(store, name, signer)}
    named: set[str] = set()
    dropped: list[str] = []
    for machine in machines_of(there):
        old, new = _trimmed(store, machine, keep, there.keys(), revoked, dry_run=dry_run)
        gone = set(old.bundles) - set(new.bundles)
        dropped += sorted(layout.bundle_of(machine, bundle.file) for bundle in gone)
        named |= {layout.bundle_of(machine, bundle.file) for bundle in new.bundles}
    deleted = []
    for found in there.values():
        of_probe = found.name.startswith(f"{layout.PROBES}/")
        is_ours = of_probe or layout.is_bundle(found.name.rpartition("/")[2])
        if found.name in named or not is_ours or now - found.modified <= AGE:
            continue
        if not dry_run:
            there_now = retry(store.stat, found.name)
            # Listings may tell a time more exactly than a look, which has whole seconds.
            if there_now is None or there_now.modified >= found.modified + 1:
                continue  # a push has written it again, or it is gone
            retry(store.delete, found.name)
        deleted.append(found)
    if not dry_run:  # a push that was faster than the deletion named what is gone
        left = there.keys() - {found.name for found in deleted}
        for machine in {found.name.split("/")[1] for found in deleted} & {*machines_of(there)}:
            _trimmed(store, machine, keep, left, set(), dry_run=False)
    return Pruned(tuple(dropped), tuple(deleted))


def _trimmed(
    store: Store,
    machine: str,
    keep: int,
    there: Collection[str],
    revoked: set[str],
    *,
    dry_run: bool,
) -> tuple[Index, Index]:
    """Let a machine's index name less, and nothing that is missing; return it before and after."""

    def change(old: Index | None) -> Index | None:
        if old is None:
            return None
        names = {layout.bundle_of(machine, bundle.file) for bundle in old.bundles}
        gone = {name for name in names.difference(there) if retry(store.stat, name) is None}
        files = {name.rpartition("/")[2] for name in names & revoked | gone}
        return old.without(files).trimmed(keep)

    if not dry_run:
        return update_index(store, machine, change)
    old = read_index(store, machine)[0]
    return old or Index(), change(old) or Index()


def machines_of(names: Iterable[str]) -> list[str]:
    """Return the machines whose indexes are among the names of objects, sorted."""
    folders = (name.split("/") for name in names)
    return sorted(parts[1] for parts in folders if len(parts) == 3 and parts[2] == "index.json")


def _now(store: Store) -> float:
    """Return the time by the clock of the store: when an object was written just now."""
    name = f"{layout.PROBES}/{uuid.uuid4().hex}"
    retry(store.create, name, b"")
    try:
        found = retry(store.stat, name)
    finally:
        retry(store.delete, name)
    if found is None:
        raise JitkernError(f"{store.url} does not return what was just written: nothing is pruned")
    return found.modified


def _is_signed(store: Store, name: str, signer: str) -> bool:
    """Return whether an entry of a bundle names this key as a signer."""
    if not name.endswith(packing.SUFFIXES):
        return False
    found = retry(store.get, name, limit=packing.MAX_ENTRY)
    with contextlib.suppress(BundleError):  # what is damaged serves nobody
        for packed in bundles.read(found.data if found else b""):
            if signer in signing.named_in(packed.files.get(signature.NAME, b"")):
                return True
    return False
