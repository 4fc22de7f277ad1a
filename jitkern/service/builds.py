"""The builds of a service, by prewarm: equal requests wait for the same build."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

from jitkern import cache_tools, config, jit
from jitkern._fork import after_fork
from jitkern.cache.store import Entry
from jitkern.cache_tools import signing
from jitkern.cache_tools.listing import OF_ALL_OPS
from jitkern.calls import record
from jitkern.calls.samples import Sample
from jitkern.errors import CacheError, JitkernError, NotCached
from jitkern.named_tuple import NamedTuple
from jitkern.op.op import Op
from jitkern.prewarming.api import prewarm
from jitkern.prewarming.op_calls import OpCalls
from jitkern.prewarming.tasks import entries_of
from jitkern.prewarming.workers import PATIENCE, Died, Worker
from jitkern.remote.bundles import digest_of
from jitkern.service.request import BuildRequest

MOST_WAITING = 64
KEPT = 60.0  # seconds for which an outcome answers those who ask later
MOST_KEPT = 1024
MOST_FAILURES = 10
LONGEST_REASON = 4000  # letters of what a client is told
_log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """The end of a build.

    status: 200, 422 if it cannot be built, or 503 if nothing can be built now.
    reason: why not all was built, or "". failed: whether a build failed, and not only lacked a
    compiler. bundle: the name of the file with all entries, or "". digests: theirs. files: SHA-256
    of the files of the kernels, by their names. built: the number of new entries.
    """

    status: int
    reason: str = ""
    failed: bool = False
    bundle: str = ""
    digests: frozenset[str] = frozenset()
    files: Mapping[str, str] = {}
    built: int = 0


class Submission(NamedTuple):
    """A build that runs or waits, or has ended. since: when that began, by the monotonic clock."""

    request: BuildRequest
    future: Future[Outcome]
    since: float


class Builds:
    """The builds that run and wait, those that ended in the last minute, and the last that failed.

    Making it forks the workers. perform: builds, in a worker. jobs: builds at once. note: called
    after each build with its seconds, in one thread at a time.
    """

    def __init__(
        self,
        perform: Callable[[BuildRequest, int], Outcome],
        jobs: int,
        note: Callable[[Outcome, float], object],
    ) -> None:
        self._jobs = jobs
        self._note = note
        self.longest = config.current().lock_timeout  # after which others would not wait either
        self._lock = threading.RLock()
        after_fork(self._lock)
        self._pending: dict[str, Submission] = {}
        self._ended: dict[str, Submission] = {}  # in the order of their ends
        self._failed: dict[str, Submission] = {}  # the same
        self.workers = [Worker(perform, "jitkern serve", _close_sockets) for _ in range(jobs)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.workers:
            worker.start()
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(jobs, "jitkern build")

    def pending(self) -> list[Submission]:
        """Return the builds that run and wait, the oldest first."""
        return [*self._pending.values()]

    def failed(self) -> list[Submission]:
        """Return the builds that failed last, and no later one succeeded, the newest first."""
        return [*self._failed.values()][::-1]

    def count(self, *, running: bool) -> int:
        """Return the number of builds that run, or of those that wait."""
        return sum(build.future.running() == running for build in self.pending())

    def find(self, id_: str) -> Future[Outcome] | None:
        """Return a build by the id of its request, or None if it ended long ago, or never began."""
        with self._lock:
            while self._ended:
                first = next(iter(self._ended.values()))
                if len(self._ended) <= MOST_KEPT and time.monotonic() - first.since < KEPT:
                    break
                del self._ended[first.request.id]
            found = self._pending.get(id_) or self._ended.get(id_)
            return found and found.future

    def submit(self, request: BuildRequest) -> Future[Outcome] | None:
        """Return the build of a request: a running or recent one, if any.

        None if too many builds wait. While the service is shutting down, a new one is cancelled.
        """
        with self._lock:
            if found := self.find(request.id):
                return found
            if self.count(running=False) >= MOST_WAITING:
                return None
            future: Future[Outcome] = Future()
            try:
                future = self._threads.submit(self._perform, request)
            except RuntimeError:  # the threads are shut down
                future.cancel()
            else:
                self._pending[request.id] = Submission(request, future, time.monotonic())
            return future

    def forget(self, id_: str) -> None:
        """Forget an outcome, so that an equal request builds again."""
        with self._lock:
            self._ended.pop(id_, None)

    def drain(self, grace: float) -> None:
        """Begin no more builds, and end those that take longer than `grace` seconds."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        begun = [build.future for build in self.pending() if not build.future.cancelled()]
        late = wait(begun, grace).not_done
        if late:
            _log.warning("%d builds did not end within %.0f s", len(late), grace)
        end = time.monotonic() + PATIENCE  # until then, workers may end their compilers
        while late:
            for process in [worker.process for worker in self.workers]:
                if process is not None:  # whoever waits for its answer is told of its death
                    (process.kill if time.monotonic() > end else process.terminate)()
            late = wait(late, 0.1).not_done
        self._threads.shutdown()
        for worker in self.workers:
            worker.stop(at_once=False)
            worker.ended()

    def _perform(self, request: BuildRequest) -> Outcome:
        started, worker = time.monotonic(), self._idle.get()
        outcome = self._outcome(worker, request, self._jobs // max(1, self.count(running=True)))
        self._idle.put(worker)
        with self._lock:
            self._note(outcome, time.monotonic() - started)
            build = self._pending.pop(request.id)._replace(since=time.monotonic())
            if outcome.status < 500:  # else a later attempt may have another
                self._ended[request.id] = build
            self._failed.pop(request.id, None)
            if outcome.failed or outcome.status != 200:
                self._failed[request.id] = build
                if len(self._failed) > MOST_FAILURES:
                    del self._failed[next(iter(self._failed))]
        return outcome

    def _outcome(self, worker: Worker, request: BuildRequest, jobs: int) -> Outcome:
        """Return the outcome of a build; a worker that takes too long for it is ended."""
        try:
            worker.send(request, jobs)
            return cast("Outcome", worker.result(self.longest))
        except TimeoutError:
            worker.stop(at_once=True)
            worker.ended()
            return Outcome(422, f"the build took more than {self.longest:.0f} s", failed=True)
        except OSError as e:
            return Outcome(503, f"no process can be started: {e.strerror}", failed=True)
        except (JitkernError, Died) as e:
            unusable = isinstance(e, CacheError) and not isinstance(e, NotCached)
            return Outcome(503 if unusable else 422, str(e)[:LONGEST_REASON], failed=True)
        except RuntimeError as e:
            _log.error("a build failed: %s", e)
            return Outcome(500, "internal error; see the log of the service")


@dataclass(frozen=True)
class CallBuilder:
    """Builds the requests, one after the other.

    ops: the ops that may be built. folder: the directory for bundles. key: the private key that
    signs entries, or None.
    """

    ops: Mapping[str, Op]
    folder: Path
    key: Path | None

    def __call__(self, request: BuildRequest, jobs: int) -> Outcome:
        """Build a request with `jobs` compilers at once. Raises JitkernError."""
        try:
            call = record.parsed(request.line)
        except ValueError as e:
            return Outcome(422, f"the call is not a line of a recording: {e}", failed=True)
        op = self.ops[call.op]
        misfit = op.signature.misfit(call.args)
        sample = Sample("the call", call.args, misfit and f"the call does not fit the op: {misfit}")
        # No client waits for the node, which takes 20 s: what was prewarmed here is handed out.
        wanted = OpCalls(op, {(call.device, call.kind): [sample]}, node=False)
        # Servers are no remotes of a service: it might ask itself, and wait.
        remote = tuple(url for url in config.current().remote if not url.startswith("http"))
        with config.using(remote=remote):
            results = prewarm([wanted], request.targets, jobs=jobs, keep_going=True)
        entries = entries_of(results)
        reasons = dict.fromkeys(r.reason for r in results if r.status in ("failed", "skipped"))
        reason = "\n".join(reasons)[:LONGEST_REASON]
        failed = any(result.status == "failed" for result in results)
        if not entries:
            return Outcome(422, reason or "there is nothing to build for this call", failed)
        cache = jit.open_cache()
        if self.key:
            signing.sign_missing(cache, entries, self.key)
        bundle = f"{request.id}.tar"
        cache_tools.pack(cache, entries, self.folder / bundle)
        kernels = [entry for entry in entries if _files_of(entry)]
        return Outcome(
            200, reason, failed, bundle,
            frozenset(digest_of(entry) for entry in entries),
            {name: sha for entry in kernels for name, sha in _files_of(entry).items()},
            sum(result.status == "built" for result in results),
        )  # fmt: skip


def _files_of(entry: Entry) -> dict[str, str]:
    """Return the SHA-256 of each file that a kernel was compiled from; {} for other entries."""
    if entry.op in OF_ALL_OPS:
        return {}
    return dict(entry.manifest.inputs.get("source", {}).get("closure", {}))


def _close_sockets(connection: Connection) -> None:
    """Close the sockets of the parent, clients and pipes of other workers; their ends would wait.

    Standard streams stay, which may be sockets of a system log.
    """
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):
            of_parent = descriptor > 2 and descriptor != connection.fileno()
            if of_parent and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)
