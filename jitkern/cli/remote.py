"""Fill a remote with kernels, take kernels from it, and list what it holds.

A remote is a bucket, a directory or a web server, named by a URL: by default the first of the
setting `remote`. Credentials and endpoints of buckets come from AWS_*, GOOGLE_* and AZURE_*.
"""

from __future__ import annotations

import argparse
import sys
import time

from jitkern import cache_tools, config, remote
from jitkern.cache_tools.check import counted, human_age, human_bytes
from jitkern.cli.connection import connected, machines_of, url_of, writable
from jitkern.cli.filters import add_filters, named, opened, wanted
from jitkern.cli.output import print_json, print_table, say
from jitkern.cli.parser import UsageError, at_least_one, take_key, take_targets
from jitkern.config import values
from jitkern.errors import JitkernError
from jitkern.remote import layout
from jitkern.remote.index import read_index
from jitkern.remote.patience import retry
from jitkern.remote.publish import KEEP, Pushed
from jitkern.remote.store import Store

_SHORT = 12  # digits of a bundle's name


def configure(parser: argparse.ArgumentParser, shared: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    text = "sign entries and upload them, as one bundle for each package and machine"
    push = commands.add_parser("push", help=text, description=text, parents=[shared])
    add_filters(push)
    push.add_argument(
        "--to", "--url", dest="url", metavar="URL",
        help="s3://…, gs://…, az://… or file:///… (default: the first of JITKERN_REMOTE)",
    )  # fmt: skip
    signing = push.add_mutually_exclusive_group()
    take_key(signing, "a private key (default: the setting sign_key)")
    signing.add_argument(
        "--unsigned",
        action="store_true",
        help="push without a signature; machines need the URL in `trusted_remotes` to use it",
    )
    push.add_argument(
        "--keep", type=at_least_one, default=KEEP, metavar="N",
        help=f"pushes of a package to keep in the index (default: {KEEP})",
    )  # fmt: skip
    push.set_defaults(run=run_push)
    text = "download the entries for this machine into the cache, e.g. in an init container"
    pull = commands.add_parser("pull", help=text, description=text, parents=[shared])
    pull.add_argument("packages", nargs="*", metavar="PACKAGE", help="only these packages")
    take_targets(pull, "for this target; may be repeated (default: the targets of this machine)")
    pull.add_argument(
        "--from", "--url", dest="url", metavar="URL",
        help="of the remote (default: the first of JITKERN_REMOTE)",
    )  # fmt: skip
    pull.set_defaults(run=run_pull)
    text = "list the bundles in the indexes (of a web server, only those for this machine)"
    listing = commands.add_parser("ls", help=text, description=text, parents=[shared])
    listing.add_argument(
        "url", nargs="?", metavar="URL", help="default: the first of JITKERN_REMOTE"
    )
    listing.set_defaults(run=run_ls)


def run_push(args: argparse.Namespace) -> int:
    url = url_of(args.url)
    cache = opened()
    key = None if args.unsigned else args.key or config.current().sign_key
    with connected(url) as readable:
        store = writable(readable)
        chosen = named(args, cache_tools.chosen(cache, wanted(args)))
        done = remote.publish.push(
            cache, chosen, store, key=key, unsigned=args.unsigned, keep=args.keep,
            tell=_teller(args),
        )  # fmt: skip
    for pushed in done if args.level >= 0 and not args.json else ():
        _print_pushed(pushed)
    sent = sum(pushed.uploaded for pushed in done)
    print(f"{human_bytes(sent)} sent to {store.url}", file=sys.stderr)
    if args.json:
        machines = [
            {
                "machine": pushed.machine,
                "bundles": [bundle._asdict() for bundle in pushed.bundles],
                "uploaded": pushed.uploaded,
                "dropped": [bundle.file for bundle in pushed.dropped],
            }
            for pushed in done
        ]
        print_json(url=store.url, machines=machines, uploaded=sent, signed=not args.unsigned)
    return 0


def run_pull(args: argparse.Namespace) -> int:
    for name in map(values.without_password, args.packages):
        if "://" in name:
            raise UsageError(f"`{name}` is not a package; did you mean --from {name}?")
    url = url_of(args.url)
    keys = remote.trust.keys_for(url, config.current())
    with connected(url) as store:
        done = remote.pull.pull(
            opened(new=True), store, machines_of(args.target), keys, packages=args.packages,
            tell=_teller(args),
        )  # fmt: skip
    for line in (*done.failed, *(f"{name} is gone, and left out" for name in done.gone)):
        say(line)
    print(
        f"{counted(done.new, 'entry')} added from {counted(done.bundles, 'object')}, "
        f"{human_bytes(done.bytes)}; {done.present} were already there",
        file=sys.stderr,
    )
    nothing = not (done.new or done.present or done.failed)
    if nothing:
        say(f"{store.url} has no entries for {', '.join(machines_of(args.target))}")
    if args.json:
        print_json(url=store.url, **done._asdict(), signed=bool(keys))
    return 1 if done.failed or nothing else 0


def run_ls(args: argparse.Namespace) -> int:
    with connected(url_of(args.url)) as store:
        listed = retry(lambda: [*store.list("")]) if isinstance(store, Store) else []
        objects = {found.name: found for found in listed}
        machines = layout.machines_in(objects) if objects else machines_of([])
        indexes = {machine: read_index(store, machine)[0] for machine in machines}
        if not any(indexes.values()) and retry(store.get, layout.ROOT, limit=1 << 16) is None:
            raise JitkernError(
                f"{store.url} has no {layout.ROOT}, so nothing was pushed there yet: check bucket "
                "and path of the URL; `jitkern remote push` fills it"
            )
    rows, now = [], time.time()
    for machine, index in indexes.items():
        for bundle in index.bundles if index else ():
            found = objects.get(layout.bundle_of(machine, bundle.file))
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


def _teller(args: argparse.Namespace):  # type: ignore[no-untyped-def]  # noqa: ANN202
    """Return what prints a line of progress: always with -v, and else on a terminal."""
    silent = args.level < 0 or not (args.level > 0 or sys.stderr.isatty())
    return (lambda _: None) if silent else lambda text: print(text, file=sys.stderr, flush=True)


def _print_pushed(pushed: Pushed) -> None:
    for bundle in pushed.bundles:
        version = f" {bundle.version}" if bundle.version else ""
        print(
            f"{pushed.machine}  {bundle.package}{version}  "
            f"{counted(len(bundle.entries), 'entry')}  {human_bytes(bundle.bytes)}"
        )
    for bundle in pushed.dropped:
        print(
            f"{pushed.machine}: the index no longer names {bundle.file[:12]}…, an older bundle of "
            f"{bundle.package}",
            file=sys.stderr,
        )
