"""The engines that `prewarm --engine` names: executors, much as `concurrent.futures` has them."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import multiprocessing
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from jitkern.compilers import parallelism
from jitkern.errors import JitkernError, SettingError
from jitkern.prewarming import workers

FORMS = "processes[:N], dask[://HOST:PORT], ray[://HOST:PORT], ray://auto, slurm"
MINUTES = 240  # for a task on Slurm, where SBATCH_TIMELIMIT says nothing else
_SECONDS_OF_A_TASK = 1.0  # to remove its files when it is ended
_SECONDS_OF_A_QUEUE = 5.0  # between two questions to Slurm, which serves many users
_SECONDS_OF_A_FILE = 30.0  # until a shared file system shows what another node has written
_FORM = re.compile(
    r"(?P<name>processes)(:(?P<count>[1-9]\d{0,3}))?|(?P<local>dask|ray|slurm)"
    r"|(?P<engine>dask|ray)://(?P<address>[\w.\-\[\]:]+:\d{1,5}|auto)"
)


class Engine(contextlib.ExitStack):
    """The executor of the engine that a text names. It starts at the first use, and ends at exit.

    What was started ends in the middle of its tasks, if there are any.

    jobs: the processors that each task uses, for engines that count them.

    Raises SettingError for a text that names no engine. At the first use raises JitkernError if the
    engine is not installed or cannot be reached.
    """

    def __init__(self, text: str, *, jobs: int = 1) -> None:
        super().__init__()
        found = _FORM.fullmatch(text)
        if not found or (text.endswith("://auto") and not text.startswith("ray")):
            raise SettingError(f"`{text}` is not an engine: expected one of {FORMS}")
        self._name = found["name"] or found["local"] or found["engine"]
        self._where = found["count"] or found["address"] or ""
        self._jobs = jobs
        self._executor: Any = None
        self._workers: int | None = None

    @property
    def workers(self) -> int | None:
        """The number of tasks that run at once; None if that is unknown."""
        self.start()
        return self._workers

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Begin a task; returns a Future, or what submitit has in its place."""
        return self.start().submit(function, *args)

    def batch(self) -> contextlib.AbstractContextManager[Any]:
        """Return a block whose tasks begin together, as one array of Slurm."""
        block: Callable[[], contextlib.AbstractContextManager[Any]]
        block = getattr(self.start(), "batch", contextlib.nullcontext)
        return block()

    def start(self) -> Any:
        if self._executor is None:
            start = {"processes": _processes, "dask": _dask, "ray": _ray, "slurm": _slurm}
            self._executor, self._workers = start[self._name](self._where, self._jobs, self)
        return self._executor


Started = tuple[Any, int | None]  # the executor, and the number of tasks that it does at once


def _processes(count: str, _: int, at_exit: contextlib.ExitStack) -> Started:
    number = int(count or parallelism.limit())
    executor = Processes(number)
    at_exit.callback(executor.end)
    return executor, number


def _dask(address: str, _: int, at_exit: contextlib.ExitStack) -> Started:
    distributed = _imported("distributed", "dask[distributed]")
    where: Any = f"tcp://{address}"
    if not address:
        where = distributed.LocalCluster(
            n_workers=parallelism.limit(), threads_per_worker=1, dashboard_address=None,
            silence_logs=logging.CRITICAL,
        )  # fmt: skip
        at_exit.enter_context(where)
    try:
        client = at_exit.enter_context(distributed.Client(where, set_as_default=False))
    except OSError as e:  # of which a time-out is one
        raise JitkernError(
            f"no Dask scheduler answers at {where}: {e}; start one by `dask scheduler`"
        ) from e
    executor = client.get_executor(pure=False)
    at_exit.callback(executor.shutdown, wait=False)
    return executor, sum(client.nthreads().values()) or None


def _ray(address: str, jobs: int, at_exit: contextlib.ExitStack) -> Started:
    ray = _imported("ray", "ray[client]" if address else "ray")
    options: dict[str, Any] = {"num_cpus": parallelism.limit(), "include_dashboard": False}
    where = f"ray://{address}" if address not in ("", "auto") else address or "local"
    try:
        ray.init(
            where, log_to_driver=False, logging_level=logging.ERROR, **({} if address else options)
        )
    except (RuntimeError, OSError) as e:
        raise JitkernError(
            f"no Ray answers at {where}: {e}; start one by `ray start --head`"
        ) from e
    at_exit.callback(ray.shutdown)
    executor = RayExecutor(ray, jobs)
    at_exit.callback(executor.cancel)
    return executor, int(ray.cluster_resources().get("CPU", 0)) // jobs or None


def _slurm(_: str, jobs: int, at_exit: contextlib.ExitStack) -> Started:
    submitit = _imported("submitit", "submitit")
    if not shutil.which("sbatch"):
        raise JitkernError("there is no `sbatch` of Slurm here: run this on a login node")
    folder = tempfile.mkdtemp(prefix="jitkern-slurm-", dir=Path.cwd())  # which the nodes see
    at_exit.callback(shutil.rmtree, folder, ignore_errors=True)
    executor = submitit.AutoExecutor(folder, cluster="slurm")
    executor.update_parameters(name="jitkern-prewarm", cpus_per_task=jobs, timeout_min=MINUTES)
    return SlurmExecutor(executor), None


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise JitkernError(
            f"this engine needs {module}, which cannot be imported ({e}): pip install '{package}'"
        ) from e


class Processes(ThreadPoolExecutor):
    """A local pool of processes, each of which is replaced when it has died."""

    def __init__(self, count: int) -> None:
        super().__init__(count, thread_name_prefix="jitkern prewarm")
        self._own = threading.local()  # `pool`, of one process: a death breaks no other's task

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin a task in the next free process. Its future raises BrokenProcessPool."""
        return super().submit(self._performed, function, args, kwargs)

    def end(self) -> None:
        """End all processes, in the middle of their tasks."""
        self.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + workers.PATIENCE
        while children := multiprocessing.active_children():
            for child in children:  # first its task, and then the process that waits for another
                (child.terminate if time.monotonic() < deadline else child.kill)()
                child.join(_SECONDS_OF_A_TASK / len(children))
        self.shutdown()

    def _performed(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Do a task in the process of this thread."""
        pool: ProcessPoolExecutor | None = getattr(self._own, "pool", None)
        if pool is None:
            # A fork would have the locks of our threads, and no CUDA after its parent started it.
            pool = self._own.pool = ProcessPoolExecutor(
                1, multiprocessing.get_context("spawn"), workers.follow, (os.getpid(),)
            )
        try:
            return pool.submit(function, *args, **kwargs).result()
        except BrokenProcessPool:
            self._own.pool = None
            raise


class RayExecutor:
    """Tasks of Ray, which itself repeats a task whose worker has died."""

    def __init__(self, ray: Any, processors: int) -> None:
        self._ray = ray
        self._options = {"num_cpus": processors, "max_retries": 1}
        self._begun: list[tuple[Any, Future[Any]]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Begin a task on any node."""
        reference = self._ray.remote(**self._options)(function).remote(*args)
        future: Future[Any] = reference.future()
        self._begun.append((reference, future))
        return future

    def cancel(self) -> None:
        """Cancel the tasks that are not done."""
        for reference, future in self._begun:
            if not future.done():
                self._ray.cancel(reference, force=True)


class SlurmExecutor:
    """Jobs of Slurm, submitted by submitit, and watched by `squeue`.

    submitit itself asks `sacct`, and without Slurm's accounting waits for a dead job for ever.
    """

    def __init__(self, submitit: Any) -> None:
        self._submitit = submitit
        self.batch = submitit.batch  # a block whose jobs are submitted as one array
        self._queued: set[str] | None = None
        self._asked = -math.inf

    def submit(self, function: Callable[..., Any], /, *args: Any) -> SlurmJob:
        """Submit a job, which in a block of `batch` becomes a task of an array."""
        return SlurmJob(self._submitit.submit(function, *args), self)

    def has_queued(self, job: str) -> bool:
        """Return whether a job waits or runs, as of some seconds ago; True if Slurm is silent."""
        if time.monotonic() - self._asked > _SECONDS_OF_A_QUEUE:
            command = ["squeue", "--noheader", "--array", "--format=%i", "--name=jitkern-prewarm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            self._queued = set(done.stdout.split()) if done.returncode == 0 else None
            self._asked = time.monotonic()
        return self._queued is None or job in self._queued


class SlurmJob:
    """A job of Slurm, with the methods of a Future that a prewarm calls."""

    def __init__(self, job: Any, slurm: SlurmExecutor) -> None:
        self._job = job
        self._slurm = slurm
        self._gone: float | None = None  # the time when the job was first seen in no queue

    def done(self) -> bool:
        """Return whether there is a result, or none will come."""
        if self._job.paths.result_pickle.exists():
            return True
        if self._slurm.has_queued(self._job.job_id):
            self._gone = None
            return False
        now = time.monotonic()
        self._gone = self._gone or now
        return now - self._gone > _SECONDS_OF_A_FILE

    def result(self) -> Any:
        """Return the result of a job that is done. Raises JitkernError if it has none."""
        if self._job.paths.result_pickle.exists():
            return self._job.result()
        said = (self._job.stderr() or "").strip()[-1000:]
        raise JitkernError(
            f"job {self._job.job_id} of Slurm ended without a result. {said}".strip()
        )

    def cancel(self) -> None:
        """Cancel the job, even if it runs."""
        self._job.cancel(check=False)
