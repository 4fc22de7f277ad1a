"""Builds side by side: the kernels of each op, and as soon as they are there what launches them.

In threads: compilers are child processes, or (NVRTC) release the interpreter lock.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jitkern.cli.output import Progress
from jitkern.compilers import child
from jitkern.errors import CacheError, CompilerNotFound, JitkernError, NotCached, TargetError
from jitkern.kernel import Source, Variant
from jitkern.target import Target, this_platform

if TYPE_CHECKING:
    from jitkern.needs import Needs
    from jitkern.register import Op

_T = TypeVar("_T")
_LONGEST_FIRST = ("extension", "triton")  # kinds of source


class Group(NamedTuple):
    """What the calls of one source of an op need, for one target."""

    op: Op
    source: Source
    target: Target
    needs: Needs


class Result(NamedTuple):
    """One line of the report; status is built, hit, failed or skipped."""

    op: str
    variant: str
    target: str
    status: str
    seconds: float = 0.0
    path: str = ""
    reason: str = ""


class Builder:
    """Builds groups, `jobs` things at once.

    keep_going: go on after a failed build. refresh: build kernels anew that are in the cache.
    """

    def __init__(self, jobs: int, *, keep_going: bool, refresh: bool) -> None:
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="prewarm")
        self._keep_going = keep_going
        self._refresh = refresh
        self._stopped = threading.Event()
        self._progress = Progress()
        self._begun: dict[tuple[str, Variant, Target], asyncio.Task[Result]] = {}

    def build(self, groups: Sequence[Group]) -> list[Result]:
        """Kernels, stubs, then plans, each in the order of `groups`.

        Raises CacheError where nothing can be kept.
        """
        try:
            return asyncio.run(self._all(groups))
        except KeyboardInterrupt:
            self._stopped.set()
            child.end()
            raise
        finally:
            self._stopped.set()
            self._pool.shutdown(cancel_futures=True)
            self._progress.close()

    async def _all(self, groups: Sequence[Group]) -> list[Result]:
        order = sorted(range(len(groups)), key=lambda i: _cost(groups[i]))
        done = dict(zip(order, await asyncio.gather(*(self._one(groups[i]) for i in order))))
        steps = zip(*(done[i] for i in range(len(groups))))
        results = [result for step in steps for one in step for result in one]
        return list({id(result): result for result in results}.values())  # some groups share some

    async def _one(self, group: Group) -> tuple[list[Result], list[Result], list[Result]]:
        """The results of its kernels, of its stubs, and of its plans."""
        op, source, target, needs = group
        failed = [Result(op.name, "", str(target), "failed", reason=p) for p in needs.problems]
        if failed:
            self._fail()
            if self._stopped.is_set():
                return failed[:1], [], []
        kernels = [(op.name, variant, target) for variant in needs.variants]
        built = [*failed, *await self._built(kernels)]
        if self._stopped.is_set() or target.for_host_code().platform != this_platform():
            return built, [], []
        from jitkern.ahead import keep_plans, stubs_of
        from jitkern.launch import runtime

        stubs, reasons = await self._run(lambda: stubs_of(op, source, target, needs.calls))
        for reason in reasons:
            self._progress.note(f"{op.name} for {target} keeps to its Python launcher: {reason}")
        if not stubs:
            return built, [], []
        host = Target.current("cpu")._replace(torch=target.torch)
        linked = await self._built(
            [
                ("jitkern::runtime", runtime.variant(), host),
                *((op.name, stub.variant, target) for stub in stubs),
            ]
        )
        kept = await self._run(lambda: keep_plans(op, source, target, stubs))
        plans = [
            Result(
                op.name, entry.variant, entry.path.parent.name,
                "built" if new else "hit", path=str(entry.path),
            )
            for entry, new in kept
        ]  # fmt: skip
        return built, linked, plans

    async def _built(self, things: Sequence[tuple[str, Variant, Target]]) -> list[Result]:
        """Each, built once however many groups need it."""
        for thing in things:
            if thing not in self._begun:
                self._progress.total += 1
                self._begun[thing] = asyncio.ensure_future(self._build(*thing))
        return await asyncio.gather(*(self._begun[thing] for thing in things))

    async def _build(self, op: str, variant: Variant, target: Target) -> Result:
        result = await self._run(lambda: self._try(op, variant, target))
        self._progress.step(
            f"{result.status:7} {op} {result.variant} {result.target} {result.seconds:.2f} s"
        )
        return result

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _fail(self) -> None:
        if not self._keep_going:
            self._stopped.set()

    def _try(self, op: str, variant: Variant, target: Target) -> Result:
        from jitkern import jit

        exact = str(jit.exact_target(variant, target))

        def result(status: str, **rest: Any) -> Result:
            return Result(op, variant.label, exact, status, **rest)

        if self._stopped.is_set():
            return result("skipped", reason="not tried after a failed build; see --keep-going")
        started = time.perf_counter()
        try:
            entry, new = jit.ensure_and_tell(variant, target, refresh=self._refresh)
        except (CompilerNotFound, TargetError) as e:
            return result("skipped", reason=str(e))
        except JitkernError as e:
            if isinstance(e, CacheError) and not isinstance(e, NotCached):
                raise  # nothing can be kept: no use in going on
            self._fail()
            return result("failed", reason=str(e))
        seconds = round(time.perf_counter() - started, 4)
        return result("built" if new else "hit", seconds=seconds, path=str(entry.path))


def _cost(group: Group) -> int:
    kind = group.source.kind
    return _LONGEST_FIRST.index(kind) if kind in _LONGEST_FIRST else len(_LONGEST_FIRST)
