"""Build the kernels that calls need, and then publish the launch records of the calls."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern import jit
from jitkern.cache.entry import Entry
from jitkern.cache.records import Reader
from jitkern.jit import announcement
from jitkern.op import recorder
from jitkern.op.needed_kernels import units_of
from jitkern.prewarming import workers
from jitkern.prewarming.call_traces import refused_by, traces_of
from jitkern.prewarming.tasks import (
    NOT_TRIED,
    Group,
    Kernel,
    Result,
    Step,
    built_here,
    reason_of,
)
from jitkern.runtime import binding
from jitkern.runtime.records import keep, reader
from jitkern.source import closure
from jitkern.source.kinds import Extension, Variant
from jitkern.target import Target, this_platform

if TYPE_CHECKING:
    from jitkern.prewarming.jobs import ExecutorBuilder

_LEFT_OUT = "one of several configurations is left out: "
_log = logging.getLogger(__name__)


@dataclass
class _Work:
    """The work for a group, and what came of it.

    failed: the calls whose kernels are unknown. of_all_ops: what launch records need beside the
    kernels. choices: of each call, the launches of each of its configurations, one of which is
    enough; see `needed_kernels`. calls: those that use the same kernels are together.
    """

    group: Group
    failed: list[Result]
    left_out: list[Result]
    kernels: dict[Kernel, None] = field(default_factory=dict)
    of_all_ops: dict[Kernel, None] = field(default_factory=dict)
    choices: list[list[list[set[Kernel]]]] = field(default_factory=list)
    calls: list[list[tuple[Any, ...]]] = field(default_factory=list)
    records: list[Result] = field(default_factory=list)

    def recorded(
        self, calls: list[tuple[Any, ...]], entries: dict[Variant, Entry], read: Reader
    ) -> tuple[list[Result], list[str]]:
        """Trace calls, check those without a trace, and publish launch records. Raises CacheError.

        entries: of kernels that were looked up before. Returns the launch records, or failures if
        calls cannot be launched, and notes on why others keep to their Python launcher.
        """
        op, source, target = self.group.op, self.group.source, self.group.target
        try:
            traces, reasons, without = traces_of(op, source, target, calls, entries)
            # A trace has made the checks of its launches.
            if refused := refused_by(op, source, target, without, entries):
                return [self.group.result("failed", reason) for reason in refused], []
            kept = [keep(one.calls, one.trace, read) for one in traces]
            launches = [
                Result(
                    op.name, entry.variant, entry.path.parent.name, "built" if new else "hit",
                    path=str(entry.path),
                )
                for entry, new in filter(None, kept)
            ]  # fmt: skip
        except (Exception, SystemExit) as e:  # noqa: BLE001  whatever its author's code raises
            _log.debug("the calls of %s failed", op.name, exc_info=True)
            return [self.group.result("failed", reason_of(e))], []
        here = f"{op.name} for {target} stays on the Python launcher"
        return launches, [f"{here}: {reason}" for reason in reasons]


@dataclass
class Builder:
    """Builds groups, `jobs` tasks at once.

    progress: takes each step. elsewhere: who compiles kernels in place of this machine.
    keep_going: go on after a failed build. refresh: build cached entries again.
    """

    jobs: int
    progress: Callable[[Step], object]
    elsewhere: ExecutorBuilder | None = None
    keep_going: bool = False
    refresh: bool = False

    def __post_init__(self) -> None:
        self._stopped = False
        self._done = 0
        self._total = 0
        self._kernels: dict[tuple[Any, ...], Kernel] = {}
        self._works: list[_Work] = []
        self._found: dict[Kernel, Entry] = {}
        self._results: dict[Kernel, Result] = {}
        self._broken: set[Kernel] = set()
        self._notes: set[str] = set()

    def build(self, groups: Iterable[Group]) -> list[Result]:
        """Return results: kernels, the runtime, launch records, each in the order of `groups`.

        Raises CacheError if the cache is unusable.
        """
        self._works = [self._planned(group) for group in dict.fromkeys(groups)]
        self._stopped = any(work.failed for work in self._works) and not self.keep_going
        self._total = len(self._kernels) + sum(len(work.calls) for work in self._works)
        with announcement.silence():  # the progress tells what a user waits for
            self._build(sorted(self._kernels.values(), key=lambda k: -k.variant.source.seconds))
            if not self._stopped:
                self._record()
        steps = zip(*(self._steps(work) for work in self._works))
        return list(_once([result for step in steps for part in step for result in part]))

    def _build(self, kernels: Sequence[Kernel]) -> None:
        """Find or build kernels; after a failed build no more are begun, unless `keep_going`."""
        left = dict.fromkeys(kernels)
        if not self._stopped and not self.refresh:
            with closure.each_once():
                for kernel in kernels:
                    if entry := kernel.found():
                        del left[kernel]
                        self._found[kernel] = entry
                        self.take(kernel, kernel.result("hit", path=str(entry.path)))
        if left and not self._stopped:
            built = (
                self.elsewhere.built([*left], lambda: self._stopped) if self.elsewhere
                else built_here(
                    [*left], self.jobs, lambda: self._stopped,
                    early=self._early, refresh=self.refresh,
                )
            )  # fmt: skip
            with contextlib.closing(built):
                for kernel, result in built:
                    del left[kernel]
                    self.take(kernel, result)
        for kernel in left:
            self.take(kernel, kernel.result("skipped", reason=NOT_TRIED))

    def _record(self) -> None:
        """Publish the launch records of calls whose kernels are there."""
        entries, read = self._entries(), reader()
        calls = [(work, alike) for work in self._works for alike in work.calls]

        def recorded(number: int) -> tuple[list[Result], list[str]]:
            work, alike = calls[number]
            return work.recorded(alike, entries[work.group.target], read)

        waiting = deque(range(len(calls)))
        outcomes: dict[int, list[Result]] = {}
        done = workers.results(waiting, recorded, min(self.jobs, len(waiting)))
        with contextlib.closing(done):
            for number, outcome in done:
                group = calls[number][0].group
                dead = isinstance(outcome, workers.Died)
                told = ([group.result("failed", str(outcome))], []) if dead else outcome
                outcomes[number] = told[0]
                self._note(group, *told)
                if self._stopped:
                    waiting.clear()
        for number in sorted(outcomes):
            calls[number][0].records += outcomes[number]

    def _entries(self) -> dict[Target, dict[Variant, Entry]]:
        """Return the entry of each kernel that was found or built, by its target."""
        cache = jit.open_cache()
        entries: dict[Target, dict[Variant, Entry]] = defaultdict(dict)
        for kernel, result in self._results.items():
            path, entry = Path(result.path), self._found.get(kernel)
            if result.path and not entry:  # it was built
                entry = cache.look_up(path.parent.name, path.name).entry
            if entry:
                entries[kernel.target][kernel.variant] = entry
        return entries

    def _planned(self, group: Group) -> _Work:
        """Return the work for a group, by running its launch function on its calls."""
        op, source, target = group.op, group.source, group.target
        calls = group.wanted.of(source, target.device)
        units, problems = units_of(op, source, target.device, calls, target)
        left_out = dict.fromkeys(why for unit in units for why in unit.left_out)
        work = _Work(
            group,
            [group.result("failed", problem) for problem in problems],
            [group.result("skipped", f"{_LEFT_OUT}{why}") for why in left_out],
        )
        here = target.for_host_code().platform == this_platform()
        for unit in units:
            kernels = {
                variant: self._kernel(Kernel(variant, target, place))
                for variant, place in unit.variants.items()
            }
            work.kernels |= dict.fromkeys(kernels.values())
            work.choices += [
                [[{kernels[v] for v in launch} for launch in run] for run in choices]
                for choices in unit.choices
            ]
            if here and unit.calls:
                work.calls.append(unit.calls)
        if work.calls:
            host = Target.current("cpu")._replace(torch=target.torch)
            work.of_all_ops[self._kernel(Kernel(binding.variant(), host))] = None
            if group.wanted.node and host == Target.current("cpu"):  # whose headers are here
                node = Kernel(recorder.variant(), host, optional=True)
                work.of_all_ops[self._kernel(node)] = None
        return work

    def _kernel(self, kernel: Kernel) -> Kernel:
        """Return the representative of this build, which several groups may share."""
        source = kernel.variant.source
        build = source.shared_build if isinstance(source, Extension) else kernel.variant
        return self._kernels.setdefault((build, kernel.target), kernel)

    def take(self, kernel: Kernel, result: Result) -> None:
        """Note the result of a kernel. That of a configuration that calls do without is skipped."""
        if result.status == "failed":
            self._broken.add(kernel)
            every = [choices for work in self._works for choices in work.choices]
            choices = [c for c in every if any(kernel in launch for run in c for launch in run)]
            left = [  # the configurations of each call that have no failed launch
                [run for run in call if all(launch - self._broken for launch in run)]
                for call in choices
            ]
            if left and all(left):
                result = result._replace(status="skipped", reason=f"{_LEFT_OUT}{result.reason}")
        if result.path or not kernel.optional:
            self._results[kernel] = result
        self._done += 1
        self._tell(result)

    def _early(self, kernel: Kernel) -> bool:
        """Whether nothing is there yet that a kernel serves, which calls do without."""
        served = [work.kernels.keys() for work in self._works if kernel in work.of_all_ops]
        there = {kernel for kernel, result in self._results.items() if result.path}
        return kernel.optional and not any(not kernels or kernels & there for kernels in served)

    def _note(self, group: Group, results: list[Result], notes: list[str]) -> None:
        """Tell what came of the launch records of calls that use the same kernels."""
        for text in notes:
            if text not in self._notes:
                self._notes.add(text)
                self.progress(Step(self._done, self._total, text, finished=False))
        self._done += 1
        failed = [result for result in results if result.status == "failed"]
        for result in failed:
            self._tell(result)
        if not failed:
            text = f"traced  {group.op.name} {group.target}"
            self.progress(Step(self._done, self._total, text, finished=True))

    def _tell(self, result: Result) -> None:
        """Report a result as progress; after a failed build begin no more, unless `keep_going`."""
        what = f"{result.status:7} {result.op} {result.variant} {result.target}"
        text = f"{what} {result.seconds:.2f} s"
        self.progress(Step(self._done, self._total, text, finished=True, result=result))
        if result.status == "failed" and not self.keep_going:
            self._stopped = True

    def _steps(self, work: _Work) -> tuple[list[Result], list[Result], list[Result]]:
        """Return a group's results: of kernels, of what all ops need, and of launch records."""
        if work.failed and self._stopped:
            return work.failed[:1], [], []
        kernels = [*work.failed, *work.left_out, *self._of(work.kernels)]
        launches = [result for result in work.records if result.path]
        of_all_ops = self._of(work.of_all_ops) if launches else []
        refused = [result for result in work.records if not result.path]
        return kernels, [*of_all_ops, *refused], launches

    def _of(self, kernels: Iterable[Kernel]) -> list[Result]:
        return [self._results[kernel] for kernel in kernels if kernel in self._results]


def _once(results: list[Result]) -> Iterator[Result]:
    """Yield each result once, though groups may share an entry; as built, if it was built now."""
    built = {result.path for result in results if result.status == "built"}
    keys: set[Any] = set()
    for result in results:
        key = result.path or id(result)
        if key not in keys and (result.status == "built" or result.path not in built):
            keys.add(key)
            yield result
