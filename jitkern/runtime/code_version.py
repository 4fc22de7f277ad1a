"""The files of jitkern itself on which records of calls depend."""

from __future__ import annotations

import functools
import hashlib
import os

from jitkern._lazy import IMPORTED
from jitkern._version import __version__

_PACKAGE = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120  imports less
# Which decide the keys of kernels, what a trace gives, and how C runs it.
_ROOMS = ("cache", "calls", "compilers", "jit", "launch", "runtime", "source", "trace")
_TICK = 50_000_000  # nanoseconds within which two changes of a file may have one time
_COARSE = 2_000_000_000  # on a file system whose times are whole seconds


def paths() -> list[str]:
    """Return the files of jitkern on whose content launch records depend, sorted."""
    found = [f"{_PACKAGE}/target.py"]
    folders = [f"{_PACKAGE}/{room}" for room in _ROOMS]
    for folder in folders:  # it grows
        for item in os.scandir(folder):
            if item.name.endswith((".py", ".c")):
                found.append(item.path)
            elif item.name != "__pycache__" and item.is_dir():
                folders.append(item.path)
    return sorted(found)


@functools.cache
def digest() -> str:
    """Return a digest of the code of jitkern that decides which entries serve a call, and how.

    "" if the code is not that which runs: a file has changed since this process imported jitkern.
    """
    digest, changed = hashlib.sha256(__version__.encode()), 0
    for path in paths():
        with open(path, "rb") as file:
            digest.update(file.read())
            changed = max(changed, os.fstat(file.fileno()).st_ctime_ns)
    return digest.hexdigest() if changed <= IMPORTED else ""


def is_what_runs() -> bool:
    """Return whether none of these files has changed since, or just before, the import."""
    changed = max(os.stat(path).st_ctime_ns for path in paths())  # noqa: PTH116  a hundred
    return changed + (_TICK if changed % 10**9 else _COARSE) <= IMPORTED
