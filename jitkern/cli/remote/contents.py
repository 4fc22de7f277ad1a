"""Show what a remote holds, and remove what no machine needs any more."""

from __future__ import annotations

import argparse
import sys
import time

from jitkern import remote
from jitkern.cache_tools.check import counted, human_age, human_bytes
from jitkern.cli.connection import (
    check_filled,
    connected,
    machines_of,
    url_of,
    writable,
)
from jitkern.cli.output import agreed, print_json, print_table
from jitkern.cli.parser import at_least_one
from jitkern.config import values
from jitkern.errors import SettingError
from jitkern.remote.index import read_index
from jitkern.remote.patience import retry
from jitkern.remote.prune import Pruned
from jitkern.remote.publish import KEEP
from jitkern.remote.store import Store

_SHORT = 12  # digits of a bundle's name


def configure(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]
    """Add the commands `ls` and `prune`."""
    text = "list the bundles in the indexes (of a web server, only those for this machine)"
    listing = commands.add_parser("ls", help=text, description=text, parents=[shared])
    listing.set_defaults(run=run_ls)
    text = (
        "drop old pushes from the indexes, and delete unused bundles that are older than a day by "
        "the store's clock"
    )
    prune = commands.add_parser("prune", help=text, description=text, parents=[shared])
    prune.set_defaults(run=run_prune)
    for parser in (listing, prune):
        parser.add_argument(
            "url", nargs="?", metavar="URL", help="default: the first of JITKERN_REMOTE"
        )
    prune.add_argument(
        "--keep", type=at_least_one, default=KEEP, metavar="N",
        help=f"pushes of a package to keep in an index (default: {KEEP})",
    )  # fmt: skip
    prune.add_argument(
        "--signed-by", type=_key, metavar="KEY",
        help="drop what this public key signed, e.g. because the private key was lost",
    )  # fmt: skip
    prune.add_argument("--dry-run", action="store_true", help="only list what would be removed")
    prune.add_argument("--yes", action="store_true", help="do not ask")


def run_ls(args: argparse.Namespace) -> int:
    with connected(url_of(args.url)) as store:
        check_filled(store)
        listed = retry(lambda: [*store.list("")]) if isinstance(store, Store) else []
        objects = {found.name: found for found in listed}
        machines = remote.prune.machines_of(objects) if objects else machines_of([])
        indexes = {machine: read_index(store, machine)[0] for machine in machines}
    rows, now = [], time.time()
    for machine, index in indexes.items():
        for bundle in index.bundles if index else ():
            found = objects.get(remote.layout.bundle_of(machine, bundle.file))
            age = None if found is None else now - found.modified
            rows.append({"machine": machine, **bundle._asdict(), "age_s": age})
    if args.json:
        print_json(url=store.url, bundles=rows)
        return 0
    whole = args.level > 0
    print_table(
        ("machine", "package", "version", "entries", "size", "age", "bundle"),
        [
            (
                row["machine"], row["package"], row["version"], len(row["entries"]),
                human_bytes(row["bytes"]), "" if row["age_s"] is None else human_age(row["age_s"]),
                row["file"] if whole else row["file"][:_SHORT],
            )
            for row in rows
        ],
        whole=whole,
    )  # fmt: skip
    if args.level >= 0:
        size = human_bytes(sum(row["bytes"] for row in rows))
        print(f"{counted(len(rows), 'bundle')}, {size}, in {store.url}", file=sys.stderr)
    return 0


def run_prune(args: argparse.Namespace) -> int:
    with connected(url_of(args.url)) as readable:
        store = writable(readable)
        check_filled(store)

        def prune(*, dry_run: bool) -> Pruned:
            return remote.prune.prune(
                store, keep=args.keep, signer=args.signed_by or "", dry_run=dry_run
            )

        plan = prune(dry_run=True)
        asks = (plan.dropped or plan.deleted) and not (args.yes or args.dry_run)
        if asks and (refused := agreed(f"remove {_told(plan)}, of {store.url}")):
            return refused
        done = plan if args.dry_run else prune(dry_run=False)
    verb = "would be removed" if args.dry_run else "removed"
    print(f"{_told(done)} {verb}, of {store.url}", file=sys.stderr)
    if args.json:
        deleted = [found._asdict() for found in done.deleted]
        print_json(url=store.url, dropped=done.dropped, deleted=deleted, dry_run=args.dry_run)
    else:
        for name in done.dropped:
            print(f"dropped  {name}")
        for found in done.deleted:
            print(f"deleted  {found.name}")
    return 0


def _told(done: Pruned) -> str:
    size = human_bytes(sum(found.bytes for found in done.deleted))
    return (
        f"{counted(len(done.dropped), 'bundle')} from indexes, and "
        f"{counted(len(done.deleted), 'object')} with {size}"
    )


def _key(text: str) -> str:
    """Return the base64 of a public key: a line of a .pub file, or its base64 alone."""
    try:
        return values.keys([text])[0]
    except (ValueError, SettingError) as e:
        raise argparse.ArgumentTypeError(str(e)) from None
