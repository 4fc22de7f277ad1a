"""What a cache holds, one row an entry."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jitkern.cache import VERSION, Cache, Entry
from jitkern.errors import CacheError


@dataclass(frozen=True)
class Row:
    """One entry.

    bytes: of its files; age_s: seconds since it was published; problem: "" for a whole one.
    """

    path: str
    op: str
    variant: str
    target: str
    compiler: str
    bytes: int
    age_s: float
    ok: bool
    problem: str = ""


def rows(cache: Cache) -> list[Row]:
    """Every entry of the user root and the layers, damaged ones too."""
    return [_row(path, found) for path, found in cache.entries()]


def find(cache: Cache, text: str) -> list[tuple[Row, Entry]]:
    """The whole entries whose folder name contains `text`, or whose digest begins with it."""
    return [
        (_row(path, entry), entry)
        for path, entry in cache.entries()
        if isinstance(entry, Entry)
        and (text in path.name or entry.manifest.digest.startswith(text))
    ]


def clear(cache: Cache, chosen: Iterable[Row]) -> int:
    """Remove these entries of the user root; returns the bytes freed. Raises CacheError."""
    freed = 0
    version = cache.root / VERSION
    for row in chosen:
        path = Path(row.path)
        if not path.is_relative_to(version):
            continue  # a read-only layer
        try:
            trash = version / "tmp" / f"{path.name}.{time.time_ns()}"
            trash.parent.mkdir(parents=True, exist_ok=True)
            path.rename(trash)  # readers see it whole or not at all
            shutil.rmtree(trash, ignore_errors=True)
        except FileNotFoundError:
            continue
        except OSError as e:
            raise CacheError(f"could not remove {path}: {e.strerror}", path=str(path)) from e
        freed += row.bytes
    return freed


def _row(path: Path, found: Entry | ValueError) -> Row:
    size, published = 0, time.time()
    with contextlib.suppress(OSError):
        size = sum(file.stat().st_size for file in path.iterdir())
        published = path.stat().st_mtime
    age = round(max(0.0, time.time() - published), 1)
    if isinstance(found, ValueError):
        label = path.name.rpartition("-")[0]
        return Row(
            str(path), "", label, path.parent.name, "", size, age, ok=False, problem=str(found)
        )
    manifest = found.manifest
    compiler = " ".join(manifest.compiler.values())
    return Row(
        str(path),
        found.op,
        found.variant,
        manifest.inputs["target"],
        compiler,
        size,
        age,
        ok=True,
    )
