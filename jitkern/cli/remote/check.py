"""Check a remote: whether it is there, may be used, holds something for this machine, and for whom.

Each problem comes with a remedy. Exit code 1 if there is a problem.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
from collections.abc import Iterator
from dataclasses import asdict

from jitkern import config, remote
from jitkern.cache_tools import bundle as packing, signing
from jitkern.cache_tools.check import Check
from jitkern.cli.output import (
    GREEN,
    RED,
    YELLOW,
    counted,
    human_age,
    human_bytes,
    print_json,
    styled,
)
from jitkern.cli.remote.connection import connected, machines_of, trouble, url_of
from jitkern.errors import JitkernError
from jitkern.files import signature
from jitkern.remote import layout
from jitkern.remote.conditions import probe, read_index
from jitkern.remote.index import Bundle, Index
from jitkern.remote.store import Readable, Store, Unavailable

_TRIES = 3


def configure(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]
    """Add the command `check`."""
    parser = commands.add_parser(
        "check", help="whether a remote works, and what to do if not", description=__doc__,
        parents=[shared],
    )  # fmt: skip
    parser.add_argument(
        "url", nargs="?", metavar="URL", help="default: the first of JITKERN_REMOTE"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="also write, to see whether the store honours conditions, as `push` needs it",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    url = url_of(args.url)
    checks = []
    with connected(url, patience=0) as store:
        checks += [_trust(url), *_reached(url, store)]
        if all(check.ok for check in checks[1:]):
            checks += _looked_at(store)
        if args.write:
            checks.append(_conditions(url, store))
    ok = all(check.ok for check in checks)
    if args.json:
        print_json(url=store.url, ok=ok, checks=[asdict(check) for check in checks])
        return 0 if ok else 1
    for check in checks:
        color = GREEN if check.ok and not check.remedy else YELLOW if check.ok else RED
        print(f"{styled(check.name, color)}: {check.value}")
        if check.remedy:
            print(f"  {check.remedy}")
    return 0 if ok else 1


def _trust(url: str) -> Check:
    try:
        keys = remote.trust.keys_for(url, config.current())
    except JitkernError as e:
        text, _, remedy = str(e).partition(". ")
        return Check("trust", ok=False, value=text, remedy=remedy)
    told = "the URL is trusted, and entries need no signature"
    if keys:
        told = f"entries are used if one of {counted(len(keys), 'trusted key')} signed them"
    return Check("trust", ok=True, value=told)


def _reached(url: str, store: Readable) -> Iterator[Check]:
    """Yield whether the remote answers, and whether it is one."""
    seconds = []
    try:
        for _ in range(_TRIES):
            started = time.perf_counter()
            root = store.get(layout.ROOT, limit=1 << 16)
            seconds.append(time.perf_counter() - started)
        if root is None and isinstance(store, Store):
            next(iter(store.list("")), None)  # a missing bucket answers as a missing object does
    except Unavailable as e:
        remedy = "see that the bucket exists, and which endpoint and credentials are set"
        yield Check("answer", ok=False, value=trouble(url, e), remedy=remedy)
        return
    yield Check("answer", ok=True, value=f"{min(seconds) * 1000:.3g} ms for a small object")
    if root is None:
        remedy = f"jitkern remote push --to {store.url} --key FILE"
        value = f"there is no {layout.ROOT}: nothing was pushed here yet"
        yield Check("content", ok=False, value=value, remedy=remedy)
    elif root.data.strip() != layout.ROOT_CONTENT:
        value = f"{layout.ROOT} is not as this jitkern writes it: {root.data[:40]!r}"
        yield Check("content", ok=False, value=value, remedy="name another URL, or upgrade jitkern")


def _looked_at(store: Readable) -> Iterator[Check]:
    """Yield what there is for this machine, how old it is, and who signed it."""
    machines, found = machines_of([]), 0
    for machine in machines:
        try:
            index, _ = read_index(store, machine)
            if index is None:
                continue
            found += 1
            yield Check(machine, ok=True, value=_told(store, machine, index))
            if index.bundles:
                yield _signers(store, machine, min(index.bundles, key=lambda b: b.bytes))
        except (JitkernError, Unavailable) as e:
            remedy = "jitkern remote prune, or push again"
            yield Check(machine, ok=False, value=str(e), remedy=remedy)
    if not found:
        value = f"no index for {' or '.join(machines)}"
        remedy = "prewarm for one of these targets, and push"
        yield Check("content", ok=False, value=value, remedy=remedy)


def _told(store: Readable, machine: str, index: Index) -> str:
    entries = {digest for bundle in index.bundles for digest in bundle.entries}
    size = human_bytes(sum(bundle.bytes for bundle in index.bundles))
    told = f"{counted(len(entries), 'entry')} in {counted(len(index.bundles), 'bundle')}, {size}"
    if index.loose:
        told += ", and large entries by themselves"
    with contextlib.suppress(Unavailable):
        there = store.stat(layout.index_of(machine)) if isinstance(store, Store) else None
        if there:
            told += f"; written {human_age(max(0.0, time.time() - there.modified))} ago"
    return told


def _signers(store: Readable, machine: str, bundle: Bundle) -> Check:
    """Return who signed the smallest bundle of a machine, and whether that serves here."""
    name = layout.bundle_of(machine, bundle.file)
    found = store.get(name, limit=2 * layout.LARGEST_BUNDLE)
    if found is None:
        remedy = "jitkern remote prune, and push again"
        return Check("bundle", ok=False, value=f"{name} is named and missing", remedy=remedy)
    compressed = bundle.file.endswith(".zst")
    try:
        keys = [
            signing.signers(packed.manifest.encode(), packed.files.get(signature.NAME, b""))
            for packed in packing.read(io.BytesIO(found.data), compressed=compressed)
        ]
    except JitkernError as e:
        return Check("bundle", ok=False, value=f"{name}: {e}", remedy="push again")
    common = sorted(set.intersection(*map(set, keys)))
    value = f"{bundle.package}: signed by {', '.join(common) or 'nobody'}"
    with contextlib.suppress(JitkernError):
        trusted = remote.trust.keys_for(store.url, config.current())
        if trusted and not set(trusted) & set(common):
            remedy = "push with a key whose public key is in `trusted_keys`, or add this key there"
            return Check("signature", ok=False, value=value, remedy=remedy)
    return Check("signature", ok=True, value=value)


def _conditions(url: str, store: Readable) -> Check:
    if not isinstance(store, Store):
        return Check("writing", ok=False, value=f"{store.url} can only be read", remedy="")
    try:
        problem = probe(store)
    except Unavailable as e:
        problem = trouble(url, e)
    if problem:
        remedy = "push to a store that honours If-None-Match and If-Match"
        return Check("writing", ok=False, value=problem, remedy=remedy)
    return Check("writing", ok=True, value="conditional writes are honoured")
