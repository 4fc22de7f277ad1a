"""What a cache holds, one row an entry."""

from __future__ import annotations

import fnmatch
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jitkern.cache_tools import pins
from jitkern.cache_tools.prune import Use

from jitkern.cache import VERSION, Cache, Entry
from jitkern.manifest import Manifest

RUNTIME = "jitkern::runtime"
SORTS = {
    "op": lambda row: (row.op, row.variant, row.target),
    "target": lambda row: (row.target, row.op, row.variant),
    "size": lambda row: row.bytes,
    "age": lambda row: row.age_s,
    "used": lambda row: row.used_s,
}


@dataclass(frozen=True)
class Row:
    """One entry.

    kind: of its source (nvrtc, triton, cc, extension, stub), or `plan` or `choice` for what a
    launch was found to need; package: name and version of that which its source came in; layer:
    the root it lies in; bytes: of its files; age_s: seconds since it was published, used_s: since
    it was last found, to an hour; problem: "" for a whole one.
    """

    path: str
    op: str
    variant: str
    target: str
    kind: str
    compiler: str
    package: str
    layer: str
    bytes: int
    age_s: float
    used_s: float
    pinned: bool
    ok: bool
    problem: str = ""


class Wanted(NamedTuple):
    """Which entries are meant: all that every field lets through.

    op, target: with `*` for anything; an op of jitkern with or without its namespace, a target with
    the host code that is built for it. kind: as in Row. older_than: seconds since an entry was last
    used; larger_than: bytes; problem, pinned: only damaged, only pinned ones.
    """

    op: str = ""
    target: str = ""
    kind: str = ""
    layer: str = ""
    older_than: float = 0.0
    larger_than: int = 0
    problem: bool = False
    pinned: bool = False

    def lets_through(self, row: Row) -> bool:
        """Whether this entry is one of them."""
        return (
            _fits(row.op, self._ops())
            and _fits(row.target, (self.target, f"{self.target}-*") if self.target else ())
            and (not self.kind or row.kind == self.kind)
            and (not self.layer or row.layer == self.layer)
            and row.used_s >= self.older_than
            and row.bytes >= self.larger_than
            and (not self.problem or not row.ok)
            and (not self.pinned or row.pinned)
        )

    def _ops(self) -> tuple[str, ...]:
        if "::" in self.op or not self.op:
            return (self.op,) if self.op else ()
        return self.op, f"jitkern::{self.op}"


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def rows(cache: Cache, wanted: Wanted = Wanted(), *, verify: str = "size") -> list[Row]:  # noqa: B008
    """The entries of the user root and the layers that are wanted, damaged ones too.

    verify: "size", or "always" to compare the hash of every artifact as well.
    """
    return [row for row, _ in _found(cache, wanted, verify)]


def find(cache: Cache, text: str) -> list[tuple[Row, Entry]]:
    """The whole entries whose folder name contains `text`, or whose digest begins with it."""
    return [
        (row, entry)
        for row, entry in _found(cache, Wanted(), "size")
        if isinstance(entry, Entry)
        and (text in entry.path.name or entry.manifest.digest.startswith(text))
    ]


def chosen(cache: Cache, wanted: Wanted) -> list[tuple[Row, Entry]]:
    """The whole entries that are wanted, and the launch runtimes that stubs among them need.

    Of one in several layers, that which a lookup finds.
    """
    found: dict[tuple[str, str], tuple[Row, Entry]] = {}
    for row, entry in _found(cache, wanted, "always"):
        if isinstance(entry, Entry):
            found.setdefault((row.target, entry.path.name), (row, entry))
    hosts = {_host_of(row.target) for row, _ in found.values() if row.kind == "stub"}
    for row, entry in _found(cache, Wanted(op=RUNTIME), "always") if hosts else ():
        if isinstance(entry, Entry) and _host_of(row.target) in hosts:
            found.setdefault((row.target, entry.path.name), (row, entry))
    return list(found.values())


def _host_of(target: str) -> str:
    """Torch version and platform: what a launch runtime is built for."""
    return target[target.rfind("-torch") :]


def _found(cache: Cache, wanted: Wanted, verify: str) -> list[tuple[Row, Entry | ValueError]]:
    pinned = pins.pinned(cache)
    now = time.time()
    found = [(_row(path, entry, pinned, now), entry) for path, entry in cache.entries(verify)]
    return [(row, entry) for row, entry in found if wanted.lets_through(row)]


def _row(path: Path, found: Entry | ValueError, pinned: set[Path], now: float) -> Row:
    try:
        use = Use.of(path)
    except OSError:
        use = Use(path, 0, now, now)  # gone, or not ours to read
    place: dict[str, Any] = {
        "path": str(path), "target": path.parent.name, "layer": _root_of(path), "bytes": use.bytes,
        "age_s": round(max(0.0, now - use.published), 1),
        "used_s": round(max(0.0, now - use.used), 1), "pinned": path in pinned,
    }  # fmt: skip
    if isinstance(found, ValueError):
        label = path.name.rpartition("-")[0]
        return Row(
            op="", variant=label, kind="", compiler="", package="", ok=False, problem=str(found),
            **place,
        )  # fmt: skip
    manifest = found.manifest
    return Row(
        op=found.op, variant=found.variant, kind=kind_of(manifest), ok=True,
        compiler=" ".join(manifest.compiler.values()), package=" ".join(manifest.package.values()),
        **place,
    )  # fmt: skip


def kind_of(manifest: Manifest) -> str:
    """`nvrtc`, `stub`, `plan` and the like: what an entry holds."""
    what = str(manifest.inputs.get("variant", {}).get("function", "")).partition(".")[0]
    if what in ("plan", "choice"):
        return what
    return str(manifest.inputs.get("source", {}).get("kind", ""))


def _root_of(path: Path) -> str:
    assert path.parents[1].name == VERSION
    return str(path.parents[2])
