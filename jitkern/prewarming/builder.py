"""Build the kernels that calls need, and then publish the launch records of the calls."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Recorded(NamedTuple):
    """The outcome for the launch records of calls.

    refused: why calls cannot be launched. notes: why others keep to their Python launcher.
    """

    refused: Sequence[str]
    notes: Sequence[str] = ()
    launches: Sequence[Result] = ()


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
    refused: list[Result] = field(default_factory=list)
    launches: list[Result] = field(default_factory=list)

    def recorded(
        self, calls: list[tuple[Any, ...]], entries: dict[Variant, Entry], read: Reader
    ) -> Recorded:
        """Trace calls, check those without a trace, and publish launch records. Raises CacheError.

        entries: of kernels that were looked up before.
        """
        op, source, target = self.group.op, self.group.source, self.group.target
        try:
            traces, reasons, without = traces_of(op, source, target, calls, entries)
            # A trace has made the checks of its launches.
            if refused := refused_by(op, source, target, without, entries):
                return Recorded(refused)
            kept = [keep(one.calls, one.trace, read) for one in traces]
            launches = [
                Result(
                    op.name, entry.variant, entry.path.parent.name, "built" if new else "hit",
                    path=str(entry.path),
                )
                for entry, new in filter(None, kept)
            ]  # fmt: skip
        except Exception as e:  # noqa: BLE001  whatever its author's code raises
            _log.debug("the calls of %s failed", op.name, exc_info=True)
            return Recorded([reason_of(e)])
        notes = [f"{op.name} for {target} stays on the Python launcher: {r}" for r in reasons]
        return Recorded([], notes, launches)


class Builder:
    """Builds groups, `jobs` tasks at once.

    elsewhere: who compiles kernels in place of this machine. keep_going: go on after a failed
    build. refresh: build cached entries again.
    """

    def __init__(
        self,
        jobs: int,
        progress: Callable[[Step], object],
        *,
        elsewhere: ExecutorBuilder | None = None,
        keep_going: bool = False,
        refresh: bool = False,
    ) -> None:
        self._jobs = jobs
        self._progress = progress
        self._elsewhere = elsewhere
        self._keep_going = keep_going
        self._refresh = refresh
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
        self._stopped = any(work.failed for work in self._works) and not self._keep_going
        self._total = len(self._kernels) + sum(len(work.calls) for work in self._works)
        with announcement.silence():  # the progress tells what a user waits for
            self._build(sorted(self._kernels.values(), key=lambda k: -k.variant.source.seconds))
            if not self._stopped:
                self._record([(work, calls) for work in self._works for calls in work.calls])
        steps = zip(*(self._steps(work) for work in self._works))
        return list(_once([result for step in steps for part in step for result in part]))

    def _build(self, kernels: Sequence[Kernel]) -> None:
        """Find or build kernels; after a failed build no more are begun, unless `keep_going`."""
        left = dict.fromkeys(kernels)
        if not self._stopped and not self._refresh:
            with closure.each_once():
                for kernel in kernels:
                    if entry := kernel.found():
                        del left[kernel]
                        self._found[kernel] = entry
                        self.take(kernel, kernel.result("hit", path=str(entry.path)))
        if left and not self._stopped:
            built = (
                self._elsewhere.built([*left], lambda: self._stopped) if self._elsewhere
                else built_here(
                    [*left], self._jobs, lambda: self._stopped,
                    early=self._early, refresh=self._refresh,
                )
            )  # fmt: skip
            with contextlib.closing(built):
                for kernel, result in built:
                    del left[kernel]
                    self.take(kernel, result)
        for kernel in left:
            self.take(kernel, kernel.result("skipped", reason=NOT_TRIED))

    def _record(self, calls: Sequence[tuple[_Work, list[tuple[Any, ...]]]]) -> None:
        """Publish the launch records of calls whose kernels are there."""
        entries, read = self._entries(), reader()

        def recorded(number: int) -> Recorded:
            work, alike = calls[number]
            return work.recorded(alike, entries[work.group.target], read)

        waiting = deque(range(len(calls)))
        outcomes: dict[int, Recorded] = {}
        done = workers.results(waiting, recorded, min(self._jobs, len(waiting)))
        with contextlib.closing(done):
            for number, outcome in done:
                dead = isinstance(outcome, workers.Died)
                outcomes[number] = Recorded([str(outcome)]) if dead else outcome
                self._note(calls[number][0].group, outcomes[number])
                if self._stopped:
                    waiting.clear()
        for number in sorted(outcomes):
            work, _ = calls[number]
            work.launches += outcomes[number].launches
            work.refused += [work.group.result("failed", r) for r in outcomes[number].refused]

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
        units, problems = units_of(op, source, target.device, group.samples, target)
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
        variant: Variant = kernel.variant
        build: tuple[Any, ...] = variant, kernel.target
        if isinstance(variant.source, Extension):
            build = variant.source.shared_build, kernel.target
        return self._kernels.setdefault(build, kernel)

    def take(self, kernel: Kernel, result: Result) -> None:
        """Note the result of a kernel. That of a configuration that calls do without is skipped."""
        if result.status == "failed":
            self._broken.add(kernel)
            every = [choices for work in self._works for choices in work.choices]
            choices = [c for c in every if any(kernel in launch for run in c for launch in run)]
            if choices and all(map(self._has_another, choices)):
                result = result._replace(status="skipped", reason=f"{_LEFT_OUT}{result.reason}")
        if result.path or not kernel.optional:
            self._results[kernel] = result
        self._done += 1
        self._tell(result)

    def _early(self, kernel: Kernel) -> bool:
        """Whether nothing is there yet that a kernel serves, which calls do without."""
        works = [work for work in self._works if kernel.optional and kernel in work.of_all_ops]
        return kernel.optional and not any(
            not work.kernels
            or any(k in self._results and self._results[k].path for k in work.kernels)
            for work in works
        )

    def _has_another(self, choices: list[list[set[Kernel]]]) -> bool:
        """Whether a call has a configuration left without a failed launch."""
        return any(all(launch - self._broken for launch in run) for run in choices)

    def _note(self, group: Group, recorded: Recorded) -> None:
        """Tell what came of the launch records of calls that use the same kernels."""
        for text in recorded.notes:
            if text not in self._notes:
                self._notes.add(text)
                self._progress(Step(self._done, self._total, text, finished=False))
        self._done += 1
        for reason in recorded.refused:
            self._tell(group.result("failed", reason))
        if not recorded.refused:
            text = f"traced  {group.op.name} {group.target}"
            self._progress(Step(self._done, self._total, text, finished=True))

    def _tell(self, result: Result) -> None:
        """Report a result as progress; after a failed build begin no more, unless `keep_going`."""
        what = f"{result.status:7} {result.op} {result.variant} {result.target}"
        text = f"{what} {result.seconds:.2f} s"
        self._progress(Step(self._done, self._total, text, finished=True, result=result))
        if result.status == "failed" and not self._keep_going:
            self._stopped = True

    def _steps(self, work: _Work) -> tuple[list[Result], list[Result], list[Result]]:
        """Return a group's results: of kernels, of what all ops need, and of launch records."""
        if work.failed and self._stopped:
            return work.failed[:1], [], []
        kernels = [*work.failed, *work.left_out, *self._of(work.kernels)]
        of_all_ops = self._of(work.of_all_ops) if work.launches else []
        return kernels, [*of_all_ops, *work.refused], work.launches

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
