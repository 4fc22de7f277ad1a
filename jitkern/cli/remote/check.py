"""Check a remote: whether it is there, may be used, holds something for this machine, and for whom.

Each problem comes with a remedy. Exit code 1 if there is a problem.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from jitkern import remote
from jitkern.cli.connection import machines_of, url_of
from jitkern.cli.output import GREEN, RED, YELLOW, print_json, styled
from jitkern.remote.store import shown


def configure(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]
    """Add the command `check`."""
    parser = commands.add_parser(
        "check", help="check that a remote works, and print a remedy if not", description=__doc__,
        parents=[shared],
    )  # fmt: skip
    parser.add_argument(
        "url", nargs="?", metavar="URL", help="default: the first of JITKERN_REMOTE"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="also check that the store supports conditional writes, which `push` needs",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    url = url_of(args.url)
    checks = [*remote.check.read_half(url, machines_of([]))]
    if args.write:
        checks.append(remote.check.write_half(url))
    ok = all(check.ok for check in checks)
    if args.json:
        print_json(url=shown(url), ok=ok, checks=[asdict(check) for check in checks])
        return 0 if ok else 1
    named = f"remote {shown(url)}"
    for check in checks:
        name = check.name.removeprefix(f"{named}, ")
        color = GREEN if check.ok and not check.remedy else YELLOW if check.ok else RED
        print(f"{styled(name, color)}: {check.value}")
        if check.remedy:
            print(f"  {check.remedy}")
    return 0 if ok else 1
