"""The files of jitkern itself on which records of calls depend."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator

from jitkern._lazy import IMPORTED
from jitkern._version import __version__
from jitkern.source.kinds import SOURCES, Generated, Source

_PACKAGE = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120  imports less
_ROOMS = ("launch", "source", "trace")  # which decide what a trace gives
FILES = (  # beside these rooms: what turns sources, the machine and the runtime into keys, too
    "cache/key.py", "cache/records.py", "calls/signature.py", "compilers/__init__.py",
    "jit/request.py", "runtime/specializer.py", "runtime/program.c", "runtime/records.py",
    "runtime/runtime.c", "target.py",
)  # fmt: skip
_TICK = 50_000_000  # nanoseconds within which two changes of a file may have one time
_COARSE = 2_000_000_000  # on a file system whose times are whole seconds


def paths() -> Iterator[str]:
    """Yield the files of jitkern on whose content launch records depend."""
    for name in FILES:
        yield f"{_PACKAGE}/{name}"
    kinds: list[type[Source]] = [*SOURCES.values(), Generated]
    for kind in kinds:
        package, _, inside = kind.compiler.partition(":")[0].partition(".")
        if package == __package__.partition(".")[0]:
            path = f"{_PACKAGE}/{inside.replace('.', '/')}"
            yield f"{path}/__init__.py" if os.path.isdir(path) else f"{path}.py"  # noqa: PTH112
    folders = [f"{_PACKAGE}/{room}" for room in _ROOMS]
    for folder in folders:  # it grows
        for item in os.scandir(folder):
            if item.name.endswith(".py"):
                yield item.path
            elif item.name != "__pycache__" and item.is_dir():
                folders.append(item.path)


@functools.cache
def digest() -> str:
    """Return a digest of the code of jitkern that decides which entries serve a call, and how.

    "" if the code is not that which runs: a file has changed since this process imported jitkern.
    """
    digest, changed = hashlib.sha256(__version__.encode()), 0
    for path in sorted(paths()):
        with open(path, "rb") as file:
            digest.update(file.read())
            changed = max(changed, os.fstat(file.fileno()).st_ctime_ns)
    return digest.hexdigest() if changed <= IMPORTED else ""


def is_what_runs() -> bool:
    """Return whether none of these files has changed since, or just before, the import."""
    changed = max(os.stat(path).st_ctime_ns for path in paths())  # noqa: PTH116  sixty
    return changed + (_TICK if changed % 10**9 else _COARSE) <= IMPORTED
