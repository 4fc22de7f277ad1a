"""Show what a remote holds."""

from __future__ import annotations

import argparse
import sys
import time

from jitkern import remote
from jitkern.cache_tools.check import counted, human_age, human_bytes
from jitkern.cli.connection import check_filled, connected, machines_of, url_of
from jitkern.cli.output import print_json, print_table
from jitkern.remote.index import read_index
from jitkern.remote.patience import retry
from jitkern.remote.store import Store

_SHORT = 12  # digits of a bundle's name


def configure(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]
    """Add the command `ls`."""
    text = "list the bundles in the indexes (of a web server, only those for this machine)"
    parser = commands.add_parser("ls", help=text, description=text, parents=[shared])
    parser.add_argument(
        "url", nargs="?", metavar="URL", help="default: the first of JITKERN_REMOTE"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with connected(url_of(args.url)) as store:
        check_filled(store)
        listed = retry(lambda: [*store.list("")]) if isinstance(store, Store) else []
        objects = {found.name: found for found in listed}
        machines = remote.layout.machines_in(objects) if objects else machines_of([])
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
