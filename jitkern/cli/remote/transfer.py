"""Carry entries to a remote, and from a remote."""

from __future__ import annotations

import argparse
import sys

from jitkern import cache_tools, config, remote
from jitkern.cache_tools.check import counted, human_bytes
from jitkern.cli.connection import connected, machines_of, url_of, writable
from jitkern.cli.filters import add_filters, named, opened, wanted
from jitkern.cli.output import print_json, say
from jitkern.cli.parser import UsageError, at_least_one, take_key, take_targets
from jitkern.config import values
from jitkern.remote.publish import KEEP, Pushed


def configure(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]
    """Add the commands `push` and `pull`."""
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
