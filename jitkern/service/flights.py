"""Builds in flight: whoever asks for the same waits for the same build."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from jitkern import config
from jitkern._fork import after_fork
from jitkern.prewarming.workers import PATIENCE
from jitkern.service.build import Outcome
from jitkern.service.metrics import Metrics
from jitkern.service.request import Asked
from jitkern.service.workers import Pool

KEPT = 60.0  # seconds for which an outcome answers those who ask later
MOST_KEPT = 1024
_log = logging.getLogger(__name__)
Landed = Callable[[Asked, Outcome], object]


class Full(Exception):
    """Too many builds are waiting."""


class Draining(Exception):
    """The service is about to end, and begins no more builds."""


class Flights:
    """The builds that run and wait, and the outcomes of the last minute.

    jobs: builds at once. waiting: the most builds that wait. landed: called after each build.
    """

    def __init__(
        self, pool: Pool, jobs: int, waiting: int, metrics: Metrics, landed: Landed
    ) -> None:
        self._pool = pool
        self._jobs = jobs
        self._most = waiting
        self._metrics = metrics
        self._landed = landed
        self._longest = config.current().lock_timeout  # after which others would not wait either
        self._lock = threading.Lock()
        after_fork(self._lock)
        self._flights: OrderedDict[str, tuple[Future[Outcome], list[float]]] = OrderedDict()
        self._waiting = self._running = 0
        self._draining = False
        self._threads = ThreadPoolExecutor(jobs, "jitkern build")

    @property
    def waiting(self) -> int:
        """The number of builds that wait."""
        return self._waiting

    @property
    def running(self) -> int:
        """The number of builds that run."""
        return self._running

    def ask(self, asked: Asked) -> Future[Outcome]:
        """Return the build of what is asked for; one that runs, or ended a short time ago, if any.

        Raises Full and Draining.
        """
        with self._lock:
            self._forget()
            if known := self._flights.get(asked.id):
                return known[0]
            if self._draining:
                raise Draining
            if self._waiting >= self._most:
                raise Full
            self._waiting += 1
            flight = self._threads.submit(self._fly, asked)
            self._flights[asked.id] = flight, []
        flight.add_done_callback(lambda _: self._note_end(asked))
        return flight

    def find(self, id_: str) -> Future[Outcome] | None:
        """Return a build by the id of its request, or None if it ended long ago, or never began."""
        with self._lock:
            self._forget()
            known = self._flights.get(id_)
            return known[0] if known else None

    def forget(self, id_: str) -> None:
        """Forget an outcome, so that who asks for the same has it built again."""
        with self._lock:
            if id_ in self._flights and self._flights[id_][1]:
                del self._flights[id_]

    def drain(self, grace: float) -> None:
        """Begin no more builds, and end those that take longer than `grace` seconds."""
        with self._lock:
            self._draining = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        end = time.monotonic() + grace
        while self._running and time.monotonic() < end:
            time.sleep(0.02)
        if self._running:
            _log.warning("%d builds did not end within %.0f s", self._running, grace)
        while self._running:
            late = time.monotonic() > end + PATIENCE  # SIGTERM lets workers end their compilers
            self._pool.kill(signal.SIGKILL if late else signal.SIGTERM)
            time.sleep(0.1)
        self._threads.shutdown()
        self._pool.close()

    def _fly(self, asked: Asked) -> Outcome:
        with self._lock:
            self._waiting -= 1
            self._running += 1
            jobs = max(1, self._jobs // self._running)
        started = time.monotonic()
        try:
            with self._pool.worker() as worker:
                outcome = worker.ask(asked, jobs, seconds=self._longest)
            self._metrics.built(outcome, time.monotonic() - started)
            self._landed(asked, outcome)
            return outcome
        finally:
            with self._lock:
                self._running -= 1

    def _note_end(self, asked: Asked) -> None:
        """Keep the outcome for a while, unless a later attempt may have another."""
        with self._lock:
            flight, ends = self._flights[asked.id]
            if flight.cancelled() or flight.exception() or flight.result().status >= 500:
                del self._flights[asked.id]
            else:
                ends.append(time.monotonic())
                self._flights.move_to_end(asked.id)

    def _forget(self) -> None:
        """Forget outcomes that are old or too many."""
        old = time.monotonic() - KEPT
        ended = [id_ for id_, (_, ends) in self._flights.items() if ends]
        for number, id_ in enumerate(reversed(ended)):
            if number >= MOST_KEPT or self._flights[id_][1][0] < old:
                del self._flights[id_]
