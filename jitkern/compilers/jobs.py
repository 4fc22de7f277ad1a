"""How many compilers run at once in this process: with Torch's headers each takes gigabytes."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from jitkern import config

MEMORY_PER_JOB = 2 << 30  # a build with Torch's headers takes 1.5 to 3 GB

_freed = threading.Condition()
_taken = 0
_places = 1


def limit() -> int:
    """What the settings say (`--jobs`, JITKERN_JOBS), then MAX_JOBS, else by cores and memory."""
    settings = config.current()
    named = settings.environment.get("MAX_JOBS", "")
    if settings.jobs or (named.isdigit() and int(named)):
        return settings.jobs or int(named)
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    free = free_memory()
    return max(1, min(cores, free // MEMORY_PER_JOB)) if free else cores


def free_memory() -> int:
    """In bytes, of this machine, or of the container's share; 0 where that is not to be known."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", _text("/proc/meminfo"))
    share = _text("/sys/fs/cgroup/memory.max").strip()
    found = [int(available.group(1)) << 10] if available else []
    return min([*found, *([int(share)] if share.isdigit() else [])], default=0)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


@contextlib.contextmanager
def place(over: threading.Event) -> Iterator[int]:
    """Wait for one of the places and hold it; how many are taken then, or 0 once `over` is set."""
    global _taken, _places  # noqa: PLW0603
    with _freed:
        if not _taken:
            _places = limit()
        while _taken >= _places and not over.is_set():
            _freed.wait(0.1)  # nobody tells of `over`
        mine = 0 if over.is_set() else 1
        _taken += mine
        count = _taken * mine
    try:
        yield count
    finally:
        with _freed:
            _taken -= mine
            _freed.notify()


def _after_fork() -> None:
    """A child has none of its parent's threads, and so none of the places they hold."""
    global _freed, _taken
    _freed, _taken = threading.Condition(), 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
