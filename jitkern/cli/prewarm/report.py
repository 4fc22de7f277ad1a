"""The report of a prewarm: errors as they happen, and then a line for each op and target."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jitkern import prewarming
from jitkern.cache_tools.check import counted, headline
from jitkern.cli.output import RED, YELLOW, Progress, print_table, say, styled
from jitkern.errors import TargetError
from jitkern.op import recorder
from jitkern.prewarming.tasks import SKIPPED, Result, Step
from jitkern.runtime import binding
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.prewarming.op_calls import OpCalls

_MOST = 3  # ops that a sentence names
_PURPOSES = {  # of the entries that no op has for itself, where they are built
    binding.OP: "calls kernels from C, for all ops",
    recorder.NAME: "records calls for gradients in C++, for all ops",
}


class Failures:
    """The failures: each error is printed when it happens, and equal errors are counted.

    What was skipped follows, each reason once.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._alike: dict[str, list[Result]] = {}
        self._shown: set[Result] = set()

    def step(self, step: Step) -> None:
        """Show a step, and the error of a failed one."""
        if step.result and step.result.status == "failed":
            self._progress.clear()
            self._note(step.result)
        self._progress(step)

    def rest(self, results: Sequence[Result]) -> None:
        """Print the errors that no step told, why others were skipped, and what is like another."""
        for result in results:
            if result.status == "failed" and result not in self._shown:
                self._note(result)
        for result in {r.reason: r for r in results if r.status in SKIPPED}.values():
            alike = self._alike.setdefault(headline(result.reason)[0], [])
            alike.append(result)
            if len(alike) == 1:
                say(f"skipped: {result.reason}", code=YELLOW)
        for first, *others in self._alike.values():
            own = _name_of(first)
            names = [_name_of(r, first) for r in others if _name_of(r) != own]
            if names:
                say(f"the same error as of {own}: {', '.join(names)}")
            if again := len(others) - len(names):
                say(f"the same error in {counted(again, 'more group')} of calls of {own}")

    def _note(self, result: Result) -> None:
        self._shown.add(result)
        line, rest = headline(result.reason)
        alike = self._alike.setdefault(line, [])
        alike.append(result)
        if len(alike) > 1:
            return
        print(styled(line, RED, sys.stderr), file=sys.stderr)
        alone = rest == result.op  # without a word around it
        if rest and not alone:
            print(rest, file=sys.stderr)
        if alone or (result.variant and f"{result.op} " not in result.reason):
            print(f"failed: {_name_of(result)}", file=sys.stderr)
        sys.stderr.flush()


def _name_of(result: Result, beside: Result | None = None) -> str:
    """Return op, variant and target of a result, without what it shares with the one `beside`."""
    fields = (result.op, result.variant, result.target)
    known = (beside.op, "", beside.target) if beside else ()
    return " ".join(field for field in fields if field and field not in known) or result.op


def why_nothing(
    wanted: Sequence[OpCalls], targets: Sequence[Target], results: Iterable[Result]
) -> str:
    """Return why there is no entry of the wanted ops; "" if there is one, or if some failed."""
    results = [result for result in results if result.op not in _PURPOSES]
    if any(result.path or result.status == "failed" for result in results):
        return ""
    ops = {one.op.name: {*filter(one.op.sources.get, one.op.sources)} for one in wanted}
    names = ", ".join(ops) if len(ops) <= _MOST else f"{len(ops)} ops"
    devices = sorted(set().union(*ops.values()))
    if results:
        why = "everything was skipped, for the reasons above"
    elif not devices:
        why = "they have no kernels, and their PyTorch references need no build"
    elif {*devices}.isdisjoint(target.device for target in targets):
        why = (
            f"their kernels are for {' and '.join(devices)}: add e.g. "
            f"--target {prewarming.api.example(devices[-1])}"
        )
    else:
        why = "the recording has no calls of them"
    return f"nothing was built for {names}: {why}"


def what_is_missing(results: Iterable[Result]) -> str:
    """Return the kernels, and ops without samples, that were skipped and have no error, or ""."""
    kernels = [r for r in results if r.variant[:5] not in ("", "call.") and "-" in r.target]
    served = {_place(r) for r in kernels if r.path or r.status == "failed"}
    names = [_name_of(r) for r in kernels if r.status == "skipped" and _place(r) not in served]
    names += [_name_of(r) for r in results if r.status == "unsampled"]
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"neither built nor cached: {', '.join(names[:_MOST])}{more}" if names else ""


def _place(result: Result) -> tuple[str, str, str]:
    target = Target.parse(result.target)
    return result.op, target.device, target.arch


def print_ops(results: list[Result]) -> None:
    """Print a line for each op and target; its time is the sum of those of all builds."""
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    labels = _labels(results)
    for r in results:
        if r.op not in _PURPOSES or r.status in ("built", "failed"):
            groups[r.op.removeprefix("jitkern::"), labels[r.target]].append(r)
    rows = []
    for (op, target), group in sorted(groups.items()):
        made = [r for r in group if r.path]
        calls = sum(r.variant.startswith("call.") for r in made)
        kernels = len(made) - calls
        texts = [
            _PURPOSES.get(group[0].op) or counted(kernels, "kernel"),
            *([counted(calls, "record")] if calls else []),
        ]
        for status, code in (("failed", RED), *((one, YELLOW) for one in SKIPPED)):
            number = sum(r.status == status for r in group)
            texts += [styled(f"{number} {status}", code)] if number else []
        compiling = sum(r.seconds for r in group if r.status == "built")
        what = "" if group[0].op in _PURPOSES else " compiling"
        time_ = f"{compiling:.1f} s{what}" if compiling else "cached" if kernels else ""
        rows.append((op, target, ", ".join(texts if made else texts[1:]), time_))
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    for op, target, text, time_ in rows:
        print(f"{op:{widths[0]}}  {target:{widths[1]}}  {text}  {time_}".rstrip())


def _labels(results: Iterable[Result]) -> dict[str, str]:
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
        arch = arch.removesuffix("a")  # of host code with kernels, which takes all features
        plain = str(target.for_device_code()._replace(arch=arch))
        whole[text] = ("cpu" if cpu else arch, plain)
    meant: dict[str, set[str]] = defaultdict(set)
    for short, plain in whole.values():
        meant[short].add(plain)
    return {
        text: short if len(meant[short]) == 1 else plain for text, (short, plain) in whole.items()
    }


def print_rows(results: list[Result]) -> None:
    """Print a line for each entry."""
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
