"""The queue of builds: equal requests wait for the same build."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection

from jitkern import config
from jitkern._fork import after_fork
from jitkern.named_tuple import NamedTuple
from jitkern.prewarming.workers import PATIENCE, Died, Worker
from jitkern.service.build import Outcome
from jitkern.service.request import Asked

KEPT = 60.0  # seconds for which an outcome answers those who ask later
MOST_KEPT = 1024
_log = logging.getLogger(__name__)
Perform = Callable[[Asked, int], Outcome]
Note = Callable[[Asked, Outcome, float], object]


class Submission(NamedTuple):
    """A build that runs or waits, or has ended. since: when that began, by the monotonic clock."""

    asked: Asked
    future: Future[Outcome]
    since: float


class BuildQueue:
    """The builds that run and wait, and the outcomes of the last minute.

    Making it forks the workers. perform: builds, in a worker. jobs: builds at once. waiting: the
    most builds that wait. note: called after each build with its seconds.
    """

    def __init__(self, perform: Perform, jobs: int, waiting: int, note: Note) -> None:
        self._jobs = jobs
        self._most = waiting
        self._note = note
        self.longest = config.current().lock_timeout  # after which others would not wait either
        self._lock = threading.Lock()
        after_fork(self._lock)
        self.builds: dict[str, Submission] = {}  # those that have ended in the order of their ends
        self._draining = False
        self.workers = [Worker(perform, "jitkern serve", begun=_close_sockets) for _ in range(jobs)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.workers:
            worker.start()
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(jobs, "jitkern build")

    @property
    def running(self) -> int:
        """The number of builds that run."""
        return sum(build.future.running() for build in [*self.builds.values()])

    @property
    def waiting(self) -> int:
        """The number of builds that wait."""
        return sum(not build.future.running() for build in self.pending())

    def submit(self, asked: Asked) -> Future[Outcome] | None:
        """Return the build of a request: a running or recent one, if any.

        None if too many builds wait. While the service is shutting down, a new one is cancelled.
        """
        with self._lock:
            self._forget_old()
            if asked.id not in self.builds:
                if self._draining:
                    future: Future[Outcome] = Future()
                    future.cancel()
                    return future
                if self.waiting >= self._most:
                    return None
                future = self._threads.submit(self._perform, asked)
                self.builds[asked.id] = Submission(asked, future, time.monotonic())
            return self.builds[asked.id].future

    def find(self, id_: str) -> Future[Outcome] | None:
        """Return a build by the id of its request, or None if it ended long ago, or never began."""
        with self._lock:
            self._forget_old()
            found = self.builds.get(id_)
            return found and found.future

    def pending(self) -> list[Submission]:
        """Return the builds that run and wait, the oldest first."""
        return [build for build in [*self.builds.values()] if not build.future.done()]

    def forget(self, id_: str) -> None:
        """Forget an outcome, so that an equal request builds again."""
        with self._lock:
            if id_ in self.builds and self.builds[id_].future.done():
                del self.builds[id_]

    def drain(self, grace: float) -> None:
        """Begin no more builds, and end those that take longer than `grace` seconds."""
        with self._lock:
            self._draining = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        end = time.monotonic() + grace
        while self.running and time.monotonic() < end:
            time.sleep(0.02)
        if self.running:
            _log.warning("%d builds did not end within %.0f s", self.running, grace)
        while self.running:
            late = time.monotonic() > end + PATIENCE  # SIGTERM lets workers end their compilers
            for process in [worker.process for worker in self.workers]:
                if process is not None:  # whoever waits for its answer is told of its death
                    (process.kill if late else process.terminate)()
            time.sleep(0.1)
        self._threads.shutdown()
        self.close()

    def close(self) -> None:
        """End the workers, once no build runs."""
        for worker in self.workers:
            worker.stop(at_once=False)
            worker.ended()

    def _perform(self, asked: Asked) -> Outcome:
        started, worker = time.monotonic(), self._idle.get()
        is_kept = False
        try:
            outcome = self._built(worker, asked, self._jobs // max(1, self.running))
            self._note(asked, outcome, time.monotonic() - started)
            is_kept = outcome.status < 500  # else a later attempt may have another
            return outcome
        finally:
            self._idle.put(worker)
            with self._lock:
                build = self.builds.pop(asked.id)
                if is_kept:
                    self.builds[asked.id] = build._replace(since=time.monotonic())

    def _built(self, worker: Worker, asked: Asked, jobs: int) -> Outcome:
        """Return the outcome of a build; a worker that takes too long for it is ended."""
        try:
            worker.send(asked, jobs)
        except OSError as e:
            return Outcome(503, f"no process can be started: {e.strerror}", failed=True)
        try:
            outcome: Outcome = worker.result(self.longest)
        except TimeoutError:
            worker.stop(at_once=True)
            worker.ended()
            return Outcome(422, f"the build took more than {self.longest:.0f} s", failed=True)
        except Died as e:
            return Outcome(422, str(e), failed=True)
        return outcome

    def _forget_old(self) -> None:
        """Forget outcomes that are old or too many."""
        old = time.monotonic() - KEPT
        ended = [id_ for id_, build in self.builds.items() if build.future.done()]
        for left, id_ in zip(range(len(ended), 0, -1), ended):
            if left > MOST_KEPT or self.builds[id_].since < old:
                del self.builds[id_]


def _close_sockets(connection: Connection) -> None:
    """Close the sockets of the parent, clients and pipes of other workers; their ends would wait.

    Standard streams stay, which may be sockets of a system log.
    """
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):
            of_parent = descriptor > 2 and descriptor != connection.fileno()
            if of_parent and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)
