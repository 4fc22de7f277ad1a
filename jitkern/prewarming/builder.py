"""Build kernels, and the launch records of calls as soon as their kernels are there."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jitkern.jit import announcement
from jitkern.op import recorder
from jitkern.op.needed_kernels import units_of
from jitkern.prewarming import pool
from jitkern.prewarming.ahead import keep_all, refused_by, traces_of
from jitkern.prewarming.tasks import NOT_TRIED, Group, Kernel, Result, Step, compilers_of, reason_of
from jitkern.runtime import binding
from jitkern.source.kinds import Extension, Variant
from jitkern.target import Target, this_platform

if TYPE_CHECKING:
    from jitkern.prewarming.parts import Workers

_LEFT_OUT = "one of several configurations is left out: "
_LONGEST_FIRST = ("extension", "triton")  # kinds of source
_log = logging.getLogger(__name__)


class Recorded(NamedTuple):
    """What came of the launch records of calls.

    refused: why calls cannot be launched. notes: why others keep to their Python launcher.
    """

    refused: list[str]
    notes: Sequence[str] = ()
    launches: Sequence[Result] = ()


class _Calls:
    """Calls of a group that use the same kernels, and what came of their launch records."""

    def __init__(self, group: Group, calls: list[tuple[Any, ...]], kernels: set[Kernel]) -> None:
        self.group = group
        self.calls = calls
        self.kernels = kernels
        self.refused: list[Result] = []
        self.launches: Sequence[Result] = ()

    def recorded(self) -> Recorded:
        """Check the calls, trace them, and publish their launch records. Raises CacheError."""
        op, source, target = self.group.op, self.group.source, self.group.target
        try:
            if refused := refused_by(op, source, target, self.calls):
                return Recorded(refused)
            traces, reasons = traces_of(op, source, target, self.calls)
            launches = [
                Result(
                    op.name, entry.variant, entry.path.parent.name, "built" if new else "hit",
                    path=str(entry.path),
                )
                for entry, new in keep_all(op, source, target, traces)
            ]  # fmt: skip
        except Exception as e:  # noqa: BLE001  whatever its author's code raises
            _log.debug("the calls of %s failed", op.name, exc_info=True)
            return Recorded([reason_of(e)])
        notes = [f"{op.name} for {target} keeps to its Python launcher: {r}" for r in reasons]
        return Recorded([], notes, launches)


class _Work:
    """The work for a group, and what came of it.

    failed: the calls whose kernels are unknown. choices: of each call, the launches of each of its
    configurations, one of which is enough; see `needed_kernels`.
    """

    def __init__(self, group: Group, failed: list[Result], left_out: list[Result]) -> None:
        self.group = group
        self.failed = failed
        self.left_out = left_out
        self.kernels: dict[Kernel, None] = {}
        self.of_all_ops: dict[Kernel, None] = {}  # which launch records need beside the kernels
        self.calls: list[_Calls] = []
        self.choices: list[list[list[set[Kernel]]]] = []


class Builder:
    """Builds groups, `jobs` tasks at once.

    workers: who compiles kernels in place of this machine. keep_going: go on after a failed build.
    refresh: build cached entries again.
    """

    def __init__(
        self,
        jobs: int,
        progress: Callable[[Step], object],
        *,
        workers: Workers | None = None,
        keep_going: bool = False,
        refresh: bool = False,
    ) -> None:
        self._jobs = jobs
        self._progress = progress
        self._workers = workers
        self._keep_going = keep_going
        self._refresh = refresh
        self._compilers = jobs
        self._stopped = False
        self._done = 0
        self._total = 0
        self._kernels: dict[tuple[Any, ...], Kernel] = {}
        self._works: list[_Work] = []
        self._tasks: list[Kernel | _Calls] = []
        self._results: dict[Kernel, Result] = {}
        self._ended: set[Kernel] = set()
        self._broken: set[Kernel] = set()
        self._notes: set[str] = set()

    def build(self, groups: Iterable[Group]) -> list[Result]:
        """Return results: kernels, the runtime, launch records, each in the order of `groups`.

        Raises CacheError if the cache is unusable.
        """
        self._works = [self._planned(group) for group in dict.fromkeys(groups)]
        self._stopped = any(work.failed for work in self._works) and not self._keep_going
        kernels = sorted(self._kernels.values(), key=_cost)
        calls = [calls for work in self._works for calls in work.calls]
        self._total = len(kernels)
        self._compilers = compilers_of(kernels, self._jobs)
        self._tasks = [*kernels, *calls]
        if self._workers and not self._stopped:
            with contextlib.closing(self._workers.built(kernels)) as built:
                for kernel, result in built:
                    self._take(kernel, result)
        self._perform({*range(len(self._tasks))})
        steps = zip(*(self._steps(work) for work in self._works))
        return list(_once([result for step in steps for part in step for result in part]))

    def _perform(self, left: set[int]) -> None:
        """Perform the tasks of these numbers, calls after their kernels."""
        kernels = {kernel for work in self._works for kernel in work.kernels}
        calls = sum(len(work.calls) for work in self._works)
        jobs = min(self._jobs, max(len(kernels), calls))
        ready: deque[int] = deque()
        self._move(left, ready)
        with (
            announcement.silence(),  # the progress tells what a user waits for
            contextlib.closing(pool.results(ready, self._result_of, jobs)) as results,
        ):
            for number, result in results:
                task = self._tasks[number]
                dead = isinstance(result, pool.Died)
                if isinstance(task, Kernel):
                    self._take(task, task.failed(result.reason) if dead else result)
                else:
                    self._note(task, Recorded([result.reason]) if dead else result)
                self._move(left, ready)

    def _move(self, left: set[int], ready: deque[int]) -> None:
        """Move the tasks that wait for nothing to `ready`; after a failed build, drop all."""
        for number in sorted(left):
            task = self._tasks[number]
            if isinstance(task, Kernel):
                left.discard(number)
                if task not in self._ended:
                    ready.append(number)
            elif task.kernels <= self._ended:
                left.discard(number)
                ready.append(number)
        if self._stopped:
            left.clear()
            for task in [self._tasks[number] for number in ready]:
                if isinstance(task, Kernel):
                    self._take(task, task.result("skipped", reason=NOT_TRIED))
            ready.clear()

    def _result_of(self, number: int) -> Result | Recorded:
        task = self._tasks[number]
        if isinstance(task, Kernel):
            return task.built(self._compilers, refresh=self._refresh)
        return task.recorded()

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
                work.calls.append(_Calls(group, unit.calls, {*kernels.values()}))
        if work.calls:
            host = Target.current("cpu")._replace(torch=target.torch)
            work.of_all_ops[self._kernel(Kernel(binding.variant(), host))] = None
            if group.wanted.node and host == Target.current("cpu"):  # whose headers are here
                node = Kernel(recorder.variant(), host, optional=True)
                work.of_all_ops[self._kernel(node)] = None
        return work

    def _kernel(self, kernel: Kernel) -> Kernel:
        """Return the kernel that stands for this build, which several groups may share."""
        variant: Variant = kernel.variant
        build: tuple[Any, ...] = variant, kernel.target
        if isinstance(variant.source, Extension):
            build = variant.source.shared_build, kernel.target
        return self._kernels.setdefault(build, kernel)

    def _take(self, kernel: Kernel, result: Result) -> None:
        """Note the result of a kernel. That of a configuration that calls do without is skipped."""
        self._ended.add(kernel)
        if result.status == "failed":
            self._broken.add(kernel)
            choices = [c for work in self._works for c in work.choices if _is_among(kernel, c)]
            if choices and all(map(self._has_another, choices)):
                result = result._replace(status="skipped", reason=f"{_LEFT_OUT}{result.reason}")
        if result.path or not kernel.optional:
            self._results[kernel] = result
        self._tell(result)

    def _has_another(self, choices: list[list[set[Kernel]]]) -> bool:
        """Whether a call has configurations left, none of whose launches is broken."""
        return any(all(launch - self._broken for launch in run) for run in choices)

    def _note(self, calls: _Calls, recorded: Recorded) -> None:
        """Note what came of the launch records of calls."""
        calls.launches = recorded.launches
        for text in recorded.notes:
            if text not in self._notes:
                self._notes.add(text)
                self._progress(Step(self._done, self._total, text, finished=False))
        for reason in recorded.refused:
            result = calls.group.result("failed", reason)
            calls.refused.append(result)
            self._total += 1
            self._tell(result)

    def _tell(self, result: Result) -> None:
        """Report a result as progress; after a failed build begin no more, unless `keep_going`."""
        self._done += 1
        what = f"{result.status:7} {result.op} {result.variant} {result.target}"
        text = f"{what} {result.seconds:.2f} s"
        self._progress(Step(self._done, self._total, text, finished=True, result=result))
        if result.status == "failed" and not self._keep_going:
            self._stopped = True
            if self._workers:
                self._workers.stop()

    def _steps(self, work: _Work) -> tuple[list[Result], list[Result], list[Result]]:
        """Return a group's results: of kernels, of what all ops need, and of launch records."""
        if work.failed and self._stopped:
            return work.failed[:1], [], []
        kernels = [*work.failed, *work.left_out, *self._of(work.kernels)]
        launches = [result for calls in work.calls for result in calls.launches]
        of_all_ops = self._of(work.of_all_ops) if launches else []
        refused = [result for calls in work.calls for result in calls.refused]
        return kernels, [*of_all_ops, *refused], launches

    def _of(self, kernels: Iterable[Kernel]) -> list[Result]:
        return [self._results[kernel] for kernel in kernels if kernel in self._results]


def _cost(kernel: Kernel) -> int:
    """Return the rank of a kernel: those that take long come first."""
    kind = kernel.variant.source.kind
    return _LONGEST_FIRST.index(kind) if kind in _LONGEST_FIRST else len(_LONGEST_FIRST)


def _is_among(kernel: Kernel, choices: list[list[set[Kernel]]]) -> bool:
    return any(kernel in launch for run in choices for launch in run)


def _once(results: list[Result]) -> Iterator[Result]:
    """Yield each result once, though groups may share an entry; as built, if it was built now."""
    built = {result.path for result in results if result.status == "built"}
    keys: set[Any] = set()
    for result in results:
        key = result.path or id(result)
        if key not in keys and (result.status == "built" or result.path not in built):
            keys.add(key)
            yield result
