"""Compile ahead of the first call, for this machine or for any target, with or without its device.

A second run compiles nothing. What this machine cannot build is skipped, with the reason. Exit code
1 if something failed, or if nothing was built or cached of what was asked for: with --target or
--refresh, for one op.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jitkern import config, jit, prewarming, remote
from jitkern.cache_tools.check import human_bytes
from jitkern.cli.choose import choose_calls, choose_ops, choose_recorded, choose_targets, take_ops
from jitkern.cli.connection import UNSIGNED, pushable, telling
from jitkern.cli.output import YELLOW, Progress, print_json, say
from jitkern.cli.parser import UsageError, at_least_one, file_to_read, take_key, take_targets
from jitkern.cli.prewarm.report import (
    Failures,
    print_ops,
    print_rows,
    what_is_missing,
    why_nothing,
)
from jitkern.prewarming.tasks import SKIPPED, Group, Result, entries_of
from jitkern.remote.store import Store
from jitkern.target import EXAMPLE, Target, short_version


def configure(parser: argparse.ArgumentParser, _: argparse.ArgumentParser) -> None:
    take_ops(parser)
    take_targets(parser, f"such as sm_90, cpu or {EXAMPLE}")
    parser.add_argument(
        "--jobs",
        type=at_least_one,
        metavar="N",
        help="builds at once (default: from cores and free memory; 1 in each part of --executor)",
    )
    parser.add_argument("--keep-going", action="store_true", help="continue after a failed build")
    parser.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="I/N",
        help="build only part I of N, from 1",
    )  # fmt: skip
    parser.add_argument(
        "--executor", metavar="MODULE:FACTORY",
        help="build in the workers of the executor that this function returns",
    )  # fmt: skip
    parser.add_argument(
        "--parts",
        type=at_least_one,
        metavar="P",
        help="parts for the executor (default: 4 a worker)",
    )
    parser.add_argument(
        "--from",
        dest="recording",
        type=file_to_read,
        metavar="FILE",
        help="build what a run of `jitkern record` used",
    )
    parser.add_argument(
        "--call",
        action="append",
        default=[],
        metavar="ARGS",
        help="build for this call only: `f16[64, 1000], 2.0`, or `OP(ARGS)` for one op of several",
    )
    parser.add_argument("--refresh", action="store_true", help="compile again what is cached")
    parser.add_argument(
        "--fail-on-miss", action="store_true", help="exit 1 if anything at all was skipped"
    )
    parser.add_argument(
        "--push", metavar="URL",
        help="afterwards, push what was built or found to a remote",
    )  # fmt: skip
    take_key(parser, "the private key to sign with (default: sign_key)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    _check(args)
    key = args.key or config.current().sign_key
    store = pushable(args.push, key) if args.push else None
    named: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if args.executor is not None:
        named = prewarming.executors.NamedExecutor(args.executor)
    targets = choose_targets(args.target)
    _remark_versions(targets)
    if args.recording:
        wanted, broken = choose_recorded(args.recording, args.what)
    else:
        ops, broken, _ = choose_ops(args.what)
        wanted = choose_calls(ops, args.call, targets)
    with (
        Progress(every=args.level > 0, quiet=args.level < 0) as progress,
        named as executor,
    ):
        failures = Failures(progress)
        results = prewarming.api.prewarm(
            wanted, targets, shard=args.shard, jobs=args.jobs, keep_going=args.keep_going,
            refresh=args.refresh, progress=failures.step, executor=executor, parts=args.parts,
        ) if wanted else []  # fmt: skip
    failures.rest(results)
    told = {}
    if store:
        groups = prewarming.api.groups_of(wanted, targets) if args.shard[1] > 1 else []
        told = {"pushed": store.url, "uploaded": _push(store, key, results, groups)}
    results += [Result(name, "", "", "failed", reason=reason) for name, reason in broken.items()]
    count = Counter(result.status for result in results)
    skipped = sum(count[status] for status in SKIPPED)
    seconds = round(time.perf_counter() - started, 3)
    if args.json:
        print_json(
            built=count["built"],
            hits=count["hit"],
            failed=count["failed"],
            skipped=skipped,
            seconds=seconds,
            results=[result._asdict() for result in results],
            **told,
        )
    else:
        if args.level > 0:
            print_rows(results)
        elif args.level == 0:
            print_ops(results)
        print(
            f"{count['built']} built, {count['hit']} cached, {count['failed']} failed, "
            f"{skipped} skipped; {seconds:.1f} s wall time; {config.current().cache_dir}"
        )
    lacking = why_nothing(wanted, targets, results) if args.shard[1] == 1 else ""
    if not lacking and (args.refresh or args.target):
        lacking = what_is_missing(results)
    if lacking:
        say(lacking)
    return 1 if count["failed"] or lacking or (args.fail_on_miss and skipped) else 0


def _remark_versions(targets: Iterable[Target]) -> None:
    """Tell of targets for another Torch, whose version cannot be checked here."""
    import torch

    here = short_version(torch.__version__)
    for other in dict.fromkeys(target.torch for target in targets if target.torch != here):
        say(f"Torch here is {here}: only machines with Torch {other} use this build", code=YELLOW)


def _push(
    store: Store, key: Path | None, results: Iterable[Result], groups: Sequence[Group]
) -> int:
    """Push what was built or found; return the bytes that were sent. Raises JitkernError.

    key: the private key that signs it, or None. groups: of a part of a prewarm, those of all parts,
    which count as one push: an index keeps the last few pushes alone.
    """
    part_of = prewarming.shards.name_of(groups) if groups else ""
    entries = entries_of(results)
    if not entries:
        say("nothing to push: nothing was built or found", code=YELLOW)
        return 0
    with telling(store):
        pushed = remote.publish.push(
            jit.open_cache(), entries, store,
            key=key, unsigned=key is None, part_of=part_of,
        )  # fmt: skip
    sent = sum(done.uploaded for done in pushed)
    print(f"{human_bytes(sent)} sent to {store.url}", file=sys.stderr)
    if key is None:
        say(UNSIGNED, code=YELLOW)
    return sent


def _check(args: argparse.Namespace) -> None:
    """Raise UsageError for options that do not belong together."""
    if not args.executor and args.parts:
        raise UsageError("--parts is for --executor")
    if args.executor and args.refresh:
        raise UsageError("--refresh is not for --executor: remove entries by `jitkern cache clear`")
    if args.key and not args.push:
        raise UsageError("--key is for --push")


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    numbers = text.isascii() and part.isdigit() and parts.isdigit()
    if not (numbers and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"`{text}` is not I/N with I from 1 to N")
    return int(part), int(parts)
