"""Check a remote: reachable, laid out by jitkern, of use here, trusted, and fit to be pushed to."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from jitkern import config
from jitkern.cache_tools.check import Check, counted, human_age, human_bytes
from jitkern.errors import JitkernError, SettingError
from jitkern.remote import bundles, layout, trust
from jitkern.remote.index import Bundle, Index
from jitkern.remote.opening import opened
from jitkern.remote.patience import run_with_timeout
from jitkern.remote.publish import probe
from jitkern.remote.store import Object, Readable, Service, Store, Unavailable, shown

PUSH = "jitkern remote push"


def read_half(url: str, machines: Iterable[str]) -> Iterator[Check]:
    """Yield the checks of a remote that need no right to write. Raises nothing.

    machines: those whose indexes should be there, e.g. of this process's targets.
    """
    name = f"remote {shown(url)}"
    try:
        store = opened(url)
    except JitkernError as e:
        yield Check(name, ok=False, value=str(e), remedy=getattr(e, "remedy", "") or "see above")
        return
    keys: tuple[str, ...] = ()
    try:
        keys = trust.keys_for(url, config.current())
    except SettingError as e:
        reason, _, remedy = str(e).partition(": ")
        yield Check(f"{name}, trust", ok=False, value=reason, remedy=remedy)
    else:
        value = (
            f"entries that one of {len(keys)} trusted keys has signed" if keys
            else "every entry: `trusted_remotes` lists it"
        )  # fmt: skip
        yield Check(f"{name}, trust", ok=True, value=value)
    try:
        yield _reached(name, store)
        yield from _content(name, store, list(machines), keys)
    except Unavailable as e:
        yield _unavailable(name, e)


def write_half(url: str) -> Check:
    """Return whether a remote can be pushed to, by writing. Raises JitkernError for no remote."""
    store, name = opened(url), f"remote {shown(url)}, writing"
    if not isinstance(store, Store):
        remedy = "push to the bucket or directory behind it"
        return Check(name, ok=False, value="it is read-only", remedy=remedy)
    try:
        problem = probe(store)
    except Unavailable as e:
        return _unavailable(name, e)
    if problem:
        remedy = "push to a store that honours If-None-Match and If-Match"
        return Check(name, ok=False, value=problem, remedy=remedy)
    return Check(name, ok=True, value="conditional writes are honoured")


def _unavailable(name: str, e: Unavailable) -> Check:
    return Check(name, ok=False, value=f"{e.meaning}: {e}", remedy=e.remedy)


def _reached(name: str, store: Readable) -> Check:
    """Return whether there is a remote. Raises Unavailable."""
    begin = time.perf_counter()
    root = _get(store, layout.ROOT, 1 << 16)
    latency = f"answers in {1000 * (time.perf_counter() - begin):.0f} ms"
    if _builds(store):
        return Check(name, ok=True, value=f"{latency}, and builds what is missing")
    if root is None:
        if isinstance(store, Store):  # a missing bucket answers as a missing object does
            run_with_timeout(
                config.current().remote_timeout, lambda: next(iter(store.list("")), None)
            )
        value = f"{latency}, but has no {layout.ROOT}: nothing was pushed here yet"
        remedy = f"check bucket and path of the URL; to fill it: {PUSH}"
        return Check(name, ok=False, value=value, remedy=remedy)
    if root.data.strip() != layout.ROOT_CONTENT:
        value = f"{latency}, but its {layout.ROOT} is not one of this version: {root.data[:40]!r}"
        return Check(name, ok=False, value=value, remedy="check the URL, or update jitkern")
    return Check(name, ok=True, value=latency)


def _content(
    name: str, store: Readable, machines: list[str], keys: tuple[str, ...]
) -> Iterator[Check]:
    """Yield the checks of the machines' indexes, and of the signatures in their smallest bundles.

    Raises Unavailable.
    """
    found = {
        machine: _get(store, layout.index_of(machine), layout.LARGEST_INDEX) for machine in machines
    }
    if not any(found.values()) and not _builds(store):
        value = f"it has no entries for {' or '.join(machines)}"
        yield Check(name, ok=False, value=value, remedy=f"prewarm there, and {PUSH}")
    for machine, data in found.items():
        if data is None:
            continue
        title = f"{name}, {machine}"
        try:
            index = Index.decode(data.data)
        except ValueError as e:
            yield Check(title, ok=False, value=f"its index is not usable: {e}", remedy=PUSH)
            continue
        yield Check(title, ok=True, value=_told(store, machine, index))
        if index.bundles:
            smallest = min(index.bundles, key=lambda bundle: bundle.bytes)
            yield _signed(f"{title}, {smallest.package}", store, machine, smallest, keys)


def _told(store: Readable, machine: str, index: Index) -> str:
    entries = {entry for bundle in index.bundles for entry in bundle.entries}
    size = human_bytes(sum(bundle.bytes for bundle in index.bundles))
    told = f"{counted(len(entries), 'entry')} in {counted(len(index.bundles), 'bundle')}, {size}"
    there = store.stat(layout.index_of(machine)) if isinstance(store, Store) else None
    if there:
        told += f"; written {human_age(max(0.0, time.time() - there.modified))} ago"
    return told


def _signed(
    name: str, store: Readable, machine: str, bundle: Bundle, keys: tuple[str, ...]
) -> Check:
    """Return who signed a bundle, and whether that is trusted here."""
    limit = min(bundle.bytes, layout.LARGEST_BUNDLE)
    found = _get(store, layout.bundle_of(machine, bundle.file), limit)
    remedy = f"{PUSH} again"
    try:
        every = [set(packed.signers) for packed in bundles.read(bundles.checked(found, bundle))]
    except JitkernError as e:
        value = f"{bundle.file} is refused: {e}"
        return Check(name, ok=False, value=value, remedy=f"jitkern remote prune, and {remedy}")
    text = ", ".join(sorted(set.intersection(*every)))
    text = f"signed by {text}" if text else "not signed"
    if keys and not all(signers & {*keys} for signers in every):
        remedy += " with a key of `trusted_keys`, or add the signer's public key there"
        return Check(name, ok=False, value=f"{text}, not by a trusted key", remedy=remedy)
    return Check(name, ok=True, value=text)


def _builds(store: Readable) -> bool:
    return isinstance(store, Service) and store.builds


def _get(store: Readable, name: str, limit: int) -> Object | None:
    """Return an object, without a retry. Raises Unavailable."""
    return run_with_timeout(config.current().remote_timeout, lambda: store.get(name, limit=limit))
