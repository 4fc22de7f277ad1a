"""What a cache holds, one row an entry."""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jitkern.cache import pins
from jitkern.cache.eviction import Use
from jitkern.cache.manifest import MAX_BYTES, NAME, Manifest
from jitkern.cache.store import Cache, Entry
from jitkern.files import owned
from jitkern.files.owned import Layer

RUNTIME = "jitkern::runtime"
# An order goes by what is known without reading an entry: where few are wanted, few are read.
SORTS: dict[str, Callable[[Use], Any]] = {
    "op": lambda use: (use.path.name.rpartition("-")[0], use.path.parent.name),
    "target": lambda use: (use.path.parent.name, use.path.name),
    "size": lambda use: use.bytes,
    "age": lambda use: -use.published,
    "used": lambda use: -use.used,
}
AT_ONCE = 256  # entries that are read side by side
_LONGEST = 60  # letters of an op that are looked for in names of folders


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
            and (not self.kind or row.kind == self.kind)
            and (not self.problem or not row.ok)
        )

    def may_mean(self, target: str, name: str) -> bool:
        """Whether an entry of this target and folder name may be one."""
        return _fits(target, (self.target, f"{self.target}-*") if self.target else ()) and _fits(
            name, tuple(map(folders_of, self._ops()))
        )

    def may_use(self, use: Use, now: float) -> bool:
        """Whether it may be one, by its size and the time since it was found."""
        unused: float = max(0.0, now - use.used)
        return use.bytes >= self.larger_than and unused >= self.older_than

    def _ops(self) -> tuple[str, ...]:
        if "::" in self.op or not self.op:
            return (self.op,) if self.op else ()
        return self.op, f"jitkern::{self.op}"


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def folders_of(op: str) -> str:
    """A pattern of the names of folders that hold entries of an op."""
    plain = op.removeprefix("jitkern::").replace("::", ".")
    return plain[:_LONGEST] + "*" if re.fullmatch(r"[A-Za-z0-9_.*]+", plain) else "*"


def rows(
    cache: Cache,
    wanted: Wanted = Wanted(),  # noqa: B008
    *,
    verify: str = "size",
    sort: str = "",
    reverse: bool = False,
    limit: int | None = None,
) -> list[Row]:
    """The entries of the user root and the layers that are wanted, damaged ones too.

    verify: "size", "always" to compare the hash of every artifact as well, or "none" to believe
    what the manifest says. sort: one of SORTS, by default where they lie; limit: only the first.
    """
    found = _found(cache, wanted, verify, sort=sort, reverse=reverse)
    return [row for row, _ in itertools.islice(found, limit)]


def find(cache: Cache, text: str) -> list[tuple[Row, Entry]]:
    """The whole entries whose folder name contains `text`, or whose digest begins with it."""

    def named(_: str, name: str) -> bool:
        return text in name or name.rpartition("-")[2].startswith(text[:16])

    return [
        (row, entry)
        for row, entry in _found(cache, Wanted(), "size", named)
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


def _found(
    cache: Cache,
    wanted: Wanted,
    verify: str,
    named: Callable[[str, str], bool] | None = None,
    *,
    sort: str = "",
    reverse: bool = False,
) -> Iterator[tuple[Row, Entry | ValueError]]:
    """The entries that are wanted; each is read when its turn comes."""
    pinned = pins.pinned(cache)
    now = time.time()
    places = [
        (layer, _use_of(path, now))
        for layer, path in cache.places(named or wanted.may_mean)
        if (not wanted.layer or wanted.layer == str(layer.root))
        and (not wanted.pinned or path in pinned)
    ]
    if sort:
        places.sort(key=lambda place: SORTS[sort](place[1]), reverse=reverse)
    places = [place for place in places if wanted.may_use(place[1], now)]
    for layer, use, found in _read(cache, places, verify):
        if found is not None:
            row = _row(layer, use, found, pinned, now)
            if wanted.lets_through(row):
                yield row, found


def _read(
    cache: Cache, places: list[tuple[Layer, Use]], verify: str
) -> Iterator[tuple[Layer, Use, Entry | ValueError | None]]:
    """The entry at each place; entries are read side by side where every byte is."""

    def read(place: tuple[Layer, Use]) -> tuple[Layer, Use, Entry | ValueError | None]:
        layer, use = place
        if verify == "none" and layer.own:
            return layer, use, _peek(use.path)
        return layer, use, cache.entry_at(layer, use.path, verify)

    if verify != "always":
        yield from map(read, places)
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(places), AT_ONCE):
            yield from pool.map(read, places[start : start + AT_ONCE])


def _peek(path: Path) -> Entry | ValueError | None:
    """An entry as its manifest says; None for one that was removed since."""
    try:
        return Entry(path, Manifest.believed(owned.read(path, None, NAME, MAX_BYTES, None)))
    except (OSError, ValueError) as e:
        if not os.path.lexists(path):
            return None
        return e if isinstance(e, ValueError) else ValueError(str(e))


def _use_of(path: Path, now: float) -> Use:
    try:
        return Use.of(path)
    except OSError:
        return Use(path, 0, now, now)  # gone, or not ours to read


def _row(layer: Layer, use: Use, found: Entry | ValueError, pinned: set[Path], now: float) -> Row:
    path = use.path
    place: dict[str, Any] = {
        "path": str(path), "target": path.parent.name, "layer": str(layer.root),
        "bytes": use.bytes, "age_s": round(max(0.0, now - use.published), 1),
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
