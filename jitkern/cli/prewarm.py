"""Compile ahead of the first call, for this machine or for any target, with or without its device.

A second run compiles nothing. What this machine cannot build is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from jitkern import config, prewarming
from jitkern.cli.choose import choose_ops, choose_recorded, choose_targets
from jitkern.cli.output import Progress, print_json, print_table
from jitkern.target import EXAMPLE


def configure(parser: argparse.ArgumentParser, _: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="*",
        metavar="WHAT",
        help="an op, a namespace, a package or a module of one (default: all)",
    )
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="T",
        help=f"e.g. {EXAMPLE}; repeatable",
    )
    parser.add_argument(
        "--jobs",
        type=_positive,
        metavar="N",
        help="builds at once (default: from cores and free memory)",
    )
    parser.add_argument("--keep-going", action="store_true", help="go on after a failed build")
    parser.add_argument(
        "--shard",
        type=_shard,
        default=(1, 1),
        metavar="I/N",
        help="build only part I (from 1) of N",
    )
    parser.add_argument(
        "--from",
        dest="recording",
        type=Path,
        metavar="FILE",
        help="build exactly what a recorded run used (see `jitkern record`)",
    )
    parser.add_argument("--refresh", action="store_true", help="compile again what is cached")
    parser.add_argument(
        "--fail-on-miss", action="store_true", help="exit 1 if anything was skipped"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    targets = choose_targets(args.target)
    if args.recording:
        wanted, broken = choose_recorded(args.recording, args.what)
    else:
        ops, broken = choose_ops(args.what)
        wanted = [prewarming.wanted.Wanted(op) for op in ops]
    with Progress() as progress:
        results = prewarming.api.prewarm(
            wanted, targets, shard=args.shard, jobs=args.jobs, keep_going=args.keep_going,
            refresh=args.refresh, progress=progress,
        ) if wanted else []  # fmt: skip
    results += [
        prewarming.tasks.Result(name, "", "", "failed", reason=reason)
        for name, reason in broken.items()
    ]
    count = {
        status: sum(r.status == status for r in results)
        for status in ("built", "hit", "failed", "skipped")
    }
    seconds = round(time.perf_counter() - started, 3)
    if args.json:
        print_json(
            built=count["built"],
            hits=count["hit"],
            failed=count["failed"],
            skipped=count["skipped"],
            seconds=seconds,
            results=[result._asdict() for result in results],
        )
    else:
        _print(results)
        print(
            f"{count['built']} built, {count['hit']} already there, {count['failed']} failed, "
            f"{count['skipped']} skipped in {seconds:.1f} s, in {config.current().cache_dir}"
        )
    return 1 if count["failed"] or (args.fail_on_miss and count["skipped"]) else 0


def _print(results: list[prewarming.tasks.Result]) -> None:
    rows = [
        (
            r.status,
            r.op,
            r.variant,
            r.target,
            f"{r.seconds:.2f} s" if r.status in ("built", "hit") else "",
        )
        for r in results
    ]
    if rows:
        print_table(("status", "op", "variant", "target", "time"), rows)
    for reason in dict.fromkeys((r.status, r.reason) for r in results if r.reason):
        print(f"{reason[0]}: {reason[1]}", file=sys.stderr)


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"`{text}` is not a number from 1 up")
    return int(text)


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"`{text}` is not I/N with I from 1 to N")
    return int(part), int(parts)
