"""A temporary root for one process, where no other can be written or trusted."""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
from pathlib import Path

from jitkern.errors import CacheError
from jitkern.files import atomic


@functools.cache
def private_root() -> Path:
    """The root, made at the first call and removed at the end of the process.

    Raises CacheError where nothing at all can be written.
    """
    path = _made()
    owner = os.getpid()
    atexit.register(lambda: atomic.delete(path) if os.getpid() == owner else None)
    return path


if hasattr(os, "register_at_fork"):  # a child has one of its own: its parent deletes this one
    os.register_at_fork(after_in_child=private_root.cache_clear)


def _made() -> Path:
    for directory in (None, "/dev/shm"):  # noqa: S108  mkdtemp makes a private one
        try:
            return Path(tempfile.mkdtemp(prefix="jitkern-", dir=directory))
        except OSError as e:
            reason = e.strerror
    raise CacheError(
        f"nothing can be compiled here, since no directory can be written ({reason}): "
        "point JITKERN_CACHE_DIR or TMPDIR at one, or prewarm a cache and name it in "
        "JITKERN_SYSTEM_CACHE",
        path="",
    )
