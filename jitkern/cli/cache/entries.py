"""Show the entries of a cache, whether they are damaged, and what takes the space."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from jitkern import cache_tools, config
from jitkern.cache_tools import Row
from jitkern.cache_tools.check import counted, human_age, human_bytes
from jitkern.cli.explain import SHORT, explain_entries, found
from jitkern.cli.filters import add_filters, named, opened, wanted
from jitkern.cli.output import on_screen, print_json, print_table
from jitkern.cli.parser import UsageError

MOST = 8  # targets and ops whose sizes are listed, and entries that one text names


def configure(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]
    """Add the commands `dir`, `ls`, `show`, `explain`, `verify` and `stats`."""

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Any:
        parser = commands.add_parser(name, help=text, description=text, parents=[shared])
        parser.set_defaults(run=run)
        return parser

    add("dir", run_dir, "print the cache directory")
    listing = add("ls", run_ls, "list the entries")
    add_filters(listing)
    listing.add_argument("--damaged", action="store_true", help="only damaged entries")
    listing.add_argument(
        "--sort", choices=tuple(cache_tools.SORTS), default="op",
        help="the largest and the newest first (default: op)",
    )  # fmt: skip
    listing.add_argument("--reverse", action="store_true", help="the other way round")
    listing.add_argument("--limit", type=_count, metavar="N", help="only the first N")
    show = add("show", run_show, "print the manifest of an entry: every input of its key")
    show.add_argument("entry", help="the beginning of a digest, or an op or variant of one entry")
    verify = add(
        "verify", run_verify, "compare the hash of every file with its manifest; 1 on any damage"
    )
    add_filters(verify)
    explain = add(
        "explain", explain_entries, "print which inputs differ between an entry and the nearest one"
    )
    explain.add_argument("op", metavar="KEY", help="the beginning of a digest, an op, or a variant")
    stats = add("stats", run_stats, "the number of entries, and what takes the space")
    add_filters(stats)


def run_dir(args: argparse.Namespace) -> int:
    root = str(config.current().cache_dir)
    print_json(path=root) if args.json else print(root)
    return 0


def run_ls(args: argparse.Namespace) -> int:
    rows = named(args, cache_tools.rows(
        opened(), wanted(args, problem=args.damaged), verify="always" if args.damaged else "size",
        sort=args.sort, reverse=args.reverse, limit=args.limit,
    ))  # fmt: skip
    if args.json:
        _print_rows(rows)
        return 0
    whole = args.level > 0
    age = ["age"] if whole else []
    header = ("digest", "op", "variant", "target", "kind", "size", "used", *age, "")
    cells = [
        (
            row.path.rpartition("-")[2][: None if whole else SHORT],
            row.op.removeprefix("jitkern::") or "damaged",
            row.variant,
            row.target if whole else row.target.partition("-")[2].partition("-linux_")[0],
            row.kind,
            human_bytes(row.bytes),
            human_age(row.used_s),
            *([human_age(row.age_s)] if whole else []),
            row.problem,
        )
        for row in rows
    ]
    shown, rest = on_screen(cells, whole=args.level != 0)
    print_table(header, shown, whole=whole)
    if args.level >= 0:
        total = human_bytes(sum(row.bytes for row in rows))
        where = config.current().cache_dir
        print(f"{counted(len(rows), 'entry')}, {total}, in {where}{rest}", file=sys.stderr)
    return 0


def run_show(args: argparse.Namespace) -> int:
    matches = found(args.entry)
    names = {f"{row.target}/{entry.path.name}": None for row, entry in matches}  # in several layers
    if len(names) > 1:
        ops = {row.op for row, _ in matches}
        option = f" --op {ops.pop().removeprefix('jitkern::')}" if len(ops) == 1 else ""
        raise UsageError(
            "\n  ".join([f"`{args.entry}` names {len(names)} entries:", *list(names)[:MOST]])
            + f"\n  and {len(names) - MOST} more" * (len(names) > MOST)
            + "\nname one of them by its digest, the digits after the last `-`; "
            f"`jitkern cache ls{option}` prints all"
        )
    if args.json:
        print_json(
            entries=[{**asdict(row), "manifest": entry.manifest.fields()} for row, entry in matches]
        )
        return 0
    for row, entry in matches:
        print(row.path)
        print(json.dumps(entry.manifest.fields(), indent=2))
    return 0


def run_verify(args: argparse.Namespace) -> int:
    rows = named(args, cache_tools.rows(opened(), wanted(args), verify="always"))
    damaged = [row for row in rows if not row.ok]
    if args.json:
        _print_rows(rows, damaged=len(damaged))
    else:
        for row in damaged:
            print(f"{row.path}: {row.problem}")
        print(
            f"{counted(len(rows), 'entry')}, {len(damaged)} damaged"
            + "; damaged entries are rebuilt at next use" * bool(damaged),
            file=sys.stderr,
        )
    return 1 if damaged else 0


def run_stats(args: argparse.Namespace) -> int:
    cache = opened()
    rows = named(args, cache_tools.rows(cache, wanted(args), verify="none"))
    totals = cache_tools.stats(cache, rows)
    if args.json:
        print_json(totals=totals)
        return 0
    print(f"{'entries':16} {totals['entries']}, {human_bytes(totals['bytes'])}")
    print(f"{'unreadable':16} {totals['damaged']}; `jitkern cache verify` compares every hash")
    for name in ("target", "op"):
        sizes = sorted(totals[f"bytes_by_{name}"].items(), key=lambda item: -item[1])
        print()
        shown = sizes if args.level > 0 else sizes[:MOST]
        print_table((name, "size"), [(what, human_bytes(size)) for what, size in shown])
        if len(sizes) > len(shown):
            print(f"and {len(sizes) - len(shown)} more: -v")
    return 0


def _print_rows(rows: list[Row], **totals: object) -> None:
    print_json(
        entries=[asdict(row) for row in rows],
        totals={"entries": len(rows), "bytes": sum(row.bytes for row in rows), **totals},
    )


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"`{text}` is not a number from 0 up")
    return int(text)
