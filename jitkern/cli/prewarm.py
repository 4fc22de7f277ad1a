"""Compile ahead of the first call, for this machine or for any target, with or without its device.

A second run compiles nothing. What this machine cannot build is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern import config, op as room, prewarm
from jitkern.cli.choose import choose_ops, choose_recorded, choose_targets
from jitkern.cli.output import Progress, print_json, print_table
from jitkern.compilers import parallelism
from jitkern.source.kinds import Extension
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.op.op import Op
    from jitkern.prewarm.tasks import Group, Result

_CUDA = "cuda-sm_90-cu130-torch2.11.0"


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
        help=f"e.g. {_CUDA}; repeatable",
    )
    parser.add_argument(
        "--jobs",
        type=_positive,
        metavar="N",
        help="builds at once (default: from cores and free memory)",
    )
    parser.add_argument("--keep-going", action="store_true", help="go on after a failed build")
    parser.add_argument(
        "--shard", type=_shard, metavar="I/N", help="build only part I (from 1) of N"
    )
    parser.add_argument(
        "--from",
        dest="recording",
        type=Path,
        metavar="FILE",
        help="build exactly what a run used, which JITKERN_RECORD or `jitkern record` wrote",
    )
    parser.add_argument("--refresh", action="store_true", help="compile again what is cached")
    parser.add_argument(
        "--fail-on-miss", action="store_true", help="exit 1 if anything was skipped"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        return _run(args)
    finally:
        for op in room.op.OPS.values():
            op.recorded = None


def _run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    targets = choose_targets(args.target)
    ops, broken = (
        choose_recorded(args.recording, args.what) if args.recording else choose_ops(args.what)
    )
    results = _results(args, ops, targets, broken)
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


def _results(
    args: argparse.Namespace, ops: list[Op], targets: list[Target], broken: dict[str, str]
) -> list[prewarm.tasks.Result]:
    """What has come of every source for every target, and what cannot be tried."""
    unmatched = _unmatched(ops, targets)
    lacking = None
    if args.shard:
        lacking = _without_calls(ops, targets, set())
        prewarm.ahead.keep_shard(ops, *args.shard)
    groups = [
        prewarm.tasks.Group(op, source, target)
        for op in ops
        for target in targets
        for source in op.sources.get(target.device, ())
    ]
    # Into a private cache instead would keep nothing.
    with config.using(fallback="raise", jobs=args.jobs or config.current().jobs):
        builder = prewarm.builder.Builder(
            parallelism.limit(), Progress(), keep_going=args.keep_going, refresh=args.refresh
        )
        results = builder.build(groups)
    return [
        *results,
        *unmatched,
        *(_without_calls(ops, targets, builder.found) if lacking is None else lacking),
        *(
            prewarm.tasks.Result(name, "", "", "failed", reason=reason)
            for name, reason in broken.items()
        ),
    ]


def _without_calls(
    ops: list[Op], targets: list[Target], found: set[Group]
) -> list[prewarm.tasks.Result]:
    """The ops that no call is known of; found: the groups whose calls are ready."""
    ready = {(op.name, target.device) for op, _, target in found}
    lacking = []
    for op in ops:
        for device in dict.fromkeys(target.device for target in targets):
            kernels = [s for s in op.sources.get(device, ()) if not isinstance(s, Extension)]
            if not kernels or op.recorded is not None or (op.name, device) in ready:
                continue
            if op.prewarm_inputs(kernels[0], device):
                continue
            reason = (
                f"{op.name}: nothing tells which kernels it needs: add .samples that yield calls "
                'on the device "meta", or prewarm=, or give a recording'
            )
            lacking.append(prewarm.tasks.Result(op.name, "", device, "skipped", reason=reason))
    return lacking


def _unmatched(ops: list[Op], targets: list[Target]) -> list[prewarm.tasks.Result]:
    """What a recording has and no target or source fits."""
    found = []
    for op in ops:
        for (device, kind), calls in (op.recorded or {}).items():
            known = any(source.kind == kind for source in op.sources.get(device, ()))
            if known and any(target.device == device for target in targets):
                continue
            remedy = (
                f"name a target of theirs, e.g. --target {_example(device)}" if known
                else f"the op has no {kind} source for it any more; record anew"
            )  # fmt: skip
            count = f"{len(calls)} recorded call{'s' * (len(calls) > 1)}"
            reason = f"{op.name}: {count} on {device}: {remedy}"
            found.append(prewarm.tasks.Result(op.name, kind, device, "skipped", reason=reason))
    return found


def _example(device: str) -> Target:
    this = Target.current("cpu")
    return this if device == "cpu" else Target.parse(_CUDA)._replace(torch=this.torch)


def _print(results: list[Result]) -> None:
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
