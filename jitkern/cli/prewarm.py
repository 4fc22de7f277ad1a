"""Compile ahead of the first call, for this machine or for any target, with or without its device.

A second run compiles nothing. What this machine cannot build is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jitkern import config, jit, prewarming, remote
from jitkern.cache_tools.listing import RUNTIME
from jitkern.cli.choose import choose_calls, choose_ops, choose_recorded, choose_targets, take_ops
from jitkern.cli.output import (
    RED,
    YELLOW,
    Progress,
    counted,
    headline,
    human_bytes,
    print_json,
    print_table,
    say,
    styled,
)
from jitkern.cli.parser import UsageError
from jitkern.cli.remote.connection import pushable, telling
from jitkern.errors import TargetError
from jitkern.remote.store import Store
from jitkern.target import EXAMPLE, Target


def configure(parser: argparse.ArgumentParser, _: argparse.ArgumentParser) -> None:
    take_ops(parser)
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="T",
        help=f"e.g. {EXAMPLE}, or sm_90; repeatable",
    )
    parser.add_argument(
        "--jobs",
        type=_positive,
        metavar="N",
        help="builds at once (default: from cores and free memory; with --engine, 1 in each part)",
    )
    parser.add_argument("--keep-going", action="store_true", help="go on after a failed build")
    parser.add_argument(
        "--shard",
        type=_shard,
        default=(1, 1),
        metavar="I/N|auto",
        help="build only part I (from 1) of N; `auto`: as Slurm, Kubernetes, torchrun, MPI and "
        "others number the processes of a job",
    )
    parser.add_argument(
        "--engine",
        metavar="E",
        help=f"build in the workers of {prewarming.engines.FORMS}; the entries come back here",
    )
    parser.add_argument(
        "--parts",
        type=_positive,
        metavar="P",
        help="how many parts an engine gets (default: 4 for each worker)",
    )
    parser.add_argument(
        "--from",
        dest="recording",
        type=Path,
        metavar="FILE",
        help="build exactly what a recorded run used (see `jitkern record`)",
    )
    parser.add_argument(
        "--call",
        action="append",
        default=[],
        metavar="ARGS",
        help="build for this call alone: `f16[64, 1000], 2.0`, or `OP(ARGS)` for one op of several",
    )
    parser.add_argument("--refresh", action="store_true", help="compile again what is cached")
    parser.add_argument(
        "--fail-on-miss", action="store_true", help="exit 1 if anything was skipped"
    )
    parser.add_argument(
        "--push", metavar="URL",
        help="then push what was built or found to a bucket or directory (see `jitkern remote`)",
    )  # fmt: skip
    parser.add_argument(
        "--key", type=Path, metavar="FILE",
        help="the private key that signs what is pushed (default: the setting sign_key)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    _check(args)
    if args.shard == "auto":
        *args.shard, whose = prewarming.shards.announced()
        if args.level >= 0:
            say(f"part {args.shard[0]} of {args.shard[1]}, by the variables of {whose}", code="")
    key = args.key or config.current().sign_key
    store = pushable(args.push, key) if args.push else None
    engine = _engine(args)
    targets = choose_targets(args.target)
    if args.recording:
        wanted, broken = choose_recorded(args.recording, args.what)
    else:
        ops, broken = choose_ops(args.what)
        wanted = choose_calls(ops, args.call, targets)
    with (
        Progress(every=args.level > 0, quiet=args.level < 0) as progress,
        engine as executor,
    ):
        failures = Failures(progress)
        results = prewarming.api.prewarm(
            wanted, targets, shard=args.shard, jobs=args.jobs, keep_going=args.keep_going,
            refresh=args.refresh, progress=failures.step, executor=executor, parts=args.parts,
        ) if wanted else []  # fmt: skip
    failures.rest(results)
    told = {}
    if store:
        # The shards of a prewarm count as one push: an index keeps the last few pushes alone.
        groups = prewarming.api.groups_of(wanted, targets) if args.shard[1] > 1 else []
        part_of = prewarming.parts.name_of(groups) if groups else ""
        told = {"pushed": store.url, "uploaded": _push(store, key, results, part_of)}
    results += [
        prewarming.tasks.Result(name, "", "", "failed", reason=reason)
        for name, reason in broken.items()
    ]
    count = {
        status: sum(r.status == status for r in results)
        for status in ("built", "hit", "failed", "skipped")
    }
    seconds = round(time.perf_counter() - started, 3)
    for reason in dict.fromkeys(r.reason for r in results if r.status == "skipped"):
        say(f"skipped: {reason}", code=YELLOW)
    if args.json:
        print_json(
            built=count["built"],
            hits=count["hit"],
            failed=count["failed"],
            skipped=count["skipped"],
            seconds=seconds,
            results=[result._asdict() for result in results],
            **told,
        )
    else:
        if args.level > 0:
            _print_rows(results)
        elif args.level == 0:
            _print_ops(results)
        print(
            f"{count['built']} built, {count['hit']} already there, {count['failed']} failed, "
            f"{count['skipped']} skipped in {seconds:.1f} s, in {config.current().cache_dir}"
        )
    return 1 if count["failed"] or (args.fail_on_miss and count["skipped"]) else 0


def _check(args: argparse.Namespace) -> None:
    """Raise UsageError for options that do not belong together."""
    if not args.engine and args.parts:
        raise UsageError("--parts is for --engine")
    if args.engine and args.refresh:
        raise UsageError("--refresh is not for --engine: remove entries by `jitkern cache clear`")
    if args.key and not args.push:
        raise UsageError("--key is for --push")


def _push(
    store: Store, key: Path | None, results: Iterable[prewarming.tasks.Result], part_of: str
) -> int:
    """Push what was built or found; return the bytes that were sent. Raises JitkernError."""
    entries = prewarming.tasks.entries_of(results)
    if not entries:
        say("nothing was built or found, so nothing is pushed", code=YELLOW)
        return 0
    with telling(store):
        pushed = remote.publish.push(
            jit.open_cache(), ((None, entry) for entry in entries), store,
            key=key, unsigned=key is None, part_of=part_of,
        )  # fmt: skip
    sent = sum(done.uploaded for done in pushed)
    print(f"{human_bytes(sent)} sent to {store.url}", file=sys.stderr)
    if key is None:
        say(
            "what was pushed is not signed: machines use it only if `trusted_remotes` in their "
            "settings file names the URL; --key FILE signs it",
            code=YELLOW,
        )
    return sent


class Failures:
    """The failures: each error is printed when it happens, and errors alike are counted."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._alike: dict[str, list[prewarming.tasks.Result]] = {}
        self._shown: set[prewarming.tasks.Result] = set()

    def step(self, step: prewarming.builder.Step) -> None:
        """Show a step, and the error of a failed one."""
        if step.result and step.result.status == "failed":
            self._progress.clear()
            self._note(step.result)
        self._progress(step)

    def rest(self, results: Iterable[prewarming.tasks.Result]) -> None:
        """Print the errors that no step told, and what failed as something before it."""
        for result in results:
            if result.status == "failed" and result not in self._shown:
                self._note(result)
        for first, *others in self._alike.values():
            names = [_name_of(result, first) for result in others]
            if names:
                say(f"the same error as of {_name_of(first)}: {', '.join(names)}")

    def _note(self, result: prewarming.tasks.Result) -> None:
        self._shown.add(result)
        line, rest = headline(result.reason)
        alike = self._alike.setdefault(line, [])
        alike.append(result)
        if len(alike) > 1:
            return
        print(styled(line, RED, sys.stderr), file=sys.stderr)
        if rest:
            print(rest, file=sys.stderr)
        if result.variant and f"{result.op} " not in result.reason:
            print(f"failed: {_name_of(result)}", file=sys.stderr)
        sys.stderr.flush()


def _name_of(result: prewarming.tasks.Result, beside: prewarming.tasks.Result | None = None) -> str:
    """Return op, variant and target of a result, without what it shares with the one `beside`."""
    fields = (result.op, result.variant, result.target)
    known = (beside.op, "", beside.target) if beside else ()
    return " ".join(field for field in fields if field and field not in known) or result.op


def _print_ops(results: list[prewarming.tasks.Result]) -> None:
    """Print a line for each op and target."""
    groups: dict[tuple[str, str], list[prewarming.tasks.Result]] = defaultdict(list)
    labels = _labels(results)
    for r in results:
        if r.op != RUNTIME or r.status == "failed":
            groups[r.op.removeprefix("jitkern::"), labels[r.target]].append(r)
    rows = []
    for (op, target), group in sorted(groups.items()):
        made = [r for r in group if r.path]
        stubs = sum(r.variant.startswith("stub.") for r in made)
        kernels = sum(not r.variant.startswith(("stub.", "plan.")) for r in made)
        texts = [counted(kernels, "kernel"), *([counted(stubs, "stub")] if stubs else [])]
        for status, code in (("failed", RED), ("skipped", YELLOW)):
            number = sum(r.status == status for r in group)
            texts += [styled(f"{number} {status}", code)] if number else []
        built = [r.seconds for r in group if r.status == "built"]
        time_ = f"{sum(built):.1f} s" if built else "cached" if made else ""
        rows.append((op, target, ", ".join(texts if made else texts[1:]), time_))
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    for op, target, text, time_ in rows:
        print(f"{op:{widths[0]}}  {target:{widths[1]}}  {text}  {time_}".rstrip())


def _labels(results: Iterable[prewarming.tasks.Result]) -> dict[str, str]:
    """Return a short name for each target: its arch, or `cpu`, if no other has this name."""
    whole: dict[str, tuple[str, str]] = {}
    for text in dict.fromkeys(result.target for result in results):
        try:
            target = Target.parse(text)
        except TargetError:  # a device
            whole[text] = (text, text)
            continue
        cpu = target.device == "cpu"
        arch = target.arch.partition("_v")[0] if cpu else target.arch
        plain = str(target.for_device_code()._replace(arch=arch))
        whole[text] = ("cpu" if cpu else arch, plain)
    meant: dict[str, set[str]] = defaultdict(set)
    for short, plain in whole.values():
        meant[short].add(plain)
    return {
        text: short if len(meant[short]) == 1 else plain for text, (short, plain) in whole.items()
    }


def _print_rows(results: list[prewarming.tasks.Result]) -> None:
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
        print_table(("status", "op", "variant", "target", "time"), rows, whole=True)


def _engine(args: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    if not args.engine:
        return contextlib.nullcontext()
    return prewarming.engines.Engine(args.engine, jobs=args.jobs or 1)


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"`{text}` is not a number from 1 up")
    return int(text)


def _shard(text: str) -> tuple[int, int] | str:
    if text == "auto":
        return text
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"`{text}` is not I/N with I from 1 to N, nor `auto`")
    return int(part), int(parts)
