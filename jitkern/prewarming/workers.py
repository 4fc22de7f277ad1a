"""Processes that are forked to work for this one, and end with it."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from jitkern.compilers import child_process

PATIENCE = 5.0  # seconds that a worker has for its end, after which it is killed
_PR_SET_PDEATHSIG = 1
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def forked(
    work: Callable[..., object], *args: Any, name: str, daemon: bool = False
) -> tuple[Any, Connection]:
    """Fork a process that does `work`; return it, and our end of a pipe to it.

    work: called with `args`, its end of the pipe, our end, which it is to close, and the number of
    this process. Signals are blocked in it until `begin`.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=work, args=(*args, theirs, ours, os.getpid()), name=name, daemon=daemon
    )
    for stream in (sys.stdout, sys.stderr):  # else the process would write buffered text, too
        stream.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return process, ours


def ended(process: Any, seconds: float | None) -> str:
    """Wait for a process, which is killed after `seconds`; return how it ended."""
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
    code = process.exitcode or 0
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"


def begin(parent: int) -> None:
    """Make a forked process a worker, as `follow` says. The signals may be blocked before."""
    follow(parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    import torch

    torch.set_num_threads(1)  # a fork does not copy the threads of Torch


def follow(parent: int) -> None:
    """Let this process end with its parent, and leave a Ctrl-C, which reaches both, to the parent.

    SIGTERM ends what the process does: no compiler outlives it.
    """
    signal.signal(signal.SIGINT, _ignore)
    signal.signal(signal.SIGTERM, _interrupt)
    _end_with(parent)


def _end_with(parent: int) -> None:
    """Let the system end this process with its parent, even while it waits for a compiler."""
    with contextlib.suppress(OSError, AttributeError):  # only Linux has prctl
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _ignore(*_: object) -> None:
    pass


def _interrupt(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, _ignore)  # the end of the parent sends one more, into the cleanup
    child_process.end()
    raise SystemExit(1)  # which `multiprocessing` takes without a traceback
