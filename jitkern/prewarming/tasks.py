"""The tasks of a prewarm, sources of ops and their kernels, and the lines of its report."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jitkern import config, jit
from jitkern.cache.entry import Entry
from jitkern.compilers import compiler_for
from jitkern.errors import (
    CacheError,
    CompilerNotFound,
    DeclarationError,
    JitkernError,
    NotCached,
    TargetError,
    told,
)
from jitkern.op.op import OPS, Op
from jitkern.prewarming import workers
from jitkern.prewarming.op_calls import OpCalls
from jitkern.source.kinds import ITSELF, Source, Variant
from jitkern.target import Target

NOT_TRIED = "not tried after a failed build; see --keep-going"
SKIPPED = ("skipped", "unsampled")  # the statuses of what is not built, without an error


class Group(NamedTuple):
    """A source of an op, for a target."""

    wanted: OpCalls
    source: Source
    target: Target

    @property
    def op(self) -> Op:
        """The op."""
        return self.wanted.op

    def result(self, status: str, reason: str) -> Result:
        """Return a line about the group as a whole."""
        return Result(self.op.name, "", str(self.target), status, reason=reason)


class Result(NamedTuple):
    """A line of the report. `status`: built, hit, failed, skipped, or unsampled (see `prewarm`)."""

    op: str
    variant: str
    target: str
    status: str
    seconds: float = 0.0
    path: str = ""
    reason: str = ""


class Step(NamedTuple):
    """A step of progress: one more of `total` kernels and traces (`finished`), or a remark."""

    done: int
    total: int
    text: str
    finished: bool
    result: Result | None = None


class Kernel(NamedTuple):
    """A variant to compile, which several groups may need.

    place: the line that launches it. optional: whether calls do without it: it is begun once a
    kernel that it serves is there, and may fail.
    """

    variant: Variant
    target: Target
    place: str = ""
    optional: bool = False

    def built(self, compilers: int, *, refresh: bool = False) -> Result:
        """Return the result for its entry, compiled if not in the cache.

        compilers: how many the build may run at once. Raises CacheError if nothing can be kept.
        Any other error is the result.
        """
        started = time.perf_counter()
        try:
            with config.using(jobs=compilers):
                entry, new = jit.ensure_and_tell(self.variant, self.target, refresh=refresh)
        except (CompilerNotFound, TargetError) as e:
            return self.result("skipped", reason=str(e))
        except Exception as e:  # noqa: BLE001  whatever a compiler raises
            return self.failed(self._told(reason_of(e), e))
        seconds = round(time.perf_counter() - started, 4)
        return self.result("built" if new else "hit", seconds=seconds, path=str(entry.path))

    def found(self) -> Entry | None:
        """Return its entry, or None if the cache does not have it.

        Raises CacheError for an unusable cache.
        """
        try:
            return jit.ensure(self.variant, self.target, may_compile=False)
        except Exception as e:  # noqa: BLE001  whoever builds it reports why it cannot be built
            reason_of(e)
            return None

    def failed(self, reason: str) -> Result:
        """Return the result of a build that failed."""
        return self.result("skipped" if self.optional else "failed", reason=reason)

    def result(self, status: str, **rest: Any) -> Result:
        """Return a result for this kernel."""
        source = self.variant.source
        exact = str(compiler_for(source).target(source, self.target))
        return Result(self.variant.op, self.variant.label, exact, status, **rest)

    def _told(self, reason: str, e: Exception) -> str:
        """Return the reason with the op and the line at fault."""
        if not isinstance(e, JitkernError):
            return reason
        op = self.variant.op
        declared = isinstance(e, DeclarationError) and op in OPS
        return told(reason, op, OPS[op].place if declared else self.place)


def built_here(
    kernels: Sequence[Kernel],
    jobs: int,
    stopped: Callable[[], bool],
    *,
    early: Callable[[Kernel], bool] = lambda _: False,
    refresh: bool = False,
) -> Generator[tuple[Kernel, Result], None, None]:
    """Yield kernels with their results, built in processes of this machine, `jobs` at once.

    stopped: whether to begin no more. early: whether a kernel is not to begin yet; it is asked
    again after each result. Raises CacheError if nothing can be kept.
    """
    extensions = sum(kernel.variant.source.runs == ITSELF for kernel in kernels)
    compilers = max(1, jobs // max(1, extensions))  # only those of extensions run several
    later = [number for number, kernel in enumerate(kernels) if early(kernel)]
    waiting = deque(number for number in range(len(kernels)) if number not in later)
    done = workers.results(
        waiting,
        lambda number: kernels[number].built(compilers, refresh=refresh),
        min(jobs, len(kernels)),
    )
    with contextlib.closing(done):
        for number, result in done:
            dead = isinstance(result, workers.Died)
            yield kernels[number], kernels[number].failed(str(result)) if dead else result
            ready = [other for other in later if not early(kernels[other])]
            later = [other for other in later if other not in ready]
            waiting.extendleft(ready)
            if stopped():
                waiting.clear()


def reason_of(e: BaseException) -> str:
    """Return the message of an error. Raises it if the cache is unusable."""
    if isinstance(e, CacheError) and not isinstance(e, NotCached):
        raise e
    if isinstance(e, JitkernError):
        return str(e)
    *_, last = traceback.extract_tb(e.__traceback__)
    return f"{type(e).__name__}: {e} ({last.filename}:{last.lineno})"


def entries_of(results: Iterable[Result]) -> list[Entry]:
    """Return the entries that a prewarm has built or found. Raises CacheError."""
    cache = jit.open_cache()
    paths = dict.fromkeys(Path(result.path) for result in results if result.path)
    found = (cache.look_up(path.parent.name, path.name).entry for path in paths)
    return [entry for entry in found if entry]
