"""Check what can be read of a remote: reachable, laid out by jitkern, of use here, and trusted."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Iterator

from jitkern import config
from jitkern.cache_tools import bundle as bundles
from jitkern.cache_tools.check import Check, human_bytes
from jitkern.errors import JitkernError, SettingError
from jitkern.files import signature
from jitkern.remote import layout, trust
from jitkern.remote.index import Bundle, Index
from jitkern.remote.patience import Breaker, Patience
from jitkern.remote.store import Object, Readable, Refused, Service, Unavailable, opened, shown

PUSH = "jitkern remote push"
_ZSTD = ".zst"


def read_half(url: str, machines: Iterable[str]) -> Iterator[Check]:
    """Yield the checks of a remote that need no right to write.

    machines: those whose indexes should be there, e.g. of this process's targets. Raises nothing.
    """
    name = f"remote {shown(url)}"
    try:
        store = opened(url)
    except JitkernError as e:
        yield Check(name, ok=False, value=str(e), remedy=getattr(e, "remedy", "") or "see above")
        return
    try:
        keys = trust.keys_for(url, config.current())
    except SettingError as e:
        reason, _, remedy = str(e).partition(": ")
        yield Check(f"{name}, trust", ok=False, value=reason, remedy=remedy)
        keys = ()
    else:
        value = (
            f"entries that one of {len(keys)} trusted keys has signed" if keys
            else "every entry: `trusted_remotes` lists it"
        )  # fmt: skip
        yield Check(f"{name}, trust", ok=True, value=value)
    try:
        yield from _reachable(name, store)
        for machine in machines:
            yield from _machine(name, store, machine, keys)
    except Refused as e:
        remedy = "check the credentials, and `remote_token_file` of the settings"
        yield Check(name, ok=False, value=f"it refuses this client: {e}", remedy=remedy)
    except Unavailable as e:
        remedy = "check the URL and the network; until then, misses are compiled here"
        yield Check(name, ok=False, value=str(e), remedy=remedy)


def _reachable(name: str, store: Readable) -> Iterator[Check]:
    begin = time.perf_counter()
    root = _get(store, layout.ROOT, 1 << 16)
    latency = f"answers in {1000 * (time.perf_counter() - begin):.0f} ms"
    if isinstance(store, Service) and store.builds:
        yield Check(name, ok=True, value=f"{latency}, and builds what is missing")
    elif root is None:
        value = f"{latency}, but has no {layout.ROOT}"
        remedy = f"check bucket and path of the URL; if nothing was ever pushed there: {PUSH}"
        yield Check(name, ok=False, value=value, remedy=remedy)
    elif root.data != layout.ROOT_CONTENT:
        value = f"{latency}, but its {layout.ROOT} is not one of this version"
        yield Check(name, ok=False, value=value, remedy="check the URL, or update jitkern")
    else:
        yield Check(name, ok=True, value=latency)


def _machine(name: str, store: Readable, machine: str, keys: tuple[str, ...]) -> Iterator[Check]:
    """Yield the checks of a machine's index, and of the signatures in its smallest bundle."""
    name = f"{name}, {machine}"
    found = _get(store, layout.index_of(machine), layout.LARGEST_INDEX)
    if found is None:
        yield Check(name, ok=True, value="nothing for this machine", remedy=PUSH)
        return
    try:
        index = Index.decode(found.data)
    except ValueError as e:
        yield Check(name, ok=False, value=f"its index is not usable: {e}", remedy=PUSH)
        return
    entries = {entry for bundle in index.bundles for entry in bundle.entries}
    size = human_bytes(sum(bundle.bytes for bundle in index.bundles))
    value = f"{len(entries)} entries in {len(index.bundles)} bundles, {size}"
    yield Check(name, ok=True, value=value)
    if index.bundles:
        smallest = min(index.bundles, key=lambda bundle: bundle.bytes)
        yield _signers(name, store, machine, smallest, keys)


def _signers(
    name: str, store: Readable, machine: str, bundle: Bundle, keys: tuple[str, ...]
) -> Check:
    name = f"{name}, {bundle.package}"
    limit = min(bundle.bytes, layout.LARGEST_BUNDLE)
    found = _get(store, layout.bundle_of(machine, bundle.file), limit)
    if found is None:
        value = f"the index names {bundle.file}, and it is gone"
        return Check(name, ok=False, value=value, remedy=PUSH)
    signers: set[str] = set()
    try:
        file = io.BytesIO(found.data)
        for packed in bundles.read(file, compressed=bundle.file.endswith(_ZSTD), keys=keys):
            lines = packed.files.get(signature.NAME, b"").decode("ascii", "replace").splitlines()
            signers |= {line.split(" ")[1] for line in lines if line.count(" ") == 2}
    except JitkernError as e:
        remedy = "push again with a key that `trusted_keys` lists, or add its public key there"
        return Check(name, ok=False, value=f"{bundle.file} is refused: {e}", remedy=remedy)
    text = ", ".join(sorted(signers))
    return Check(name, ok=True, value=f"signed by {text}" if text else "not signed")


def _get(store: Readable, name: str, limit: int) -> Object | None:
    """Return an object; a check has a breaker of its own. Raises Unavailable."""
    settings = config.current()
    patience = Patience(Breaker(store.url, None), settings.remote_budget)
    return patience.ask(lambda: store.get(name, limit=limit), settings.remote_timeout)
