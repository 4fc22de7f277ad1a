"""How long and how often a remote is asked: deadlines, attempts, and a cooldown after a failure.

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

COOLDOWN = 60.0  # seconds for which a remote that failed is not asked
TRIES = 2  # requests for one object; if the last one fails, the remote has failed
RETRIES = 4  # of a command
LONGEST_PAUSE = 2.0  # seconds between two requests to a remote that is busy
_WAIT = 0.5  # seconds; CPython misses an interrupt that comes just before a wait, until it ends
_SHORTEST = 0.2  # seconds: a shorter wait that ends without an answer says nothing of the remote
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class InCooldown(Unavailable):
    """The remote is not asked, because it failed a moment ago."""


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


def retry(work: Callable[..., _T], *args: Any, **options: Any) -> _T:
    """Call `work` for a command, and retry after failures. Raises Unavailable."""
    for attempt in range(RETRIES):
        try:
            return run_with_timeout(None, functools.partial(work, *args, **options))
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


class Cooldown:
    """The minute for which this process asks a remote nothing, because it failed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._until = 0.0  # by the monotonic clock
        self._why = ""

    def left(self) -> str:
        """Return why the remote is not asked now, or ""."""
        seconds = self._until - time.monotonic()
        return f"off for {seconds:.0f} s more, since it failed: {self._why}" if seconds > 0 else ""

    def begin(self, e: Unavailable) -> None:
        """Ask the remote nothing for COOLDOWN seconds, and warn."""
        self._until, self._why = time.monotonic() + COOLDOWN, str(e)
        _log.warning(
            "the remote %s is off for %g s, since it failed: %s: %s; %s",
            self.url, COOLDOWN, e.meaning, e, e.remedy,
        )  # fmt: skip


class Deadline:
    """The patience for one miss: at most `budget` seconds, all requests and pauses together."""

    def __init__(self, cooldown: Cooldown, budget: float) -> None:
        self._cooldown = cooldown
        self._started = time.monotonic()
        self.budget = budget

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return max(0.0, self._started + self.budget - time.monotonic())

    def extend(self, budget: float) -> None:
        """Raise the budget to `budget` seconds."""
        self.budget = max(self.budget, budget)

    def run(self, request: Callable[[], _T], timeout: float = math.inf) -> _T:
        """Return what `request` returns, waiting at most `timeout` seconds for each try.

        A busy remote is asked again while the budget lasts. A failure is tried again once, unless
        the client is refused; then the cooldown begins. Raises Unavailable, and Unchanged as the
        request does.
        """
        tries = busy = 0
        while True:
            wait = self._allowed(timeout)
            try:
                return run_with_timeout(wait, request)
            except Throttled as e:
                seconds = pause(0.1, busy)
                busy += 1
                if seconds >= self.left:
                    raise Throttled(f"busy for {self.budget:.3g} s ({e})") from e
                time.sleep(seconds)
            except (Forked, TooLarge, Unchanged):
                raise
            except AccessDenied as e:
                self._cooldown.begin(e)
                raise
            except Exception as e:  # a library may raise what its documentation does not name
                tries += 1
                if tries < TRIES and self.left:
                    continue
                text = str(e) if isinstance(e, Unavailable) else f"{type(e).__name__}: {e!s:.160}"
                failure = Unavailable(text)
                if wait >= min(timeout, _SHORTEST):
                    self._cooldown.begin(failure)
                raise failure from e

    def _allowed(self, timeout: float) -> float:
        """Return the seconds that a try may take. Raises Unavailable if there is to be none."""
        if why := self._cooldown.left():
            raise InCooldown(why)
        if self.left <= 0:
            raise Unavailable(f"the budget of {self.budget:.3g} s is used up")
        return min(timeout, self.left)
