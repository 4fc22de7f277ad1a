"""A temporary root for one process, used where no other root can be written or trusted.

A process that is killed, or ends by os._exit as children of multiprocessing do, leaves its root
behind. Each root is locked until its process ends; the next process of the same user that makes a
root deletes the unlocked roots. Process ids would not do: containers share /tmp, but not ids.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import tempfile
from pathlib import Path

from jitkern._fork import after_fork
from jitkern.cache.lock import locked
from jitkern.errors import CacheError
from jitkern.files import atomic

_PREFIX = "jitkern-private-"


@functools.cache
def private_root() -> Path:
    """Return the root, made at the first call and removed at the end of the process.

    Raises CacheError where no directory can be written.
    """
    path = _new_root()
    owner = os.getpid()

    def delete() -> None:
        if os.getpid() == owner:
            atomic.delete(path)
            sweep(path.parent)  # the children of this process have most likely ended

    atexit.register(delete)
    return path


after_fork(private_root.cache_clear)  # a child makes a new root: its parent deletes the old one


def _new_root() -> Path:
    for directory in (None, "/dev/shm"):  # noqa: S108  mkdtemp makes a private folder
        try:
            path = new_root_in(directory)
        except OSError as e:
            reason = e.strerror
        else:
            sweep(path.parent)
            return path
    raise CacheError(
        f"cannot compile here, because no directory is writable ({reason}): "
        "point JITKERN_CACHE_DIR or TMPDIR at one, or prewarm a cache and name it in "
        "JITKERN_SYSTEM_CACHE",
        path="",
    )


def new_root_in(directory: str | None) -> Path:
    """Make a root and lock it. Raises OSError."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))
        with contextlib.suppress(OSError):  # without locks no process sweeps either
            locked(path, os.O_DIRECTORY, wait=True)
        if path.is_dir():  # otherwise the root was swept before it was locked
            return path


def sweep(folder: Path) -> None:
    """Delete this user's unused roots in a folder."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if re.fullmatch(_PREFIX + r"\w{8}", name):
                with contextlib.suppress(OSError):
                    _delete_unlocked(folder / name)


def _delete_unlocked(path: Path) -> None:
    """Delete a root of this user. Raises OSError where it is locked or no directory."""
    if path.lstat().st_uid != os.geteuid():
        return
    descriptor = locked(path, os.O_DIRECTORY, wait=False)
    atomic.delete(path)
    os.close(descriptor)
