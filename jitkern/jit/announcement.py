"""Say on the terminal what a call waits for while its kernel compiles for the first time."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
import time
from collections.abc import Iterator

from jitkern import config

PATIENCE = 2.0  # seconds that a compile may take before the user is told
_log = logging.getLogger(__name__)
_quiet = contextvars.ContextVar("_quiet", default=False)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Announce nothing inside: for commands that show their own progress."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


@contextlib.contextmanager
def announced(what: str) -> Iterator[None]:
    """Announce a compile that takes longer than `PATIENCE`, and its end unless it fails.

    what: the op and the target, e.g. `mylib::scale for sm_90`.
    """
    if _quiet.get():
        yield
        return
    begin = time.perf_counter()
    announced_at: list[float] = []

    def announce() -> None:
        announced_at.append(time.perf_counter())
        _tell(f"compiling {what}, once; cached afterwards")

    with config.background.overdue(PATIENCE, announce):
        yield
    if announced_at:
        _tell(f"compiled {what} in {time.perf_counter() - begin:.1f} s")


def _tell(text: str) -> None:
    """Write a line to the terminal; log it at INFO without a terminal, or if INFO is shown."""
    terminal = sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
    if terminal and _log.getEffectiveLevel() == logging.WARNING:
        with contextlib.suppress(OSError):  # the terminal is gone
            sys.stderr.write(f"jitkern: {text}\n")
            sys.stderr.flush()
    else:
        _log.info("%s", text)
