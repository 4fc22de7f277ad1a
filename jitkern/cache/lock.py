"""Locks: one builder at a time per key on this host. Locks save work; correctness needs none.

The operating system frees a lock when its holder dies. The lock directory is node-local, since
flock on a network file system may do nothing. Without locks, or after `lock_timeout`, the caller
builds without a lock: publishing is atomic, so the cost is at most one more compile. The package
filelock would do the same, but it adds hooks to a fork that waits for its import, which then fail.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from jitkern import config
from jitkern._fork import after_fork
from jitkern.files.trust import why_untrusted_entry

MESSAGE_EVERY = 10.0  # seconds, while a process waits
STALE = 86400.0  # seconds after which an unlocked lock file is deleted
POLL = 0.02  # seconds between two attempts to take a lock
_NAME = r"[0-9a-f]+-[0-9a-f]+\.lock"
_log = logging.getLogger(__name__)
_held: set[FileIO] = set()


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
    path = directory / f"{name}.lock"
    file = _waited_for(
        path, doing, what, config.current().lock_timeout if timeout is None else timeout
    )
    try:
        yield
    finally:
        _release(path, file)


def sweep() -> None:
    """Delete the files of locks whose holders were killed long ago."""
    directory = lock_directory(config.current())
    if directory is None:
        return
    for path in (directory / name for name in os.listdir(directory) if re.fullmatch(_NAME, name)):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > STALE:
                _release(path, _acquired(path))


def locked(path: Path, flags: int, *, wait: bool) -> int:
    """Open and lock `path`; return a descriptor, all copies of which hold the lock.

    Raises OSError; BlockingIOError if the lock is not free, or `path` was deleted meanwhile.
    """
    import fcntl  # not on Windows

    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.lstat()):
                return descriptor
        raise BlockingIOError(errno.EAGAIN, "deleted meanwhile", str(path))
    except OSError:
        os.close(descriptor)
        raise


def _acquired(path: Path) -> FileIO:
    """Take the lock of a file, which is made if missing. Raises OSError, as `locked` does."""
    file = FileIO(locked(path, os.O_RDWR | os.O_CREAT, wait=False))
    _held.add(file)
    return file


def _waited_for(path: Path, doing: str, what: str, timeout: float) -> FileIO | None:
    """Take a lock; return None if locks fail, or after `timeout` seconds."""
    begin, told = time.monotonic(), 0.0
    while True:
        try:
            return _acquired(path)
        except BlockingIOError:
            waited = time.monotonic() - begin
        except OSError as e:  # ENOLCK, ENOSYS, EROFS, EACCES: there are no locks here
            _log.info("cannot lock %s (%s); %s it without a lock", what, e, doing)
            return None
        if waited >= timeout:
            _log.warning("waited %g s for %s; %s it here", timeout, what, doing)
            return None
        if waited >= told + MESSAGE_EVERY:
            told = waited
            _log.warning("waiting for another process, which is %s %s", doing, what)
        time.sleep(POLL)


def _release(path: Path, file: FileIO | None) -> None:
    """Free a lock, unless it was not taken, or by the parent of this process.

    The file is deleted first: a lock on a deleted file does not count for who waits for it.
    """
    if file is not None and file in _held:
        with contextlib.suppress(OSError):
            path.unlink()
        _held.discard(file)
        file.close()


def _leave_to_parent() -> None:
    """Close the parent's locks in a fork, whose copies would hold them after the parent's end."""
    for file in _held:
        file.close()
    _held.clear()


after_fork(_leave_to_parent)


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
