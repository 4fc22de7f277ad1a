"""Compile ahead of the first call, for this machine or for any target, with or without its device.

A second run compiles nothing. What this machine cannot build is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern import config
from jitkern.cli.choose import choose_ops, choose_recorded, choose_targets
from jitkern.cli.output import Progress, print_json, print_table
from jitkern.compilers import child
from jitkern.errors import CacheError, CompilerNotFound, JitkernError, NotCached, TargetError
from jitkern.kernel import Source, Variant
from jitkern.target import Target, this_platform

if TYPE_CHECKING:
    from jitkern.ahead import Stub
    from jitkern.entry import Entry
    from jitkern.register import Op

MEMORY_PER_JOB = 2 << 30  # a build with Torch's headers takes 1.5 to 3 GB


@dataclass(frozen=True)
class Item:
    """One thing to build, or why it cannot even be tried."""

    op: str
    target: Target
    variant: Variant | None
    problem: str = ""


@dataclass(frozen=True)
class Result:
    """One line of the report; status is built, hit, failed or skipped."""

    op: str
    variant: str
    target: str
    status: str
    seconds: float = 0.0
    path: str = ""
    reason: str = ""


def configure(parser: argparse.ArgumentParser, _: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="*", metavar="WHAT", help="an op, a namespace or a package (default: all)"
    )
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="T",
        help="e.g. cuda-sm_90-cu130-torch2.11.0; repeatable",
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
    from jitkern.register import OPS

    try:
        return _run(args)
    finally:
        for op in OPS.values():
            op.recorded = None


def _run(args: argparse.Namespace) -> int:
    from jitkern.ahead import keep_plans, keep_shard

    started = time.perf_counter()
    targets = choose_targets(args.target)
    if args.recording:
        choose_recorded(args.recording)
    if args.shard:
        for op in choose_ops(args.what):
            keep_shard(op, *args.shard)
    items = _plan(args.what, targets)
    with config.using(fallback="raise"):  # into a private cache instead would keep nothing
        build = functools.partial(
            _build,
            jobs=args.jobs or _default_jobs(),
            keep_going=args.keep_going,
            refresh=args.refresh,
        )
        results = build(items)
        if args.keep_going or not any(r.status == "failed" for r in results):
            stubs = _stubs(items)
            results += build(_plan_stubs(stubs))
            results += [
                _kept(op, entry, new=new)
                for (op, target, source), found in stubs.items()
                for entry, new in keep_plans(op, source, target, found)
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
            results=[asdict(result) for result in results],
        )
    else:
        _print(results)
        print(
            f"{count['built']} built, {count['hit']} already there, {count['failed']} failed, "
            f"{count['skipped']} skipped in {seconds:.1f} s, in {config.current().cache_dir}"
        )
    return 1 if count["failed"] or (args.fail_on_miss and count["skipped"]) else 0


def _plan(what: list[str], targets: list[Target]) -> list[Item]:
    """Every variant of every source that the samples use, for every target."""
    from jitkern.ahead import variants_of

    items = []
    for op in choose_ops(what):
        for target in targets:
            for source in op.sources.get(target.device, ()):
                try:
                    items += [
                        Item(op.name, target, variant)
                        for variant in variants_of(op, source, target.device)
                    ]
                except Exception as e:  # noqa: BLE001  whatever its author's code raises
                    items.append(
                        Item(
                            op.name, target, None, f"its launch function failed on its samples: {e}"
                        )
                    )
    return items


def _stubs(items: list[Item]) -> dict[tuple[Op, Target, Source], list[Stub]]:
    """The stubs over the kernels that are in the cache now, as host code for this platform."""
    from jitkern.ahead import stubs_of
    from jitkern.register import OPS

    found: dict[tuple[Op, Target, Source], list[Stub]] = {}
    for item in items:
        if not item.variant or item.target.for_host_code().platform != this_platform():
            continue
        place = (OPS[item.op], item.target, item.variant.source)
        if place not in found:
            found[place], reasons = stubs_of(place[0], place[2], item.target)
            where = f"{item.op} for {item.target}"
            for reason in reasons:
                print(f"{where} keeps to its Python launcher: {reason}", file=sys.stderr)
    return found


def _plan_stubs(stubs: dict[tuple[Op, Target, Source], list[Stub]]) -> list[Item]:
    """The stubs, and the launch runtime that they need."""
    from jitkern.launch import runtime

    hosts = dict.fromkeys(
        Target.current("cpu")._replace(torch=target.torch) for _, target, _ in stubs
    )
    variants = dict.fromkeys(
        (op.name, target, stub.variant) for (op, target, _), made in stubs.items() for stub in made
    )
    return [
        *(Item("jitkern::runtime", host, runtime.variant()) for host in hosts),
        *(Item(*variant) for variant in variants),
    ]


def _kept(op: Op, entry: Entry, *, new: bool) -> Result:
    """A plan, which spares a process the trace."""
    status = "built" if new else "hit"
    return Result(op.name, entry.variant, entry.path.parent.name, status, path=str(entry.path))


def _build(items: list[Item], jobs: int, *, keep_going: bool, refresh: bool) -> list[Result]:
    """Build in threads: compilers are child processes, or (NVRTC) release the interpreter lock."""
    progress = Progress(len(items))
    stop = threading.Event()
    results: dict[Future[Result], Result] = {}
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="prewarm")
    futures = [
        pool.submit(_build_one, item, stop, keep_going=keep_going, refresh=refresh)
        for item in items
    ]
    try:
        left = set(futures)
        while left:
            done, left = wait(left, return_when=FIRST_COMPLETED)
            for future in done:
                result = results[future] = future.result()
                progress.step(
                    f"{result.status:7} {result.op} {result.variant} {result.target} "
                    f"{result.seconds:.2f} s"
                )
    except KeyboardInterrupt:
        stop.set()
        child.end()
        raise
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
        progress.close()
    return [results[future] for future in futures]


def _build_one(item: Item, stop: threading.Event, *, keep_going: bool, refresh: bool) -> Result:
    result = _try_one(item, stop, refresh=refresh)
    if result.status == "failed" and not keep_going:
        stop.set()
    return result


def _try_one(item: Item, stop: threading.Event, *, refresh: bool) -> Result:
    from jitkern import jit

    variant = item.variant
    if variant is None:
        return Result(item.op, "", str(item.target), "failed", reason=item.problem)
    target = str(jit.exact_target(variant, item.target))
    if stop.is_set():
        return Result(
            item.op,
            variant.label,
            target,
            "skipped",
            reason="not tried after a failed build; see --keep-going",
        )
    started = time.perf_counter()
    try:
        entry, built = jit.ensure_and_tell(variant, item.target, refresh=refresh)
        status, path, reason = "built" if built else "hit", str(entry.path), ""
    except (CompilerNotFound, TargetError) as e:
        status, path, reason = "skipped", "", str(e)
    except JitkernError as e:
        if isinstance(e, CacheError) and not isinstance(e, NotCached):
            raise  # nothing can be kept: no use in going on
        status, path, reason = "failed", "", str(e)
    return Result(
        item.op,
        variant.label,
        target,
        status,
        round(time.perf_counter() - started, 4),
        path,
        reason,
    )


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


def _default_jobs() -> int:
    if config.current().jobs:
        return config.current().jobs
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return cores
    return max(1, min(cores, free // MEMORY_PER_JOB))


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"`{text}` is not a number from 1 up")
    return int(text)


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"`{text}` is not I/N with I from 1 to N")
    return int(part), int(parts)
