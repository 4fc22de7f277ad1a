"""The builds of a service, in the workers of prewarm: equal requests wait for the same build."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection

from jitkern import config
from jitkern._fork import after_fork
from jitkern.errors import CacheError, JitkernError, NotCached
from jitkern.named_tuple import NamedTuple
from jitkern.prewarming.workers import PATIENCE, Died, Worker
from jitkern.service.build import LONGEST_REASON, Outcome
from jitkern.service.request import Asked

MOST_WAITING = 64
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


class Builds:
    """The builds that run and wait, and those that ended in the last minute.

    Making it forks the workers. perform: builds, in a worker. jobs: builds at once. note: called
    after each build with its seconds, in one thread at a time.
    """

    def __init__(self, perform: Perform, jobs: int, note: Note) -> None:
        self._jobs = jobs
        self._note = note
        self.longest = config.current().lock_timeout  # after which others would not wait either
        self._lock = threading.Lock()
        after_fork(self._lock)
        self._pending: dict[str, Submission] = {}
        self._ended: dict[str, Submission] = {}  # in the order of their ends
        self.workers = [Worker(perform, "jitkern serve", begun=_close_sockets) for _ in range(jobs)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.workers:
            worker.start()
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(jobs, "jitkern build")

    def pending(self) -> list[Submission]:
        """Return the builds that run and wait, the oldest first."""
        return [*self._pending.values()]

    def count(self, *, running: bool) -> int:
        """Return the number of builds that run, or of those that wait."""
        return sum(build.future.running() == running for build in self.pending())

    def submit(self, asked: Asked) -> Future[Outcome] | None:
        """Return the build of a request: a running or recent one, if any.

        None if too many builds wait. While the service is shutting down, a new one is cancelled.
        """
        with self._lock:
            if found := self._found(asked.id):
                return found
            if self.count(running=False) >= MOST_WAITING:
                return None
            try:
                future = self._threads.submit(self._perform, asked)
            except RuntimeError:  # the threads are shut down
                future = Future()
                future.cancel()
            else:
                self._pending[asked.id] = Submission(asked, future, time.monotonic())
            return future

    def find(self, id_: str) -> Future[Outcome] | None:
        """Return a build by the id of its request, or None if it ended long ago, or never began."""
        with self._lock:
            return self._found(id_)

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

    def _found(self, id_: str) -> Future[Outcome] | None:
        old = time.monotonic() - KEPT
        while self._ended:
            first = next(iter(self._ended))
            if len(self._ended) <= MOST_KEPT and self._ended[first].since >= old:
                break
            del self._ended[first]
        found = self._pending.get(id_) or self._ended.get(id_)
        return found and found.future

    def _perform(self, asked: Asked) -> Outcome:
        started, worker = time.monotonic(), self._idle.get()
        outcome = self._outcome(worker, asked, self._jobs // max(1, self.count(running=True)))
        self._idle.put(worker)
        with self._lock:
            build = self._pending.pop(asked.id)
            self._note(asked, outcome, time.monotonic() - started)
            if outcome.status < 500:  # else a later attempt may have another
                self._ended[asked.id] = build._replace(since=time.monotonic())
        return outcome

    def _outcome(self, worker: Worker, asked: Asked, jobs: int) -> Outcome:
        """Return the outcome of a build; a worker that takes too long for it is ended."""
        try:
            worker.send(asked, jobs)
            outcome: Outcome = worker.result(self.longest)
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
        return outcome


def _close_sockets(connection: Connection) -> None:
    """Close the sockets of the parent, clients and pipes of other workers; their ends would wait.

    Standard streams stay, which may be sockets of a system log.
    """
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):
            of_parent = descriptor > 2 and descriptor != connection.fileno()
            if of_parent and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)
