"""Patience with remotes: deadlines for requests, and a breaker that lets a dead remote rest.

A remote may cost a miss at most its budget. Whatever hangs (a name service, a library, a server) is
left alone in a daemon thread, and Ctrl-C ends the wait at once.
"""

from __future__ import annotations

import contextvars
import hashlib
import json
import logging
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from jitkern import config
from jitkern.cache import lock
from jitkern.files import atomic
from jitkern.remote.store import (
    Forked,
    Refused,
    Throttled,
    TooLarge,
    Unavailable,
    Unchanged,
    shown,
)

FAILURES = 5  # in a row, after which a remote rests: of three, 30 % of lost requests make too many
REST = 60.0  # seconds
TRIES = 2  # requests for one object that may fail
_WAIT = 0.5  # seconds; CPython misses an interrupt that comes just before a wait, until it ends
LONGEST_NAP = 2.0  # seconds between two requests to a remote that is busy
_SHORTEST = 0.2  # seconds: a shorter wait that ends without an answer says nothing of the remote
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Resting(Unavailable):
    """The remote is not asked, because it failed or refused this client a moment ago."""


def within(seconds: float | None, work: Callable[[], _T]) -> _T:
    """Return what `work` returns, or raise what it raises. Ctrl-C ends the wait at once.

    Raises Unavailable after `seconds`; None for a wait without an end.
    """
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            answers.put((context.run(work), None))
        except BaseException as e:  # noqa: BLE001  it is raised where the answer is waited for
            answers.put((None, e))

    try:
        threading.Thread(target=run, name="jitkern remote", daemon=True).start()
    except RuntimeError as e:  # no more threads, or the interpreter is ending
        raise Forked(f"no thread for a request: {e}") from e
    end = time.monotonic() + (math.inf if seconds is None else seconds)
    while True:
        left = max(0.0, end - time.monotonic())
        try:
            answer, error = answers.get(timeout=min(_WAIT, left))
        except queue.Empty:
            if left <= _WAIT:
                raise Unavailable(f"no answer in {seconds:.3g} s") from None
        else:
            break
    if error:
        raise error
    result: _T = answer
    return result


def _unavailable(e: Exception) -> Unavailable:
    """Return an error as the contract of stores knows errors."""
    return Unavailable(str(e) if isinstance(e, Unavailable) else f"{type(e).__name__}: {e!s:.160}")


class Breaker:
    """The breaker of a remote: after FAILURES in a row the remote rests, then one request tries.

    file: keeps the state for all processes of this host and user; None for this process alone.
    """

    def __init__(self, url: str, file: Path | None) -> None:
        self.url = url
        self.file = file
        self._state = (0, 0.0)  # failures in a row, and until when to rest
        self._refused = ""

    def open(self) -> str:
        """Return why the remote is not asked now, or ""."""
        left = self._read()[1] - time.monotonic()
        if self._refused or left <= 0:
            return self._refused
        return f"resting for {left:.0f} s more after {FAILURES} failures in a row"

    def succeed(self) -> None:
        """Note an answer, whatever it says."""
        if self._read() != (0, 0.0):
            self._write(0, 0.0)

    def fail(self) -> None:
        """Note a failure."""
        failures = self._read()[0] + 1
        until = time.monotonic() + REST if failures >= FAILURES else 0.0
        if until:
            _log.warning("%s does not answer, and rests for %g s", self.url, REST)
        self._write(failures, until)

    def refuse(self, why: str) -> None:
        """Stay open for the life of this process; warn once."""
        if not self._refused:
            self._refused = f"it refused this client: {why}"
            _log.warning(
                "the remote %s refuses this client (%s) and is not asked again in this process: "
                "check its credentials, and `remote_token_file` of the settings", self.url, why,
            )  # fmt: skip

    def _read(self) -> tuple[int, float]:
        if self.file is None:
            return self._state
        try:
            failures, until = json.loads(self.file.read_bytes())
            known = int(failures), float(until)
        except (OSError, ValueError, TypeError, OverflowError, RecursionError):
            return 0, 0.0
        # A clock that began anew, as after a boot, makes an old time look far away.
        return known if known[1] - time.monotonic() <= REST else (0, 0.0)

    def _write(self, failures: int, until: float) -> None:
        self._state = failures, until
        if self.file is None:
            return
        try:
            if failures:
                atomic.write(self.file, json.dumps(self._state).encode(), mode=0o600)
            else:
                self.file.unlink(missing_ok=True)
        except OSError:
            self.file = None


def breaker_of(url: str) -> Breaker:
    """Return the breaker of a remote, whose state all processes of this host and user share."""
    folder = lock.lock_directory(config.current())
    name = hashlib.sha256(shown(url).encode()).hexdigest()[:16]
    return Breaker(shown(url), folder and folder / f"remote-{name}.json")


def resting(urls: Iterable[str]) -> str:
    """Return why none of several remotes is asked, if all of them rest; else ""."""
    reasons = {shown(url): breaker_of(url).open() for url in urls}
    told = (f"{url}: it is not asked: {why}" for url, why in reasons.items())
    return "; ".join(told) if all(reasons.values()) else ""


class Patience:
    """The patience for one miss: at most `budget` seconds, all requests and naps together."""

    def __init__(self, breaker: Breaker, budget: float) -> None:
        self._breaker = breaker
        self._started = time.monotonic()
        self.budget = budget

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return self._started + self.budget - time.monotonic()

    def ask(self, request: Callable[[], _T], timeout: float) -> _T:
        """Return what `request` returns, waiting at most `timeout` seconds for each try.

        A busy remote is asked again while the budget lasts; a failure is tried again once. Raises
        Unavailable, and Unchanged as the request does.
        """
        failures = busy = 0
        while True:
            wait = self._allowed(timeout)
            try:
                answer = within(wait, request)
            except Throttled as e:
                nap = random.random() * min(LONGEST_NAP, 0.1 * 2**busy)  # noqa: S311
                busy += 1
                if nap >= self.left:
                    raise Throttled(f"busy for {self.budget:.3g} s ({e})") from e
                time.sleep(nap)
            except Refused as e:
                self._breaker.refuse(str(e))
                raise
            except (Forked, TooLarge):
                raise
            except Unchanged:
                self._breaker.succeed()
                raise
            except Exception as e:  # a library may raise what its documentation does not name
                failures += 1
                if wait >= min(timeout, _SHORTEST):
                    self._breaker.fail()
                if failures >= TRIES:
                    raise _unavailable(e) from e
            else:
                self._breaker.succeed()
                return answer

    def _allowed(self, timeout: float) -> float:
        """Return the seconds that a try may take. Raises Unavailable if there is to be none."""
        if why := self._breaker.open():
            raise Resting(why)
        if self.left <= 0:
            raise Unavailable(f"the budget of {self.budget:.3g} s is used up")
        return min(timeout, self.left)

    def extend(self, budget: float) -> None:
        """Raise the budget to `budget` seconds."""
        self.budget = max(self.budget, budget)
