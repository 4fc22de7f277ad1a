"""How many compilers may run at once: with Torch's headers each takes gigabytes."""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from jitkern import config
from jitkern._fork import after_fork

MEMORY_PER_JOB = 2 << 30  # a build with Torch's headers takes 1.5 to 3 GB
_CGROUP = "/sys/fs/cgroup"
_MEMORY = (  # files of a container's limit and its use, of cgroups of the second and first version
    ("memory.max", "memory.current", _CGROUP),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", f"{_CGROUP}/memory"),
)

_freed = threading.Condition()
_taken = 0
_limit = 1


def limit() -> int:
    """The number of jobs: of the settings, else MAX_JOBS, else by cores and memory."""
    settings = config.current()
    named = settings.environment.get("MAX_JOBS", "")
    if settings.jobs or (named.isdigit() and int(named)):
        return settings.jobs or int(named)
    free = free_memory()
    return cores() if free is None else max(1, min(cores(), free // MEMORY_PER_JOB))


def cores() -> int:
    """The cores that this process may use: its affinity, and what its container allows."""
    here = processors()
    quota, _, period = text_of(f"{_CGROUP}/cpu.max").partition(" ")
    if not quota.isdigit():  # "max", or cgroups of the first version
        quota = text_of(f"{_CGROUP}/cpu/cpu.cfs_quota_us")
        period = text_of(f"{_CGROUP}/cpu/cpu.cfs_period_us")
    share = _number(quota) / (_number(period) or 1)
    return max(1, min(here, math.ceil(share))) if share > 0 else here


def processors() -> int:
    """The processors that this process may run on, whatever share of them its container allows."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> int | None:
    """The free bytes of this machine or of its container, the smaller; None if unknown."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", text_of("/proc/meminfo"))
    sizes = [int(available.group(1)) << 10] if available else []
    for limit, used, folder in _MEMORY:
        most = _number(text_of(f"{folder}/{limit}"))
        if most:
            # Cached file pages count as used, and are freed when something else needs the space.
            files = re.search(
                r"(?m)^(?:total_)?inactive_file (\d+)", text_of(f"{folder}/memory.stat")
            )
            taken = _number(text_of(f"{folder}/{used}")) - (int(files.group(1)) if files else 0)
            sizes.append(max(0, most - max(0, taken)))
    return min(sizes, default=None)


def _number(text: str) -> int:
    """The number in a file of the system; 0 for "max", for -1 and without the file."""
    return int(text) if text.strip().isdigit() else 0


def text_of(path: str) -> str:
    """Return the text of a file of the system, or "" if it does not exist."""
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


@contextlib.contextmanager
def places(wanted: int) -> Iterator[int]:
    """Wait for a free slot, and hold up to `wanted` of them; yields their number."""
    global _taken, _limit  # noqa: PLW0603
    with _freed:
        if not _taken:
            _limit = limit()
        while _taken >= _limit:
            _freed.wait(0.1)  # CPython misses an interrupt that comes just before a longer wait
        held = min(wanted, _limit - _taken)
        _taken += held
    try:
        yield held
    finally:
        with _freed:
            _taken -= held
            _freed.notify()


def _free_all() -> None:
    """Free all places in a forked child, where no thread holds one."""
    global _taken  # noqa: PLW0603
    _taken = 0


after_fork(_freed, _free_all)
