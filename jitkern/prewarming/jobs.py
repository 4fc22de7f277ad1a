"""Compile kernels in the workers of an executor, which may be other machines.

What the cache lacks is dealt out in parts. A worker imports the packages of the ops by name, builds
into a cache of its own, and returns what it built as the bytes of a bundle, so it needs no right to
write anywhere.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

from jitkern import config, jit
from jitkern.cache_tools import bundle, explain
from jitkern.cache_tools.ustar import BundleError
from jitkern.compilers import parallelism
from jitkern.errors import DeclarationError, JitkernError
from jitkern.jit import announcement
from jitkern.op import recorder
from jitkern.op.op import OPS
from jitkern.prewarming.tasks import NOT_TRIED, Kernel, Result, Step, built_here, entries_of
from jitkern.runtime import binding, code_version
from jitkern.source.defining_file import unit_of
from jitkern.source.kinds import Variant
from jitkern.target import Target

PARTS_OF_A_WORKER = 4  # so that a worker with short builds takes over from one with long builds
_WORKERS = 4  # of an executor that does not tell
_PAUSE = 0.05  # seconds between two looks at what the workers have done
_SENT = ("compile", "compiler")  # the settings that workers take over
_OF_ALL_OPS = {binding.OP: binding.variant, recorder.NAME: recorder.variant}


class Submitted(Protocol):
    """A part in the hands of an executor: a Future, or what submitit returns."""

    def done(self) -> bool: ...
    def result(self) -> Any: ...
    def cancel(self) -> object: ...


class Executor(Protocol):
    """An executor, as `concurrent.futures` and submitit have it."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Submitted: ...


class JobItem(NamedTuple):
    """A kernel to compile, by names that each process with the op's package can resolve.

    module: the module that declares the op; "" for what all ops need. folder: the directory of its
    package, for a process that does not find the package on its module path; "" if unknown.
    kind: of its source. named: the fields of the variant that follow its source. inputs: those of
    its key.
    """

    op: str
    module: str
    folder: str
    kind: str
    named: tuple[Any, ...]
    inputs: dict[str, Any]
    target: str
    place: str
    optional: bool


class Job(NamedTuple):
    """A part of a prewarm. settings: to build under. code: the digest of jitkern's code."""

    items: Sequence[JobItem]
    settings: dict[str, Any]
    keep_going: bool
    code: str


class JobResult(NamedTuple):
    """The outcome of a part: a result for each item, and a bundle of their entries, as bytes.

    host: where it was done, "" if it was not. problem: why nothing was done, or "".
    """

    host: str
    seconds: float = 0.0
    bundle: bytes = b""
    results: Sequence[Result] = ()
    problem: str = ""


@dataclass
class ExecutorBuilder:
    """Compiles kernels in the workers of an executor.

    parts: how many to make, 0 for a default. jobs: builds at once in each part.
    """

    executor: Executor
    progress: Callable[[Step], object]
    parts: int
    jobs: int
    keep_going: bool

    def built(
        self, kernels: Sequence[Kernel], stopped: Callable[[], bool]
    ) -> Generator[tuple[Kernel, Result], None, None]:
        """Yield each kernel with its result.

        stopped: whether to begin no more, and to cancel the parts that are not done.
        """
        told = getattr(self.executor, "_max_workers", None)
        workers = told if isinstance(told, int) and told > 0 else _WORKERS
        count = min(self.parts or PARTS_OF_A_WORKER * workers, len(kernels))
        dealt = [kernels[number::count] for number in range(count)]
        self._remark(f"{count} parts are submitted to the workers")
        settings = {name: getattr(config.current(), name) for name in _SENT}
        settings["jobs"] = self.jobs
        code = code_version.digest()
        parts = [Job([*map(_item, some)], settings, self.keep_going, code) for some in dealt]
        for number, outcome in self._outcomes(parts, stopped):
            results = self._adopted(dealt[number], outcome)
            where = f" on {outcome.host} in {outcome.seconds:.1f} s" if outcome.host else ""
            statuses = Counter(result.status for result in results)
            counts = ", ".join(f"{n} {status}" for status, n in statuses.items())
            self._remark(f"part {number + 1} of {count}{where}: {counts}")
            yield from zip(dealt[number], results)

    def _outcomes(
        self, parts: Sequence[Job], stopped: Callable[[], bool]
    ) -> Iterator[tuple[int, JobResult]]:
        """Yield the number of each part with its outcome.

        A part that an executor has lost, with its worker or otherwise, is submitted once more.
        """
        again, cancelled = set[int](), False
        with getattr(self.executor, "batch", contextlib.nullcontext)():  # of submitit: one array
            jobs = [*enumerate(map(self._submitted, parts))]
        try:
            while jobs:
                left = []
                if stopped() and not cancelled:
                    cancelled = True
                    cancel(jobs)
                for number, job in jobs:
                    if not job.done():
                        left.append((number, job))
                        continue
                    outcome = _outcome_of(job)
                    lost = not outcome.host and outcome.problem != NOT_TRIED
                    if lost and cancelled:
                        yield number, JobResult("", problem=NOT_TRIED)
                    elif lost and number not in again:
                        again.add(number)
                        left.append((number, self._submitted(parts[number])))
                    else:
                        yield number, outcome
                if len(left) == len(jobs):
                    time.sleep(_PAUSE)
                jobs = left
        finally:
            cancel(jobs)

    def _submitted(self, part: Job) -> Submitted:
        try:
            return self.executor.submit(perform, part)
        except Exception as e:  # noqa: BLE001  an executor whose workers have died may take no more
            refused: Future[Any] = Future()
            refused.set_exception(e)
            return refused

    def _adopted(self, kernels: Sequence[Kernel], outcome: JobResult) -> list[Result]:
        """Bring the entries of a part into the cache; returns the results for its kernels."""
        reason = outcome.problem
        if not reason and len(outcome.results) != len(kernels):
            reason = f"its worker has results for {len(outcome.results)} of {len(kernels)} kernels"
        if not reason:
            try:
                # No signature is asked for: whose results are believed is trusted.
                if outcome.bundle:
                    bundle.adopt(jit.open_cache(), io.BytesIO(outcome.bundle), compressed=False)
                return [*map(_here, kernels, outcome.results)]
            except BundleError as e:
                reason = f"the bundle of its part is refused: {e}"
        if reason == NOT_TRIED:
            return [kernel.result("skipped", reason=reason) for kernel in kernels]
        return [kernel.failed(reason) for kernel in kernels]

    def _remark(self, text: str) -> None:
        self.progress(Step(0, 0, text, finished=False))


def _here(kernel: Kernel, result: Result) -> Result:
    """Return a worker's result as one of this cache."""
    if not result.path:
        return result
    if found := kernel.found():
        return result._replace(path=str(found.path))
    return kernel.failed("its entry is not in the bundle of its part")


def cancel(jobs: Sequence[tuple[int, Submitted]]) -> None:
    """Cancel jobs, of which some may run or have ended."""
    for _, job in jobs:
        job.cancel()


def _outcome_of(job: Submitted) -> JobResult:
    """Return the outcome of a job that is done; without a host if the executor has none."""
    try:
        outcome = job.result()
    except CancelledError:
        return JobResult("", problem=NOT_TRIED)
    except Exception as e:  # noqa: BLE001  whatever an executor raises
        return JobResult("", problem=f"the worker of its part failed: {type(e).__name__}: {e}")
    if not isinstance(outcome, JobResult):
        return JobResult("", problem=f"the worker of its part returned {outcome!r:.80}")
    return outcome


def _item(kernel: Kernel) -> JobItem:
    """Return a kernel by names."""
    variant, target = kernel.variant, kernel.target
    module = OPS[variant.op].declaration.module if variant.op in OPS else ""
    package = sys.modules.get(module.partition(".")[0])
    folders = [*getattr(package, "__path__", ())]
    file = folders[0] if folders else getattr(package, "__file__", None)
    folder = str(Path(file).absolute().parent) if file else ""
    inputs: dict[str, Any] = {}
    with contextlib.suppress(JitkernError, OSError):  # the worker will report it
        inputs = jit.key_of(variant, target).inputs
    return JobItem(
        variant.op, module, folder, variant.source.kind, variant[2:], inputs, str(target),
        kernel.place, kernel.optional,
    )  # fmt: skip


def perform(part: Job) -> JobResult:
    """Do a part in this process. Errors of jitkern become the problem of the outcome."""
    started, host = time.monotonic(), platform.node()
    try:
        data, results = _performed(part)
    except JitkernError as e:
        return JobResult(host, problem=str(e))
    return JobResult(host, time.monotonic() - started, data, results)


def _performed(part: Job) -> tuple[bytes, list[Result]]:
    if part.code != code_version.digest():
        raise DeclarationError(
            f"the jitkern on {platform.node()} is not the one that started the prewarm: install "
            "the same version in the same way on both"
        )
    with (
        tempfile.TemporaryDirectory(prefix="jitkern-") as folder,
        config.using(
            **part.settings, cache_dir=Path(folder, "cache"), fsync=False, fallback="raise",
            max_size=0, max_age=0, record=None,
        ),
    ):  # fmt: skip
        found = [_found(item) for item in part.items]
        kernels = [one for one in found if isinstance(one, Kernel)]
        results = {kernel: kernel.result("skipped", reason=NOT_TRIED) for kernel in kernels}

        def stopped() -> bool:
            return not part.keep_going and any(r.status == "failed" for r in results.values())

        with announcement.silence():
            for kernel, result in built_here(kernels, parallelism.limit(), stopped):
                results[kernel] = result  # noqa: PERF403  `stopped` looks at it meanwhile
        told = [results[one] if isinstance(one, Kernel) else one for one in found]
        entries = entries_of(told)
        return bundle.packed(jit.open_cache(), entries) if entries else b"", told


def _found(item: JobItem) -> Kernel | Result:
    """Return the kernel that an item names here, or the failure as its result."""
    try:
        return _kernel(item)
    except JitkernError as e:
        return Result(item.op, "", item.target, "failed", reason=str(e))


def _kernel(item: JobItem) -> Kernel:
    """Return the kernel that an item names here. Raises DeclarationError."""
    here = f"{item.op} on {platform.node()}"
    package = item.module.partition(".")[0] or "jitkern"
    target = Target.parse(item.target)
    if item.op in _OF_ALL_OPS:
        variant = _OF_ALL_OPS[item.op]()
    else:
        _import(item, here)
        sources = OPS[item.op].sources.get(target.device, ()) if item.op in OPS else ()
        source = next((one for one in sources if one.kind == item.kind), None)
        if source is None:
            raise DeclarationError(f"{here}: {item.module} differs; install the same version")
        if item.named[0]:
            source = unit_of(source, *item.named[:2])
        variant = Variant(item.op, source, *item.named)
    differences = explain.differences(jit.key_of(variant, target).inputs, item.inputs)
    if item.inputs and differences:
        raise DeclarationError(
            f"{here} is not the op that was to be built: {'; '.join(differences)}; install the "
            f"same {package} there"
        )
    return Kernel(variant, target, item.place, item.optional)


def _import(item: JobItem, here: str) -> None:
    """Import the module that declares the op of an item. Raises DeclarationError."""
    package = item.module.partition(".")[0]
    if item.op not in OPS:
        try:
            with found_in(package, [item.folder]):
                importlib.import_module(item.module)
        except (Exception, SystemExit) as e:  # whatever its author's code raises
            raise DeclarationError(
                f"{here}: importing {item.module} failed, {e!r}: install the same {package} there"
            ) from e


@contextlib.contextmanager
def found_in(package: str, folders: list[str]) -> Iterator[None]:
    """Let imports find one package in these folders, and nothing else there.

    They are asked last, for a package that is not on the module path.
    """

    def find_spec(name: str, *_: object) -> ModuleSpec | None:
        return PathFinder.find_spec(name, folders) if name == package else None

    finder: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
