"""How long and how often a remote is asked: deadlines, attempts, and a circuit breaker.

A remote may cost a miss at most its budget. Whatever hangs (a name service, a library, a server) is
left alone in a daemon thread, and Ctrl-C ends the wait at once. A command asks more patiently than
a miss: by `retry`.
"""

from __future__ import annotations

import functools
import logging
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from jitkern import config
from jitkern.remote.store import AccessDenied, Forked, Throttled, TooLarge, Unavailable, Unchanged

FAILURES = 5  # in a row, after which a remote rests: of three, 30 % of lost requests make too many
REST = 60.0  # seconds
TRIES = 2  # requests for one object that may fail
RETRIES = 4  # of a command
LONGEST_PAUSE = 2.0  # seconds between two requests to a remote that is busy
_WAIT = 0.5  # seconds; CPython misses an interrupt that comes just before a wait, until it ends
_SHORTEST = 0.2  # seconds: a shorter wait that ends without an answer says nothing of the remote
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class CircuitOpen(Unavailable):
    """The remote is not asked, because it failed or refused this client a moment ago."""


def run_with_timeout(seconds: float | None, work: Callable[[], _T]) -> _T:
    """Return what `work` returns, or raise what it raises. Ctrl-C ends the wait at once.

    Raises Unavailable after `seconds`; None for a wait without an end.
    """
    answer: Future[_T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as e:  # noqa: BLE001  it is raised where the answer is waited for
            answer.set_exception(e)

    if not config.background.start("jitkern remote", run):
        raise Forked("no thread for a request: too many, or the interpreter is ending")
    end = time.monotonic() + (math.inf if seconds is None else seconds)
    while not wait([answer], min(_WAIT, max(0.0, end - time.monotonic()))).done:
        if time.monotonic() >= end:
            raise Unavailable(f"no answer in {seconds:.3g} s")
    return answer.result()


def retry(ask: Callable[..., _T], *args: Any, **options: Any) -> _T:
    """Call `ask` for a command, and retry after failures. Raises Unavailable."""
    for attempt in range(RETRIES):
        try:
            return run_with_timeout(None, functools.partial(ask, *args, **options))
        except (AccessDenied, TooLarge, Forked):
            raise
        except Unavailable:
            if attempt == RETRIES - 1:
                raise
            time.sleep(pause(0.2, attempt))
    raise AssertionError


def pause(first: float, attempt: int) -> float:
    """Return random seconds before another attempt: up to `first`, doubled with each attempt."""
    longest: float = min(LONGEST_PAUSE, first * 2**attempt)
    return random.random() * longest  # noqa: S311


class Breaker:
    """The circuit breaker of a remote, in this process.

    It opens for REST seconds after FAILURES in a row; then one request tries. A remote that has
    never answered this process gets TRIES requests, so that a dead one costs little.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._failures = 0  # in a row
        self._most = TRIES
        self._until = 0.0  # when it closes, by the monotonic clock
        self._refused = ""

    def open(self) -> str:
        """Return why the remote is not asked now, or ""."""
        left = self._until - time.monotonic()
        if self._refused or left <= 0:
            return self._refused
        return f"circuit breaker open for {left:.0f} s more ({self._failures} consecutive failures)"

    def succeed(self) -> None:
        """Note an answer, whatever it says."""
        self._failures, self._most, self._until = 0, FAILURES, 0.0

    def fail(self, why: str) -> None:
        """Note a failure; warn if the breaker opens."""
        self._failures += 1
        if self._failures >= self._most:
            self._until = time.monotonic() + REST
            _log.warning(
                "the remote %s failed; circuit breaker open for %g s: %s", self.url, REST, why
            )

    def refuse(self, why: str) -> None:
        """Stay open for the life of this process; warn once."""
        if not self._refused:
            self._refused = f"it refused this client: {why}"
            _log.warning(
                "the remote %s refuses this client (%s) and is not asked again in this process: "
                "check its credentials, and `remote_token_file` of the settings", self.url, why,
            )  # fmt: skip


class Deadline:
    """The patience for one miss: at most `budget` seconds, all requests and pauses together."""

    def __init__(self, breaker: Breaker, budget: float) -> None:
        self._breaker = breaker
        self._started = time.monotonic()
        self.budget = budget

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return max(0.0, self._started + self.budget - time.monotonic())

    def extend(self, budget: float) -> None:
        """Raise the budget to `budget` seconds."""
        self.budget = max(self.budget, budget)

    def ask(self, request: Callable[[], _T], timeout: float = math.inf) -> _T:
        """Return what `request` returns, waiting at most `timeout` seconds for each try.

        A busy remote is asked again while the budget lasts; a failure is tried again once. Raises
        Unavailable, and Unchanged as the request does.
        """
        failures = busy = 0
        while True:
            wait = self._allowed(timeout)
            try:
                answer = run_with_timeout(wait, request)
            except Throttled as e:
                seconds = pause(0.1, busy)
                busy += 1
                if seconds >= self.left:
                    raise Throttled(f"busy for {self.budget:.3g} s ({e})") from e
                time.sleep(seconds)
            except AccessDenied as e:
                self._breaker.refuse(str(e))
                raise
            except (Forked, TooLarge):
                raise
            except Unchanged:
                self._breaker.succeed()
                raise
            except Exception as e:  # a library may raise what its documentation does not name
                failures += 1
                why = str(e) if isinstance(e, Unavailable) else f"{type(e).__name__}: {e!s:.160}"
                if wait >= min(timeout, _SHORTEST):
                    self._breaker.fail(why)
                if failures >= TRIES or self._breaker.open() or not self.left:
                    raise Unavailable(why) from e
            else:
                self._breaker.succeed()
                return answer

    def _allowed(self, timeout: float) -> float:
        """Return the seconds that a try may take. Raises Unavailable if there is to be none."""
        if why := self._breaker.open():
            raise CircuitOpen(why)
        if self.left <= 0:
            raise Unavailable(f"the budget of {self.budget:.3g} s is used up")
        return min(timeout, self.left)
