"""A temporary root for one process, where no other can be written or trusted.

A process that is killed, or ends by os._exit as children of multiprocessing do, leaves its root
behind. Each is locked until its process has ended, and what nobody locks is deleted by the next
process of the same user that makes one. Ids of processes would not tell: containers share /tmp.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import tempfile
from pathlib import Path

from jitkern.errors import CacheError
from jitkern.files import atomic

_PREFIX = "jitkern-private-"


@functools.cache
def private_root() -> Path:
    """The root, made at the first call and removed at the end of the process.

    Raises CacheError where nothing at all can be written.
    """
    path = _made()
    owner = os.getpid()

    def delete() -> None:
        if os.getpid() == owner:
            atomic.delete(path)
            _sweep(path.parent)  # children have ended, most likely

    atexit.register(delete)
    return path


if hasattr(os, "register_at_fork"):  # a child has one of its own: its parent deletes this one
    os.register_at_fork(after_in_child=private_root.cache_clear)


def _made() -> Path:
    for directory in (None, "/dev/shm"):  # noqa: S108  mkdtemp makes a private one
        try:
            path = _made_in(directory)
        except OSError as e:
            reason = e.strerror
        else:
            _sweep(path.parent)
            return path
    raise CacheError(
        f"nothing can be compiled here, since no directory can be written ({reason}): "
        "point JITKERN_CACHE_DIR or TMPDIR at one, or prewarm a cache and name it in "
        "JITKERN_SYSTEM_CACHE",
        path="",
    )


def _made_in(directory: str | None) -> Path:
    """A new root, locked. Raises OSError."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))
        with contextlib.suppress(OSError, ImportError):  # no locks here: then nobody sweeps either
            _locked(path, wait=True)
        if path.is_dir():  # else it was swept before it was locked
            return path


def _sweep(folder: Path) -> None:
    """Delete the roots in a folder that this user made and no process has any more."""
    with contextlib.suppress(OSError, ImportError):
        for name in os.listdir(folder):
            if re.fullmatch(_PREFIX + r"\w{8}", name):
                with contextlib.suppress(OSError):
                    _delete_unlocked(folder / name)


def _delete_unlocked(path: Path) -> None:
    """Raises OSError where it is locked, somebody else's, or no directory."""
    if path.lstat().st_uid != os.geteuid():
        return
    descriptor = _locked(path, wait=False)
    atomic.delete(path)
    os.close(descriptor)


def _locked(path: Path, *, wait: bool) -> int:
    """A descriptor; closing it, and its copies in forked children, frees the directory.

    Raises OSError, and ImportError where there are no such locks.
    """
    import fcntl

    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), path.lstat()):
            raise FileNotFoundError(path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
