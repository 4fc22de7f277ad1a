"""The parts of a prewarm, given to the workers of an engine, and their entries brought together."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, Protocol

from jitkern import config, jit
from jitkern.cache_tools import bundle, listing
from jitkern.cache_tools.ustar import BundleError
from jitkern.calls.samples import Sample
from jitkern.errors import JitkernError
from jitkern.op.needed_kernels import digest_of
from jitkern.prewarming.builder import Step, in_steps
from jitkern.prewarming.identity import code_of_jitkern
from jitkern.prewarming.parts import Outcome, Part, Share, adopt, keys_of, packed, perform
from jitkern.prewarming.records import Known, Records
from jitkern.prewarming.tasks import NOT_TRIED, Group, Result
from jitkern.source.kinds import ITSELF, Variant

PARTS_OF_A_WORKER = 4  # so that a worker with short builds takes over from one with long builds
_WORKERS = 4  # of an executor that does not tell
_PAUSE = 0.05  # seconds between two looks at what the workers have done
_SENT = ("compile", "compiler")  # the settings that workers take over


class Job(Protocol):
    """A part in the hands of an engine: a Future, or what submitit returns."""

    def done(self) -> bool: ...
    def result(self) -> Any: ...
    def cancel(self) -> object: ...


class Executor(Protocol):
    """An engine, as `concurrent.futures` and submitit have it."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Job: ...


class Fleet:
    """A builder of groups, which lets the workers of an executor build.

    parts: how many to make, 0 for a default. jobs: builds at once in each part.
    found: the groups whose entries are all in the cache according to a record.
    """

    def __init__(
        self,
        executor: Executor,
        progress: Callable[[Step], object],
        *,
        parts: int = 0,
        jobs: int = 1,
        keep_going: bool = False,
    ) -> None:
        self.found: set[Group] = set()
        self._executor = executor
        self._progress = progress
        self._parts = parts
        self._settings = {name: getattr(config.current(), name) for name in _SENT}
        self._settings["jobs"] = jobs
        self._keep_going = keep_going
        self._cache = jit.open_cache()
        self._stopped = False

    def build(self, groups: Sequence[Group]) -> list[Result]:
        """Return results: kernels, the runtime, launch records, each in the order of `groups`.

        No worker gets what the cache has. Raises CacheError if the cache is unusable.
        """
        records = Records()
        known = {group: record for group in groups if (record := records.find(group))}
        self.found = {*known}
        for group in groups:
            if group not in known and (result := self._extension_of(group)):
                known[group] = Known(([result], [], []), [])
        pending = [group for group in dict.fromkeys(groups) if group not in known]
        known |= self._built(pending)
        for group in pending:
            if all(result.path for step in known[group].steps for result in step):
                records.keep(group, known[group])
        for note in dict.fromkeys(note for group in groups for note in known[group].notes):
            self._progress(Step(0, 0, note, finished=False))
        return in_steps([known[group] for group in groups])

    def _extension_of(self, group: Group) -> Result | None:
        """Return the result for an extension that the cache has: it may be too large to be sent."""
        if group.source.runs == ITSELF and group.samples:
            variant = Variant(group.op.name, group.source)
            with contextlib.suppress(JitkernError, OSError):  # the build will report it
                key = jit.key_of(variant, group.target)
                if entry := self._cache.find(key):
                    path = str(entry.path)
                    return Result(group.op.name, variant.label, key.target, "hit", path=path)
        return None

    def _built(self, pending: Sequence[Group]) -> dict[Group, Known]:
        """Return what the workers did for each group."""
        known: dict[Group, Known] = {group: Known(([], [], []), []) for group in pending}
        dealt = self._dealt(pending) if pending else []
        if not dealt:
            return known
        given, code = self._given(pending), code_of_jitkern()
        parts = [
            Part(packed([*share.values()]), given, self._settings, self._keep_going, code)
            for share in dealt
        ]
        self._progress(Step(0, len(parts), "the parts are with the workers", finished=True))
        for done, (number, outcome) in enumerate(self._outcomes(parts), 1):
            found = self._taken([*dealt[number]], outcome)
            for group, more in zip(dealt[number], found):
                for step, results in zip(known[group].steps, more.steps):
                    step.extend(results)
                known[group].notes.extend(more.notes)
            results = in_steps(found)
            self._tell(done, len(parts), f"part {number + 1}", outcome, results)
            if any(result.status == "failed" for result in results):
                self._stopped = not self._keep_going
        return known

    def _dealt(self, pending: Sequence[Group]) -> list[dict[Group, Share]]:
        """Deal the calls out evenly, by the kernels that they use: the shares of each part."""
        units: dict[tuple[str, str, str, str], tuple[Group, list[Sample]]] = {}
        digests: dict[tuple[Any, ...], list[str]] = {}
        for group in pending:
            op, (wanted, source, target) = group.op, group
            calls = wanted, source, target.device
            if calls not in digests:
                digests[calls] = [
                    digest_of(op, source, target.device, sample.args) for sample in group.samples
                ]
            for sample, digest in zip(group.samples, digests[calls]):
                unit = (target.device, source.kind, digest, str(target))
                units.setdefault(unit, (group, []))[1].append(sample)
        most = self._parts or PARTS_OF_A_WORKER * _workers_of(self._executor)
        count = min(most, len(units))
        dealt: list[dict[Group, Share]] = []
        for number in range(count):
            part: dict[Group, list[Sample]] = {}
            for unit in sorted(units)[number::count]:
                group, samples = units[unit]
                part.setdefault(group, []).extend(samples)
            dealt.append({group: _share(group, samples) for group, samples in part.items()})
        return dealt

    def _given(self, pending: Sequence[Group]) -> bytes:
        """Return a bundle of all entries that workers need not build, or choose between."""
        wanted = [listing.Wanted(op) for op in listing.OF_ALL_OPS]
        for op, target in dict.fromkeys((group.op.name, group.target) for group in pending):
            of_target = f"{target.for_device_code()}*" if target.device == "cuda" else "cpu-*"
            wanted.append(listing.Wanted(op, of_target))
        found = (pair for one in wanted for pair in listing.chosen(self._cache, one))
        entries = bundle.fitting(entry for row, entry in found if row.kind != "extension")
        return bundle.packed(self._cache, entries) if entries else b""

    def _outcomes(self, parts: Sequence[Part]) -> Iterator[tuple[int, Outcome | str]]:
        """Yield the number of each part with its outcome, or with the reason for having none.

        An engine retries what a dead worker had begun; submitit does not, so it is asked once more.
        """
        again: set[int] = set()
        cancelled = False
        with getattr(self._executor, "batch", contextlib.nullcontext)():  # of submitit: one array
            jobs = [*enumerate(self._executor.submit(perform, part) for part in parts)]
        try:
            while jobs:
                left = []
                if self._stopped and not cancelled:
                    cancelled = True
                    _cancel(jobs)
                for number, job in jobs:
                    if not job.done():
                        left.append((number, job))
                        continue
                    outcome = _outcome_of(job)
                    lost = isinstance(outcome, str) and not isinstance(job, Future)
                    if lost and cancelled:
                        yield number, NOT_TRIED
                    elif lost and number not in again:
                        again.add(number)
                        left.append((number, self._executor.submit(perform, parts[number])))
                    else:
                        yield number, outcome
                if len(left) == len(jobs):
                    time.sleep(_PAUSE)
                jobs = left
        finally:
            _cancel(jobs)

    def _taken(self, groups: Sequence[Group], outcome: Outcome | str) -> list[Known]:
        """Bring the entries of a part into the cache; returns the results for its groups."""

        def here(results: list[Result]) -> list[Result]:
            return [self._here(result) for result in results]

        reason = outcome if isinstance(outcome, str) else outcome.problem
        if isinstance(outcome, Outcome) and not reason and len(outcome.known) != len(groups):
            reason = f"its worker has results for {len(outcome.known)} of {len(groups)} sources"
        if isinstance(outcome, Outcome) and not reason:
            try:
                adopt(self._cache, outcome.bundle)
                return [
                    Known((here(kernels), here(runtimes), here(launches)), notes)
                    for (kernels, runtimes, launches), notes in outcome.known
                ]
            except BundleError as e:
                reason = f"the bundle of its part is refused: {e}"
        status = "skipped" if reason == NOT_TRIED else "failed"
        rows = [Result(g.op.name, "", str(g.target), status, reason=reason) for g in groups]
        return [Known(([row], [], []), []) for row in rows]

    def _here(self, result: Result) -> Result:
        """Return a worker's result as one of this cache."""
        if not result.path:
            return result
        *_, target, name = Path(result.path).parts
        entry = self._cache.look_up(target, name).entry
        if entry is None:
            reason = f"its entry {target}/{name} is not in the bundle of its part"
            return result._replace(status="failed", path="", reason=reason)
        return result._replace(path=str(entry.path))

    def _tell(
        self, done: int, total: int, part: str, outcome: Outcome | str, results: list[Result]
    ) -> None:
        """Report a part as progress, and each failure in it."""
        for result in results:
            if result.status == "failed":
                self._progress(Step(done - 1, total, result.reason, finished=False, result=result))
        count = Counter(result.status for result in results)
        text = f"{part}: not done"
        if isinstance(outcome, Outcome):
            text = f"{part} on {outcome.host} in {outcome.seconds:.1f} s"
        text += f": {count['built']} built, {count['hit']} already there, {count['failed']} failed"
        self._progress(Step(done, total, text, finished=True))


def _workers_of(executor: Executor) -> int:
    """Return how many parts an executor does at once, as far as it tells."""
    told = (getattr(executor, name, None) for name in ("workers", "_max_workers"))
    return next((count for count in told if isinstance(count, int) and count > 0), _WORKERS)


def _cancel(jobs: Sequence[tuple[int, Job]]) -> None:
    for _, job in jobs:
        job.cancel()


def _outcome_of(job: Job) -> Outcome | str:
    """Return the outcome of a job that is done, or the reason for having none."""
    try:
        outcome = job.result()
    except CancelledError:
        return NOT_TRIED
    except Exception as e:  # noqa: BLE001  whatever an engine raises
        return f"the worker of its part failed: {type(e).__name__}: {e}"
    if not isinstance(outcome, Outcome):
        return f"the worker of its part returned {outcome!r:.80}"
    return outcome


def _share(group: Group, calls: Sequence[Sample]) -> Share:
    op, (_, source, target) = group.op, group
    module = op.declaration.module
    package = sys.modules.get(module.partition(".")[0])
    folders = [*getattr(package, "__path__", ())]
    file = folders[0] if folders else getattr(package, "__file__", None)
    return Share(
        op.name, module, str(Path(file).absolute().parent) if file else "", target.device,
        op.sources[target.device].index(source), str(target), calls, keys_of(group),
        group.wanted.node,
    )  # fmt: skip
