"""The outcome of looking at one thing that a cache needs of the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ELSEWHERE = "point JITKERN_CACHE_DIR at a directory of your own"


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, what was found and from where, and what to do about it.

    With `ok` and a remedy it is a warning.
    """

    name: str
    ok: bool
    value: str
    origin: str = ""
    remedy: str = ""


def fine(value: str) -> Check:
    """What is as it should be."""
    return Check("", ok=True, value=value)


def warning(value: str, remedy: str) -> Check:
    """What works, and could be better."""
    return Check("", ok=True, value=value, remedy=remedy)


def failure(value: str, remedy: str) -> Check:
    """What does not work."""
    return Check("", ok=False, value=value, remedy=remedy)


def existing(path: Path) -> Path:
    """`path`, or the nearest above it that is there."""
    return next(p for p in (path, *path.parents) if os.path.lexists(p) or p == p.parent)
