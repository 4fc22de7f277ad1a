"""Tasks of a prewarm: kernels to compile, and then the launch records over them.

A task runs in any process that has imported the op, and yields messages while it runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jitkern import config, jit
from jitkern.cache.entry import Entry
from jitkern.calls.samples import Sample
from jitkern.errors import (
    CacheError,
    CompilerNotFound,
    DeclarationError,
    JitkernError,
    NotCached,
    TargetError,
    told,
)
from jitkern.op.all_ops import OPS
from jitkern.op.op import Op
from jitkern.prewarming.ahead import keep_all, refused_by, traces_of
from jitkern.prewarming.wanted import Wanted
from jitkern.source.kinds import Source, Variant
from jitkern.target import Target

NOT_TRIED = "not tried after a failed build; see --keep-going"


class Group(NamedTuple):
    """A source of an op, for a target."""

    wanted: Wanted
    source: Source
    target: Target

    @property
    def op(self) -> Op:
        """The op."""
        return self.wanted.op

    @property
    def samples(self) -> Sequence[Sample]:
        """The calls to prewarm."""
        return self.wanted.of(self.source, self.target.device)


class Result(NamedTuple):
    """One line of the report; status is built, hit, failed or skipped."""

    op: str
    variant: str
    target: str
    status: str
    seconds: float = 0.0
    path: str = ""
    reason: str = ""


def entries_of(results: Iterable[Result]) -> list[Entry]:
    """Return the entries that a prewarm has built or found. Raises CacheError."""
    cache = jit.open_cache()
    paths = dict.fromkeys(Path(result.path) for result in results if result.path)
    found = (cache.look_up(path.parent.name, path.name).entry for path in paths)
    return [entry for entry in found if entry]


class Manner(NamedTuple):
    """The options with which tasks are performed.

    refresh: build cached entries again. keep_going: go on after a failed build. places: how many
    compilers one build may run at once.
    """

    refresh: bool = False
    keep_going: bool = False
    places: int = 1


class Note(NamedTuple):
    """A remark, which is no result."""

    text: str


class More(NamedTuple):
    """The number of results to come that were not counted before."""

    more: int


class Launches(NamedTuple):
    """The results of launch records, which are in the cache now."""

    results: list[Result]


class Broken(NamedTuple):
    """The end of a task by an unexpected error."""

    reason: str


Message = Result | Note | More | Launches | Broken


class Kernel(NamedTuple):
    """A variant to compile, which several groups may need.

    place: the line that launches it. optional: whether calls do without it, if it does not compile.
    """

    op: str
    variant: Variant
    target: Target
    place: str = ""
    optional: bool = False

    def perform(self, manner: Manner) -> Iterator[Message]:
        """Compile the variant if it is not in the cache."""
        with config.using(jobs=manner.places):
            yield self.built(refresh=manner.refresh)

    def built(self, *, refresh: bool) -> Result:
        """Return the result for its entry, compiled if not in the cache. Raises CacheError."""
        started = time.perf_counter()
        try:
            entry, new = jit.ensure_and_tell(self.variant, self.target, refresh=refresh)
        except (CompilerNotFound, TargetError) as e:
            return self.result("skipped", reason=str(e))
        except JitkernError as e:
            if isinstance(e, CacheError) and not isinstance(e, NotCached):
                raise  # the cache is unusable, so nothing could be kept
            declared = isinstance(e, DeclarationError) and self.op in OPS
            place = OPS[self.op].place if declared else self.place
            status = "skipped" if self.optional else "failed"
            return self.result(status, reason=told(str(e), self.op, place))
        seconds = round(time.perf_counter() - started, 4)
        return self.result("built" if new else "hit", seconds=seconds, path=str(entry.path))

    def result(self, status: str, **rest: Any) -> Result:
        """Return the result of this task."""
        exact = str(jit.exact_target(self.variant, self.target))
        return Result(self.op, self.variant.label, exact, status, **rest)


class Launchers(NamedTuple):
    """The launch records of calls whose kernels, all the same, are in the cache by now."""

    group: Group
    calls: list[tuple[Any, ...]]

    def perform(self, _: Manner) -> Iterator[Message]:
        """Check the calls, trace them, and publish their records."""
        op, source, target = self.group.op, self.group.source, self.group.target
        if refused := refused_by(op, source, target, self.calls):
            yield More(len(refused))
            for reason in refused:
                yield self.result("failed", reason=reason)
            return
        traces, reasons = traces_of(op, source, target, self.calls)
        for reason in reasons:
            yield Note(f"{op.name} for {target} keeps to its Python launcher: {reason}")
        yield Launches([
            Result(
                op.name, entry.variant, entry.path.parent.name, "built" if new else "hit",
                path=str(entry.path),
            )
            for entry, new in keep_all(op, source, target, traces)
        ])  # fmt: skip

    def result(self, status: str, **rest: Any) -> Result:
        """Return the result of the whole task."""
        return Result(self.group.op.name, "", str(self.group.target), status, **rest)


Task = Kernel | Launchers
