"""One builder at a time per key on this host. It saves work; correctness never depends on it.

The operating system frees the lock when its holder dies. The lock directory is node-local, since
flock on a network file system may do nothing. Where locks are not to be had, or the wait reaches
its ceiling, the caller goes on without: publishing is atomic, so the worst is one more compile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from jitkern import config
from jitkern.trust import distrust_entry

PATIENCE = 10.0  # seconds between two messages to somebody who waits
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def held(name: str, what: str) -> Iterator[None]:
    """Hold the lock `name` (a file name) while building `what` (for messages)."""
    directory = lock_directory(config.current())
    if directory is None:
        yield
        return
    import filelock  # 20-100 ms to import: on a miss only

    path = directory / f"{name}.lock"
    owner = directory / f"{name}.owner"
    lock = filelock.FileLock(str(path), fallback_to_soft=False)  # a soft one outlives its holder
    held_now = _acquire(lock, owner, what)
    try:
        if held_now:
            with contextlib.suppress(OSError):
                owner.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        if held_now:
            with contextlib.suppress(OSError):
                lock.release()


def _acquire(lock: object, owner: Path, what: str) -> bool:
    import filelock

    assert isinstance(lock, filelock.BaseFileLock)
    deadline = time.monotonic() + config.current().lock_timeout
    while True:
        left = deadline - time.monotonic()
        try:
            lock.acquire(timeout=max(0.0, min(PATIENCE, left)), poll_interval=0.02)
            return True
        except filelock.Timeout:
            with contextlib.suppress(OSError):
                _log.warning(
                    "waiting for %s, which is compiling %s",
                    owner.read_text() or "another process",
                    what,
                )
            if left <= PATIENCE:
                _log.warning(
                    "waited %g s for %s; compiling it here", config.current().lock_timeout, what
                )
                return False
        except (OSError, NotImplementedError) as e:  # ENOLCK, ENOSYS, EROFS, EACCES: no locks here
            _log.info("no lock for %s (%s); going on without", what, e)
            return False


def lock_directory(settings: config.Config) -> Path | None:
    """A directory of this user on this node, made where it is missing, or None."""
    if not hasattr(os, "geteuid"):
        return None
    runtime = settings.runtime_dir
    candidates = [runtime / "jitkern"] if runtime else []
    with contextlib.suppress(FileNotFoundError):  # nowhere can be written
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
