"""Locks: one builder at a time per key on this host. Locks save work; correctness needs none.

The operating system frees a lock when its holder dies. The lock directory is node-local, since
flock on a network file system may do nothing. Without locks, or after `lock_timeout`, the caller
builds without a lock: publishing is atomic, so the cost is at most one more compile. Importing
filelock takes as long as compiling some kernels, so who needs no lock does not import this module.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import filelock

from jitkern import config
from jitkern.files.trust import why_untrusted_entry

MESSAGE_EVERY = 10.0  # seconds, while a process waits
STALE = 86400.0  # seconds after which an unlocked lock file is deleted
POLL = 0.02  # seconds between two attempts to take a lock
_NAME = r"[0-9a-f]+-[0-9a-f]+\.lock"
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def held(
    name: str, what: str, *, doing: str = "compiling", timeout: float | None = None
) -> Iterator[None]:
    """Hold the lock of this name in a block that builds `what` (a description for messages).

    doing: what the holder does with it, for messages. timeout: seconds after which the block runs
    without the lock; by default the setting `lock_timeout`.
    """
    directory = lock_directory(config.current())
    if directory is None:
        yield
        return
    lock = _lock(directory / f"{name}.lock")
    _wait(lock, doing, what, config.current().lock_timeout if timeout is None else timeout)
    try:
        yield
    finally:
        _release(lock)


def sweep() -> None:
    """Delete the files of locks whose holders were killed long ago."""
    directory = lock_directory(config.current())
    if directory is None:
        return
    for path in (directory / name for name in os.listdir(directory) if re.fullmatch(_NAME, name)):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > STALE:
                lock = _lock(path)
                lock.acquire(timeout=0)
                _release(lock)


def _lock(path: Path) -> filelock.BaseFileLock:
    return filelock.FileLock(path, mode=0o600, poll_interval=POLL, fallback_to_soft=False)


def _wait(lock: filelock.BaseFileLock, doing: str, what: str, timeout: float) -> None:
    """Take a lock, unless locks fail or `timeout` seconds pass."""
    deadline = time.monotonic() + timeout
    while not lock.is_locked:
        left = deadline - time.monotonic()
        try:
            lock.acquire(timeout=max(0.0, min(MESSAGE_EVERY, left)))
        except filelock.Timeout:
            if left <= MESSAGE_EVERY:
                _log.warning("waited %g s for %s; %s it here", timeout, what, doing)
                return
            _log.warning("waiting for another process, which is %s %s", doing, what)
        except OSError as e:  # ENOLCK, ENOSYS, EROFS, EACCES: there are no locks here
            _log.info("cannot lock %s (%s); %s it without a lock", what, e, doing)
            return


def _release(lock: filelock.BaseFileLock) -> None:
    """Free a lock, unless it was not taken, or by the parent of this process.

    The file is deleted first: a lock on a deleted file does not count for who waits for it.
    """
    if lock.is_locked:
        with contextlib.suppress(OSError):
            Path(lock.lock_file).unlink()
        with contextlib.suppress(OSError):
            lock.release()


def lock_directory(settings: config.Config) -> Path | None:
    """Return a directory for locks that only this user can write, made if missing, or None."""
    runtime = settings.runtime_dir
    candidates = [runtime / "jitkern"] if runtime else []
    with contextlib.suppress(FileNotFoundError):  # no temporary directory can be written
        candidates.append(Path(tempfile.gettempdir(), f"jitkern-{os.geteuid()}"))
    for path in candidates:
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            status = path.lstat()
        except OSError:
            continue
        mine = stat.S_ISDIR(status.st_mode) and not why_untrusted_entry(status, {os.geteuid()})
        if mine and os.access(path, os.W_OK):
            return path
    return None
