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
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jitkern import config, jit
from jitkern.cache_tools import bundle, explain
from jitkern.cache_tools.ustar import BundleError
from jitkern.compilers import parallelism
from jitkern.errors import DeclarationError, JitkernError
from jitkern.jit import announcement
from jitkern.op import recorder
from jitkern.op.all_ops import OPS
from jitkern.prewarming import pool
from jitkern.prewarming.tasks import NOT_TRIED, Kernel, Result, Step, compilers_of, entries_of
from jitkern.runtime import binding, code_version
from jitkern.source.defining_file import unit_of
from jitkern.source.kinds import Variant
from jitkern.target import Target

PARTS_OF_A_WORKER = 4  # so that a worker with short builds takes over from one with long builds
_WORKERS = 4  # of an executor that does not tell
_PAUSE = 0.05  # seconds between two looks at what the workers have done
_SENT = ("compile", "compiler")  # the settings that workers take over
_OF_ALL_OPS = {binding.OP: binding.variant, recorder.NAME: recorder.variant}


class Job(Protocol):
    """A part in the hands of an engine: a Future, or what submitit returns."""

    def done(self) -> bool: ...
    def result(self) -> Any: ...
    def cancel(self) -> object: ...


class Executor(Protocol):
    """An engine, as `concurrent.futures` and submitit have it."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Job: ...


class Order(NamedTuple):
    """A kernel to compile, by names that each process with the op's package knows.

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


class Part(NamedTuple):
    """A part of a prewarm. settings: to build under. code: the digest of jitkern's code."""

    orders: Sequence[Order]
    settings: dict[str, Any]
    keep_going: bool
    code: str


class Outcome(NamedTuple):
    """The outcome of a part: a result for each order, and a bundle of their entries, as bytes.

    problem: why nothing was done, or "".
    """

    host: str
    seconds: float
    bundle: bytes = b""
    results: Sequence[Result] = ()
    problem: str = ""


class Workers:
    """Compiles kernels in the workers of an executor.

    parts: how many to make, 0 for a default. jobs: builds at once in each part.
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
        self._executor = executor
        self._progress = progress
        self._parts = parts
        self._settings = {name: getattr(config.current(), name) for name in _SENT}
        self._settings["jobs"] = jobs
        self._keep_going = keep_going
        self._cache = jit.open_cache()
        self._stopped = False

    def stop(self) -> None:
        """Begin no more builds, and cancel the parts that are not done."""
        self._stopped = True

    def built(self, kernels: Sequence[Kernel]) -> Generator[tuple[Kernel, Result], None, None]:
        """Yield each kernel with its result. No worker gets what the cache has."""
        missing = []
        for kernel in kernels:
            if found := kernel.found():
                yield kernel, found
            else:
                missing.append(kernel)
        if not missing:
            return
        most = self._parts or PARTS_OF_A_WORKER * _workers_of(self._executor)
        count = min(most, len(missing))
        dealt = [missing[number::count] for number in range(count)]
        self._remark(f"{count} parts are with the workers")
        for number, outcome in self._outcomes([self._part(kernels) for kernels in dealt]):
            results = self._taken(dealt[number], outcome)
            what = f"part {number + 1} of {count}"
            if isinstance(outcome, Outcome):
                what += f" on {outcome.host} in {outcome.seconds:.1f} s"
            statuses = Counter(result.status for result in results)
            self._remark(f"{what}: {', '.join(f'{n} {status}' for status, n in statuses.items())}")
            yield from zip(dealt[number], results)

    def _part(self, kernels: Sequence[Kernel]) -> Part:
        orders = [_order(kernel) for kernel in kernels]
        return Part(orders, self._settings, self._keep_going, code_version.digest())

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

    def _taken(self, kernels: Sequence[Kernel], outcome: Outcome | str) -> list[Result]:
        """Bring the entries of a part into the cache; returns the results for its kernels."""
        reason = outcome if isinstance(outcome, str) else outcome.problem
        if isinstance(outcome, Outcome) and not reason and len(outcome.results) != len(kernels):
            reason = f"its worker has results for {len(outcome.results)} of {len(kernels)} kernels"
        if isinstance(outcome, Outcome) and not reason:
            try:
                # No signature is asked for: whose results are believed is trusted.
                if outcome.bundle:
                    bundle.adopt(self._cache, io.BytesIO(outcome.bundle), compressed=False)
                return [*map(_here, kernels, outcome.results)]
            except BundleError as e:
                reason = f"the bundle of its part is refused: {e}"
        if reason == NOT_TRIED:
            return [kernel.result("skipped", reason=reason) for kernel in kernels]
        return [kernel.failed(reason) for kernel in kernels]

    def _remark(self, text: str) -> None:
        self._progress(Step(0, 0, text, finished=False))


def _here(kernel: Kernel, result: Result) -> Result:
    """Return a worker's result as one of this cache."""
    if not result.path:
        return result
    if found := kernel.found():
        return result._replace(path=found.path)
    return kernel.failed("its entry is not in the bundle of its part")


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


def _order(kernel: Kernel) -> Order:
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
    return Order(
        variant.op, module, folder, variant.source.kind, variant[2:], inputs, str(target),
        kernel.place, kernel.optional,
    )  # fmt: skip


def perform(part: Part) -> Outcome:
    """Do a part in this process. Errors of jitkern become the problem of the outcome."""
    started = time.monotonic()
    try:
        outcome = Outcome(platform.node(), 0.0, *_performed(part))
    except JitkernError as e:
        outcome = Outcome(platform.node(), 0.0, problem=str(e))
    return outcome._replace(seconds=time.monotonic() - started)


def _performed(part: Part) -> tuple[bytes, list[Result]]:
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
        found = [_found(order) for order in part.orders]
        kernels = [one for one in found if isinstance(one, Kernel)]
        results = {kernel: kernel.result("skipped", reason=NOT_TRIED) for kernel in kernels}
        waiting, jobs = deque(range(len(kernels))), parallelism.limit()
        compilers = compilers_of(kernels, jobs)
        with announcement.silence():
            for n, built in pool.results(waiting, lambda n: kernels[n].built(compilers), jobs):
                dead = isinstance(built, pool.Died)
                results[kernels[n]] = kernels[n].failed(built.reason) if dead else built
                if results[kernels[n]].status == "failed" and not part.keep_going:
                    waiting.clear()
        told = [results[one] if isinstance(one, Kernel) else one for one in found]
        entries = entries_of(told)
        data = bundle.packed(jit.open_cache(), entries) if entries else b""
    return data, told


def _found(order: Order) -> Kernel | Result:
    """Return the kernel that an order names here, or the failure as its result."""
    try:
        return _kernel(order)
    except JitkernError as e:
        return Result(order.op, "", order.target, "failed", reason=str(e))


def _kernel(order: Order) -> Kernel:
    """Return the kernel that an order names here. Raises DeclarationError."""
    here = f"{order.op} on {platform.node()}"
    package = order.module.partition(".")[0] or "jitkern"
    target = Target.parse(order.target)
    if order.op in _OF_ALL_OPS:
        variant = _OF_ALL_OPS[order.op]()
    else:
        _import(order, here)
        sources = OPS[order.op].sources.get(target.device, ()) if order.op in OPS else ()
        source = next((one for one in sources if one.kind == order.kind), None)
        if source is None:
            raise DeclarationError(
                f"{here}: {order.module} declares it otherwise; install the same"
            )
        function = order.named[0]
        if function and source.kind != "triton":
            source = unit_of(source, function)
        variant = Variant(order.op, source, *order.named)
    differences = explain.differences(jit.key_of(variant, target).inputs, order.inputs)
    if order.inputs and differences:
        raise DeclarationError(
            f"{here} is not the op that was to be built: {'; '.join(differences)}; install the "
            f"same {package} there"
        )
    return Kernel(variant, target, order.place, order.optional)


def _import(order: Order, here: str) -> None:
    """Import the module that declares the op of an order. Raises DeclarationError."""
    package = order.module.partition(".")[0]
    if order.op not in OPS:
        try:
            with found_in(package, [order.folder]):
                importlib.import_module(order.module)
        except (Exception, SystemExit) as e:  # whatever its author's code raises
            raise DeclarationError(
                f"{here}: importing {order.module} failed, {e!r}: install the same {package} there"
            ) from e


class _Named:
    """A finder of one package, and nothing else, in folders that are not on the module path."""

    def __init__(self, package: str, folders: list[str]) -> None:
        self._package = package
        self._folders = folders

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Return the spec of the package, for an import that no other finder satisfies."""
        return PathFinder.find_spec(name, self._folders) if name == self._package else None


@contextlib.contextmanager
def found_in(package: str, folders: list[str]) -> Iterator[None]:
    """Let imports find one package in these folders, and nothing else there."""
    finder: Any = _Named(package, folders)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
