"""Hits and misses of all processes: each process writes one line of JSON in `v1/stats` at its end.

The counts are kept per user root, and may be too low: a process that is killed writes no line, and
a line that cannot be written is no error. What writes lines is imported when they are written, for
a warm start counts its hits, too.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jitkern import cache, files as room
from jitkern._fork import after_fork
from jitkern.cache import VERSION

SHARDS = 64
REMOTE = "remote"  # the layer of what was fetched
LONGEST = 1e15  # seconds: larger numbers in a line are ignored
_FILE = r"([0-9a-f]{2}|sum)\.jsonl"
_counts: dict[Path, dict[str, Any]] = {}


def _counts_of(root: Path) -> dict[str, Any]:
    if not _counts:
        atexit.register(flush)
    return _counts.setdefault(root, {"hits": {}, "misses": {}, "saved_s": 0.0, "compiled_s": 0.0})


def hit(root: Path, layer: Path | str, seconds: float) -> None:
    """Count a hit in `layer`, in `root` itself or REMOTE, that saved `seconds` of compiling."""
    counts = _counts_of(root)
    name = "user" if layer == root else str(layer)
    counts["hits"][name] = counts["hits"].get(name, 0) + 1
    counts["saved_s"] += seconds


def miss(root: Path, reason: str, seconds: float) -> None:
    """Count a miss, and the `seconds` of compiling after it."""
    counts = _counts_of(root)
    counts["misses"][reason] = counts["misses"].get(reason, 0) + 1
    counts["compiled_s"] += seconds


def total(root: Path) -> dict[str, Any]:
    """Return the sum of the counts of all processes that have ended."""
    return _sum(_files(root / VERSION / "stats"))


def _sum(files: list[Path]) -> dict[str, Any]:
    totals: dict[str, Any] = {"hits": {}, "misses": {}, "saved_s": 0.0, "compiled_s": 0.0}
    for line in _lines(files):
        for name, value in line.items():
            if isinstance(value, dict) and isinstance(totals.get(name), dict):
                for key, count in value.items():
                    if type(count) is int:
                        totals[name][key] = totals[name].get(key, 0) + count
            elif isinstance(totals.get(name), float) and type(value) in (int, float):
                totals[name] += value if 0 <= value < LONGEST else 0
    return {name: round(v, 3) if isinstance(v, float) else v for name, v in totals.items()}


def compact(root: Path) -> None:
    """Replace all lines by one line with their sum. Raises OSError.

    Each file is renamed before it is read, so that two processes cannot count the same file.
    """
    stats = root / VERSION / "stats"
    files = _files(stats)
    if len(files) < 2:
        return
    taken_files = []
    for file in files:
        taken = file.with_name(f"{uuid.uuid4().hex}.taken")
        with contextlib.suppress(FileNotFoundError):
            taken_files.append(file.rename(taken))
    _append(stats / "sum.jsonl", _sum(taken_files))
    for file in taken_files:
        file.unlink(missing_ok=True)


def flush() -> None:
    """Write the counts of this process so far to the disk, while other threads may go on."""
    while _counts:
        with contextlib.suppress(OSError, KeyError):  # another thread may take the last one
            root, counts = _counts.popitem()
            stats = root / VERSION / "stats"
            if cache.layout.is_folder(stats.parent):
                room.atomic.make_directory(stats, 0o755, fsync=False)
                _append(stats / f"{uuid.uuid4().int % SHARDS:02x}.jsonl", counts)


def _append(path: Path, counts: dict[str, Any]) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(path, flags, 0o644)
    try:
        os.write(descriptor, json.dumps(counts, separators=(",", ":")).encode() + b"\n")
    finally:
        os.close(descriptor)


def _files(stats: Path) -> list[Path]:
    """Return the files with the counts of processes."""
    return [stats / name for name in cache.layout.names(stats) if re.fullmatch(_FILE, name)]


def _lines(files: list[Path]) -> Iterator[dict[str, Any]]:
    for path in files:
        with contextlib.suppress(OSError):
            for line in path.read_bytes().splitlines():
                with contextlib.suppress(ValueError, RecursionError):
                    counts = json.loads(line)
                    if isinstance(counts, dict):
                        yield counts


after_fork(_counts.clear)
