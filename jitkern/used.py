"""Which entries of the cache this process used: those that it found, and those that it built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_used: dict[Path, None] = {}
_followers: list[Callable[[Path], None]] = []


def follow(follower: Callable[[Path], None]) -> None:
    """Call `follower` with the path of every entry that this process used, and of each to come."""
    _followers.append(follower)
    for path in tuple(_used):
        follower(path)


def note(path: Path) -> None:
    """Note that this process uses the entry at a path."""
    if path not in _used:
        _used[path] = None
        for follower in _followers:
            follower(path)
