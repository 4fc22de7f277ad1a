"""Build kernels side by side, and the launch records of a call as soon as its kernels are built."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jitkern.compilers import child_process, compiler_for
from jitkern.errors import CacheError, JitkernError, NotCached
from jitkern.jit import announcement, exact_target
from jitkern.named_tuple import NamedTuple
from jitkern.op import recorder
from jitkern.op.needed_kernels import units_of
from jitkern.prewarming.agenda import Agenda
from jitkern.prewarming.records import Known, Records, Steps
from jitkern.prewarming.tasks import (
    NOT_TRIED,
    Broken,
    Group,
    Kernel,
    Launches,
    Manner,
    Message,
    More,
    Note,
    Result,
)
from jitkern.prewarming.workers import Died, Done, workers
from jitkern.runtime import binding
from jitkern.source.kinds import ITSELF
from jitkern.target import Target, this_platform

_LEFT_OUT = "one of several configurations is left out: "
_log = logging.getLogger(__name__)
_EVERY_BUILD = ("jitkern.source.provenance", "jitkern.cache.eviction")  # imported by each build


class Step(NamedTuple):
    """A step of progress: one more of `total` results (`finished`), or a remark."""

    done: int
    total: int
    text: str
    finished: bool
    result: Result | None = None


class _Work:
    """The work for a group: the numbers of its tasks, its failures and its notes."""

    def __init__(self, group: Group, agenda: Agenda) -> None:
        op, (_, source, target) = group.op, group
        units, problems = units_of(op, source, target.device, group.samples, target)
        self.group = group
        self.failed = [Result(op.name, "", str(target), "failed", reason=p) for p in problems]
        self.kernels: dict[int, None] = {}
        self.launchers: list[int] = []
        self.choices: list[list[list[set[int]]]] = []  # of each call; see `needed_kernels`
        self.notes: dict[str, None] = {}
        refused = dict.fromkeys(why for unit in units for why in unit.left_out)
        self.left_out = [
            Result(op.name, "", str(target), "skipped", reason=f"{_LEFT_OUT}{why}")
            for why in refused
        ]
        host = Target.current("cpu")._replace(torch=target.torch)
        self.runtime = agenda.kernel("jitkern::runtime", binding.variant(), host)
        here = target.for_host_code().platform == this_platform()
        for unit in units:
            kernels = {
                variant: agenda.kernel(op.name, variant, target, place)
                for variant, place in unit.variants.items()
            }
            self.kernels |= dict.fromkeys(kernels.values())
            self.choices += [
                [[{kernels[v] for v in launch} for launch in run] for run in choices]
                for choices in unit.choices
            ]
            if here and unit.calls:
                self.launchers.append(agenda.launchers(group, unit.calls, kernels.values()))
        self.recorder: int | None = None
        same_torch = host.torch == Target.current("cpu").torch  # whose headers are here
        if self.launchers and same_torch and group.wanted.node:
            variant = recorder.variant()
            self.recorder = agenda.kernel(recorder.NAME, variant, host, optional=True)


class Builder:
    """A builder of groups, which performs `jobs` tasks at once.

    keep_going: go on after a failed build. refresh: build cached entries again.
    found: the groups whose entries are all in the cache according to a record.
    known: the results of each group, once it is built.
    """

    def __init__(
        self,
        jobs: int,
        progress: Callable[[Step], object],
        *,
        keep_going: bool = False,
        refresh: bool = False,
    ) -> None:
        self.found: set[Group] = set()
        self.known: dict[Group, Known] = {}
        self._jobs = jobs
        self._progress = progress
        self._done = 0
        self._total = 0
        self._manner = Manner(refresh=refresh, keep_going=keep_going)
        self._stopped = False
        self._agenda = Agenda()
        self._works: list[_Work] = []
        self._broken: set[int] = set()  # the kernels that did not compile
        self._work_of: dict[int, _Work] = {}  # by the numbers of its launchers
        self._rows: dict[int, list[Result]] = {}
        self._launches: dict[int, list[Result]] = {}

    def build(self, groups: Sequence[Group]) -> list[Result]:
        """Return results: kernels, the runtime, launch records, each in the order of `groups`.

        Raises CacheError if the cache is unusable.
        """
        records = Records()
        for group in groups:
            record = records.find(group)  # with --refresh, too: this fixes the fingerprint
            if record and not self._manner.refresh:
                self.known[group] = record
        self.found = {*self.known}
        works = self._make([group for group in groups if group not in self.known])
        for group, work in works.items():
            self.known[group] = Known(self._steps(work), [*work.notes])
            if not self._stopped:
                records.keep(group, self.known[group])
        for group in self.found:
            for note in self.known[group].notes:
                self._tell(note)
        return in_steps([self.known[group] for group in groups])

    def _make(self, groups: Iterable[Group]) -> dict[Group, _Work]:
        """Perform all tasks of the groups."""
        works = {group: _Work(group, self._agenda) for group in groups}
        self._works = [*works.values()]
        kernels = {number: None for work in works.values() for number in work.kernels}
        extensions = sum(self._kernel(n).variant.source.runs == ITSELF for n in kernels)
        self._manner = self._manner._replace(places=max(1, self._jobs // max(1, extensions)))
        for number in kernels:
            self._want(number)
        for work in works.values():
            if work.recorder is not None:
                self._want(work.recorder)
            for number in work.launchers:
                self._work_of[number] = work
                self._agenda.want(number)
        if any(work.failed for work in works.values()):
            self._fail()
        jobs = min(self._jobs, max(len(kernels), len(self._work_of)))
        if jobs > 1 and not self._stopped:
            _prepare(self._kernel(number) for number in {*kernels, *_runtimes(works)})
        if kernels or self._work_of:
            with announcement.silence():  # `progress` tells
                self._perform(jobs)
        return works

    def _perform(self, jobs: int) -> None:
        """Perform the agenda's tasks."""
        crew = workers(jobs, self._messages)
        finished = False
        try:
            while True:
                while crew.free and (number := self._agenda.take()) is not None:
                    crew.give(number)
                if not crew.busy:
                    break
                for number, message in crew.messages():
                    self._hear(number, message)
            finished = True
        except KeyboardInterrupt:
            child_process.kill_all()  # only the children: a notebook goes on after a Ctrl-C
            raise
        finally:
            crew.close(at_once=not finished)

    def _messages(self, number: int) -> Iterator[Message]:
        """Perform a task, in a worker if there are workers. Raises CacheError.

        Any other error becomes the result of this task alone.
        """
        task = self._agenda.tasks[number]
        try:
            yield from task.perform(self._manner)
        except Exception as e:
            if isinstance(e, CacheError) and not isinstance(e, NotCached):
                raise  # nothing can be kept
            _log.debug("%s failed", task, exc_info=True)
            ours = isinstance(e, JitkernError)
            yield Broken(str(e) if ours else f"{type(e).__name__}: {e} ({_where(e)})")

    def _hear(self, number: int, message: Message | Done | Died) -> None:
        match message:
            case Result(status="failed", reason=reason) if number not in self._work_of:
                self._fail_task(number, reason)
            case Result():
                self._note(number, message)
            case Broken(reason):
                self._fail_task(number, reason)
            case Died(reason):
                self._fail_task(number, reason)
                self._agenda.finish(number)
            case Note(text):
                notes = self._work_of[number].notes
                if text not in notes:
                    notes[text] = None
                    self._tell(text)
            case More(count):
                self._total += count
            case Launches(results):
                self._launches[number] = results
                if results:
                    self._want(self._work_of[number].runtime)
            case Done():
                self._agenda.finish(number)

    def _tell(self, text: str, result: Result | None = None) -> None:
        self._done += result is not None
        self._progress(Step(self._done, self._total, text, result is not None, result))

    def _fail_task(self, number: int, reason: str) -> None:
        self._total += number in self._work_of  # which was not counted
        task = self._agenda.tasks[number]
        status = "skipped" if isinstance(task, Kernel) and task.optional else "failed"
        self._broken.add(number)
        choices = [c for work in self._works for c in work.choices if _is_among(number, c)]
        if choices and all(self._has_another(c) for c in choices):
            status, reason = "skipped", f"{_LEFT_OUT}{reason}"
        self._note(number, task.result(status, reason=reason))

    def _has_another(self, choices: list[list[set[int]]]) -> bool:
        """Whether a call has configurations left, none of whose launches is broken."""
        return any(all(launch - self._broken for launch in run) for run in choices)

    def _note(self, number: int, result: Result) -> None:
        """Keep a result, and report it as progress; of what calls do without, only the latter."""
        task = self._agenda.tasks[number]
        if result.path or not (isinstance(task, Kernel) and task.optional):
            self._rows.setdefault(number, []).append(result)
        what = f"{result.status:7} {result.op} {result.variant} {result.target}"
        self._tell(f"{what} {result.seconds:.2f} s", result)
        if result.status == "failed":
            self._fail()

    def _want(self, number: int) -> None:
        self._total += not self._stopped and self._agenda.want(number)

    def _fail(self) -> None:
        """Begin no more tasks after a failed build, unless `keep_going` is set."""
        if self._manner.keep_going or self._stopped:
            return
        self._stopped = True
        for number in self._agenda.drop():
            task = self._agenda.tasks[number]
            if isinstance(task, Kernel):
                self._note(number, task.result("skipped", reason=NOT_TRIED))

    def _kernel(self, number: int) -> Kernel:
        task = self._agenda.tasks[number]
        assert isinstance(task, Kernel)
        return task

    def _steps(self, work: _Work) -> Steps:
        """Return a group's results: of kernels, of what all ops need, and of launch records."""
        if work.failed and self._stopped:
            return work.failed[:1], [], []
        refused = self._gathered(work.launchers)
        recorders = [] if work.recorder is None else [work.recorder]
        launches = [
            result for number in work.launchers for result in self._launches.get(number, [])
        ]
        runtimes = self._gathered([work.runtime, *recorders] if launches else [])
        kernels = [*work.failed, *work.left_out, *self._gathered(work.kernels)]
        return kernels, [*runtimes, *refused], launches

    def _gathered(self, numbers: Iterable[int]) -> list[Result]:
        return [result for number in numbers for result in self._rows.get(number, [])]


def _is_among(number: int, choices: list[list[set[int]]]) -> bool:
    return any(number in launch for run in choices for launch in run)


def in_steps(known: Iterable[Known]) -> list[Result]:
    """Return the results of groups: all kernels, then the runtime, then all launch records."""
    steps = zip(*(group.steps for group in known))
    return list(_once([result for step in steps for results in step for result in results]))


def _once(results: list[Result]) -> Iterator[Result]:
    """Yield each result once, though groups may share an entry; as built, if it was built now."""
    built = {result.path for result in results if result.status == "built"}
    keys: set[Any] = set()
    for result in results:
        key = result.path or id(result)
        if key not in keys and (result.status == "built" or result.path not in built):
            keys.add(key)
            yield result


def _where(e: Exception) -> str:
    """Return the line that raised an error."""
    *_, last = traceback.extract_tb(e.__traceback__)
    return f"{last.filename}:{last.lineno}"


def _runtimes(works: dict[Group, _Work]) -> set[int]:
    return {work.runtime for work in works.values() if work.launchers}


def _prepare(kernels: Iterable[Kernel]) -> None:
    """Do once what each worker would repeat: imports, and the identification of compilers."""
    for module in _EVERY_BUILD:
        importlib.import_module(module)
    identify = functools.cache(lambda source, exact: compiler_for(source).identities(source, exact))
    for kernel in kernels:
        source = kernel.variant.source
        if source.runs != ITSELF:
            with contextlib.suppress(JitkernError, OSError):  # the build will report it
                identify(source, exact_target(kernel.variant, kernel.target))
