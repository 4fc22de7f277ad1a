"""Locks: one builder at a time per key on this host. Locks save work; correctness needs none.

The operating system frees a lock when its holder dies. The lock directory is node-local, since
flock on a network file system may do nothing. Without locks, or after `lock_timeout`, the caller
builds without a lock: publishing is atomic, so the cost is at most one more compile. The package
filelock would do the same, but its import takes as long as compiling some kernels.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from jitkern import config
from jitkern._fork import after_fork
from jitkern.files.owned import distrust_entry

MESSAGE_EVERY = 10.0  # seconds, while a process waits
STALE = 86400.0  # seconds after which an unlocked lock file is deleted
POLL = 0.02  # seconds between two attempts to take a lock
_NAME = r"[0-9a-f]+-[0-9a-f]+\.(lock|owner)"
_log = logging.getLogger(__name__)
_held: set[int] = set()  # descriptors of lock files


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
    path, owner = directory / f"{name}.lock", directory / f"{name}.owner"
    if timeout is None:
        timeout = config.current().lock_timeout
    descriptor = _acquire(path, owner, (doing, what), timeout)
    try:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                owner.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        if descriptor in _held:
            for file in (owner, path):  # the lock last: until then no other process writes an owner
                with contextlib.suppress(OSError):
                    file.unlink()
            _release(descriptor)


def sweep() -> None:
    """Delete the files of locks whose holders were killed long ago."""
    directory = lock_directory(config.current())
    if directory is None:
        return
    for name in os.listdir(directory):
        if not re.fullmatch(_NAME, name):
            continue
        with contextlib.suppress(OSError):
            path = directory / name
            if time.time() - path.lstat().st_mtime > STALE:
                descriptor = _tried(path.with_suffix(".lock"))
                if descriptor is not None:
                    path.with_suffix(".owner").unlink(missing_ok=True)
                    path.with_suffix(".lock").unlink(missing_ok=True)
                    _release(descriptor)


def _acquire(path: Path, owner: Path, work: tuple[str, str], timeout: float) -> int | None:
    """Wait for a lock and return its descriptor; None if locks fail, or after `timeout`."""
    deadline = time.monotonic() + timeout
    doing, what = work
    while True:
        left = deadline - time.monotonic()
        try:
            descriptor = _poll(path, time.monotonic() + max(0.0, min(MESSAGE_EVERY, left)))
        except OSError as e:  # ENOLCK, ENOSYS, EROFS, EACCES: there are no locks here
            _log.info("cannot lock %s (%s); %s it without a lock", what, e, doing)
            return None
        if descriptor is not None:
            return descriptor
        with contextlib.suppress(OSError):
            holder = owner.read_text() or "another process"
            _log.warning("waiting for %s, which is %s %s", holder, doing, what)
        if left <= MESSAGE_EVERY:
            _log.warning("waited %g s for %s; %s it here", timeout, what, doing)
            return None


def _poll(path: Path, until: float) -> int | None:
    """Try to take a lock until a time (`time.monotonic`); return its descriptor, or None."""
    while True:
        descriptor = _tried(path)
        if descriptor is not None or time.monotonic() >= until:
            return descriptor
        time.sleep(POLL)


def _tried(path: Path) -> int | None:
    """Try once to take a lock; return its descriptor, or None if it is taken. Raises OSError.

    A process that releases a lock deletes the file, so a lock on a deleted file does not count.
    """
    import fcntl  # not on Windows, where `lock_directory` returns None

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    _held.add(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except BlockingIOError:
        pass
    except BaseException:
        _close(descriptor)
        raise
    _close(descriptor)
    return None


def _release(descriptor: int) -> None:
    """Free a lock, even if a forked child of this process has the descriptor, too."""
    import fcntl

    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    _close(descriptor)


def _close(descriptor: int) -> None:
    _held.discard(descriptor)
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _close_all() -> None:
    """Close the lock files of the parent, so that its locks end with it, not with this child."""
    for descriptor in tuple(_held):
        _close(descriptor)


after_fork(_close_all)


def lock_directory(settings: config.Config) -> Path | None:
    """Return a directory for locks that only this user can write, made if missing, or None."""
    if not hasattr(os, "geteuid"):
        return None
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
        mine = stat.S_ISDIR(status.st_mode) and not distrust_entry(status, {os.geteuid()})
        if mine and os.access(path, os.W_OK):
            return path
    return None
