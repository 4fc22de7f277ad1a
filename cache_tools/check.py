"""The result of one check of a machine for `jitkern doctor`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

ELSEWHERE = "point JITKERN_CACHE_DIR at a directory of your own"
_ERROR = r"(?P<before>.*?)(?P<error>[^\s:]+(?::\d+(?::\d+)?|\(\d+\)): .*)"
_OF_A_COMPILER = _ERROR.replace(": .*)", r": (?:\w+ )?error: .*)")  # rather than of a launch


@dataclass(frozen=True)
class Check:
    """A line of `jitkern doctor`: the thing checked, its state and origin, and a remedy.

    A check with `ok` and a remedy is a warning.
    """

    name: str
    ok: bool
    value: str
    origin: str = ""
    remedy: str = ""


def fine(value: str) -> Check:
    """Return a check that passed."""
    return Check("", ok=True, value=value)


def warning(value: str, remedy: str) -> Check:
    """Return a check of a thing that works, and could work better with the remedy."""
    return Check("", ok=True, value=value, remedy=remedy)


def failure(value: str, remedy: str) -> Check:
    """Return a check that failed."""
    return Check("", ok=False, value=value, remedy=remedy)


def existing(path: Path) -> Path:
    """Return `path`, or its nearest parent that exists."""
    return next(p for p in (path, *path.parents) if os.path.lexists(p) or p == p.parent)


def counted(number: int, what: str) -> str:
    """Return a count as text, e.g. `1 kernel`, `2 kernels`."""
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def human_bytes(size: float) -> str:
    """Return a size in bytes as text, e.g. `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def human_age(seconds: float) -> str:
    """Return an age in seconds as text, e.g. `3 h`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def headline(text: str) -> tuple[str, str]:
    """Return the line of an error that names a line of a file, first in it, and the other lines."""
    first, _, more = text.strip().partition("\n")
    found = re.match(_OF_A_COMPILER, first) or re.match(_ERROR, first)
    if not found:
        return first, more
    rest = (more, found["before"].rstrip(": "))
    return found["error"], "\n".join(part for part in rest if part)
