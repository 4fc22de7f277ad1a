"""Look at the cache directory and clean it. Loads no Torch."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from jitkern import cache_tools, config
from jitkern.cache import Cache
from jitkern.cache_tools import Row
from jitkern.cli.output import human_age, human_bytes, print_json, print_table
from jitkern.errors import CacheError


def configure(parser: argparse.ArgumentParser, shared: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    where = commands.add_parser("dir", help="print the cache directory", parents=[shared])
    where.set_defaults(run=run_dir)
    listing = commands.add_parser("ls", help="list the entries", parents=[shared])
    listing.add_argument("--op", help="only this op")
    listing.add_argument("--target", help="only this target")
    listing.add_argument("--json", action="store_true", help="print one JSON object")
    listing.set_defaults(run=run_ls)
    show = commands.add_parser(
        "show", help="print the manifest of an entry: every input of its key", parents=[shared]
    )
    show.add_argument("entry", help="part of an entry's name, or the beginning of its digest")
    show.add_argument("--json", action="store_true", help="print one JSON object")
    show.set_defaults(run=run_show)
    clear = commands.add_parser("clear", help="remove entries (default: all)", parents=[shared])
    clear.add_argument("--op", help="only this op")
    clear.add_argument("--target", help="only this target")
    clear.add_argument("--dry-run", action="store_true", help="only say what would go")
    clear.add_argument("--yes", action="store_true", help="do not ask")
    clear.set_defaults(run=run_clear)


def run_dir(_: argparse.Namespace) -> int:
    print(config.current().cache_dir)
    return 0


def run_ls(args: argparse.Namespace) -> int:
    rows = _chosen(args)
    total = sum(row.bytes for row in rows)
    if args.json:
        print_json(
            entries=[asdict(row) for row in rows], totals={"entries": len(rows), "bytes": total}
        )
        return 0
    cells = [
        (
            r.op or "damaged",
            r.variant,
            r.target,
            human_bytes(r.bytes),
            human_age(r.age_s),
            r.problem or r.compiler,
        )
        for r in rows
    ]
    print_table(("op", "variant", "target", "size", "age", "compiler"), cells)
    print(
        f"{len(rows)} entries, {human_bytes(total)}, in {config.current().cache_dir}",
        file=sys.stderr,
    )
    return 0


def run_show(args: argparse.Namespace) -> int:
    found = cache_tools.find(Cache.open(config.current()), args.entry)
    if not found:
        print(
            f"jitkern: no entry of {config.current().cache_dir} matches `{args.entry}`",
            file=sys.stderr,
        )
        return 1
    if args.json:
        print_json(
            entries=[{**asdict(row), "manifest": entry.manifest.fields()} for row, entry in found]
        )
        return 0
    for row, entry in found:
        print(row.path)
        print(json.dumps(entry.manifest.fields(), indent=2))
    return 0


def run_clear(args: argparse.Namespace) -> int:
    mine = config.current().cache_dir  # never what a read-only layer holds
    rows = [row for row in _chosen(args) if Path(row.path).is_relative_to(mine)]
    total = sum(row.bytes for row in rows)
    what = f"{len(rows)} entries, {human_bytes(total)}, of {config.current().cache_dir}"
    if args.dry_run:
        for row in rows:
            print(row.path)
        print(f"would remove {what}", file=sys.stderr)
        return 0
    if not args.yes:
        if not sys.stdin.isatty():
            print(f"jitkern: to remove {what}, say --yes", file=sys.stderr)
            return 2
        print(f"Remove {what}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return 1
    freed = cache_tools.clear(Cache.open(config.current()), rows)
    print(f"removed {what}; {human_bytes(freed)} freed", file=sys.stderr)
    return 0


def _chosen(args: argparse.Namespace) -> list[Row]:
    root = config.current().cache_dir
    if root.exists() and not root.is_dir():
        raise CacheError(f"the cache {root} is a file; remove it, or name a directory")
    rows = cache_tools.rows(Cache.open(config.current()))
    wanted = {args.op, f"jitkern::{args.op}"} if args.op else set()
    return [
        r
        for r in rows
        if (not wanted or r.op in wanted) and (not args.target or r.target == args.target)
    ]
