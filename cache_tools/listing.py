"""Lists of the entries of a cache, with one row for each entry, and their sums."""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jitkern.cache.eviction import Use
from jitkern.cache.key import OBJECT
from jitkern.cache.manifest import MAX_BYTES, NAME, Manifest
from jitkern.cache.store import Cache, Entry
from jitkern.files import trust
from jitkern.files.trust import Layer

OF_ALL_OPS = ("jitkern::runtime", "jitkern_recorder")  # entries that no op has for itself
# Sort keys need no read of an entry, so that a listing of few entries reads few. The largest and
# the newest entries come first.
SORTS: dict[str, Callable[[Use], Any]] = {
    "op": lambda use: (use.path.name.rpartition("-")[0], use.path.parent.name),
    "target": lambda use: (use.path.parent.name, use.path.name),
    "size": lambda use: -use.bytes,
    "age": lambda use: -use.published,
    "used": lambda use: -use.used,
}
_LONGEST = 60  # letters of an op's name that are compared with names of folders


@dataclass(frozen=True)
class Row:
    """A row of a listing, which describes one entry.

    kind: kind of source (nvrtc, triton, cc, extension, runtime), `object`, or kind of a record
        (call, choice, declaration, shortcut).
    package: name and version of the package with the source.
    layer: the root that holds the entry.
    bytes: size of all files of the entry.
    age_s, used_s: seconds since its publication, and since its last use, to an hour.
    problem: the defect of a damaged entry, or "".
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
    ok: bool
    problem: str = ""


class EntryFilter(NamedTuple):
    """A filter of entries: an entry passes if it fits every field.

    op: pattern with `*`, or several; ops of jitkern with or without their namespace.
    target: pattern with `*`, which may leave out the device and what follows a `-`; includes the
        host code that is built for the target.
    kind, layer: as in Row.
    older_than: seconds since the last use of an entry, at least.
    larger_than: bytes of an entry, at least.
    problem: whether only damaged entries pass.
    """

    op: str | Sequence[str] = ""
    target: str = ""
    kind: str = ""
    layer: str = ""
    older_than: float = 0.0
    larger_than: int = 0
    problem: bool = False

    def lets_through(self, row: Row) -> bool:
        """Return whether the entry of a row passes this filter."""
        return (
            _fits(row.op, self._ops())
            and (not self.kind or row.kind == self.kind)
            and (not self.problem or not row.ok)
        )

    def may_mean(self, target: str, name: str) -> bool:
        """Return whether an entry with this target and folder name may pass this filter."""
        targets = [f"{device}{self.target}" for device in ("", "cpu-", "cuda-") if self.target]
        return _fits(target, (*targets, *(f"{one}-*" for one in targets))) and _fits(
            name, tuple(map(folders_of, self._ops()))
        )

    def may_use(self, use: Use, now: float) -> bool:
        """Return whether an entry may pass, by its size and the time since its last use."""
        unused: float = max(0.0, now - use.used)
        return use.bytes >= self.larger_than and unused >= self.older_than

    def _ops(self) -> tuple[str, ...]:
        ops = (self.op,) if isinstance(self.op, str) else self.op
        names = [(op,) if "::" in op else (op, f"jitkern::{op}") for op in ops if op]
        return tuple(itertools.chain.from_iterable(names))


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def folders_of(op: str) -> str:
    """Return a pattern that fits the folder names of all entries of an op."""
    plain = _plain(op)
    return plain[:_LONGEST] + "*" if re.fullmatch(r"[A-Za-z0-9_.*]+", plain) else "*"


def rows(
    cache: Cache,
    wanted: EntryFilter = EntryFilter(),  # noqa: B008
    *,
    verify: str = "size",
    sort: str = "",
    reverse: bool = False,
    limit: int | None = None,
) -> list[Row]:
    """Return the rows of the chosen entries of the user root and the layers, damaged ones included.

    verify: "size", "always" to check the hashes of the artifacts too, or "none" to trust manifests.
    sort: a key of SORTS, or "" for the order of the paths. limit: the most rows to return.
    """
    entries = _filtered(cache, wanted, verify, sort=sort, reverse=reverse)
    return [row for row, _ in itertools.islice(entries, limit)]


def stats(cache: Cache, listed: Iterable[Row] | None = None) -> dict[str, Any]:
    """Return totals of rows, by default of all: `entries`, `damaged`, and `bytes`.

    `bytes_by_target` and `bytes_by_op` show what takes the space.
    """
    chosen = rows(cache, verify="none") if listed is None else list(listed)
    by_target: Counter[str] = Counter()
    by_op: Counter[str] = Counter()
    for row in chosen:
        by_target[row.target] += row.bytes
        by_op[row.op or "damaged"] += row.bytes
    return {
        "entries": len(chosen),
        "bytes": by_target.total(),
        "damaged": sum(not row.ok for row in chosen),
        "bytes_by_target": dict(by_target),
        "bytes_by_op": dict(by_op),
    }


def find(cache: Cache, text: str) -> list[tuple[Row, Entry]]:
    """Return the whole entries of an op or a variant, or with a digest that begins so.

    text: `softmax`, `softmax.f32`, the beginning of a digest, or that of an entry's name.
    """
    label, _, digits = text.rpartition("-")

    def may_mean(_: str, name: str) -> bool:
        folder, _, digest = name.rpartition("-")
        return digest.startswith(digits[:16]) or _fits(folder, (folders_of(label or text),))

    return [
        (row, entry)
        for row, entry in _filtered(cache, EntryFilter(), "size", may_mean)
        if isinstance(entry, Entry)
        and (
            _plain(text) in (_plain(row.op), name := entry.path.name.rpartition("-")[0])
            or (entry.manifest.digest.startswith(digits) and label in ("", name))
        )
    ]


def _plain(op: str) -> str:
    return op.removeprefix("jitkern::").replace("::", ".")


def chosen(cache: Cache, wanted: EntryFilter) -> list[Entry]:
    """Return the chosen undamaged entries, and the entries of all ops that their calls need.

    An entry in several layers is returned once, from the layer that a lookup takes. Objects of
    units are of no use where nothing is compiled: they are returned if their kind is wanted.
    """
    entries: dict[tuple[str, str], Entry] = {}
    for row, entry in _filtered(cache, wanted, "always"):
        if isinstance(entry, Entry) and (row.kind != OBJECT or wanted.kind == OBJECT):
            entries.setdefault((row.target, entry.path.name), entry)
    hosts = {_host_of(target) for target, _ in entries}
    for row, entry in _filtered(cache, EntryFilter(op=OF_ALL_OPS), "always") if hosts else ():
        if isinstance(entry, Entry) and _host_of(row.target).startswith(tuple(hosts)):
            entries.setdefault((row.target, entry.path.name), entry)
    return list(entries.values())


def _host_of(target: str) -> str:
    """Return the Torch version and platform of a target, for which a launch runtime is built."""
    return target[target.rfind("-torch") :]


def _filtered(
    cache: Cache,
    wanted: EntryFilter,
    verify: str,
    named: Callable[[str, str], bool] | None = None,
    *,
    sort: str = "",
    reverse: bool = False,
) -> Iterator[tuple[Row, Entry | ValueError]]:
    """Yield the chosen entries with their rows; entries are read lazily."""
    now = time.time()
    places = [
        (layer, _use_of(path, now))
        for layer, path in cache.places(named or wanted.may_mean)
        if not wanted.layer or wanted.layer == str(layer.root)
    ]
    if sort:
        places.sort(key=lambda place: SORTS[sort](place[1]), reverse=reverse)
    places = [place for place in places if wanted.may_use(place[1], now)]
    for layer, use, entry in _read(cache, places, verify):
        if entry is not None:
            row = _row(layer, use, entry, now)
            if wanted.lets_through(row):
                yield row, entry


def _read(
    cache: Cache, places: list[tuple[Layer, Use]], verify: str
) -> Iterator[tuple[Layer, Use, Entry | ValueError | None]]:
    """Yield the entry at each place; entries are read in parallel if all their bytes are read."""

    def read(place: tuple[Layer, Use]) -> tuple[Layer, Use, Entry | ValueError | None]:
        layer, use = place
        if verify == "none" and layer.own:
            return layer, use, _peek(use.path)
        return layer, use, cache.entry_at(layer, use.path, verify)

    if verify != "always":
        yield from map(read, places)
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(read, places)


def _peek(path: Path) -> Entry | ValueError | None:
    """Return an entry by its manifest only, or its defect, or None if it was removed meanwhile."""
    try:
        with trust.opened(path) as directory:
            return Entry(path, Manifest.believed(trust.read(directory, NAME, MAX_BYTES, None)))
    except (OSError, ValueError) as e:
        if not os.path.lexists(path):
            return None
        return e if isinstance(e, ValueError) else ValueError(str(e))


def _use_of(path: Path, now: float) -> Use:
    try:
        return Use.of(path)
    except OSError:
        return Use(path, 0, now, now)  # the entry is gone, or this user may not read it


def _row(layer: Layer, use: Use, entry: Entry | ValueError, now: float) -> Row:
    path = use.path
    place: dict[str, Any] = {
        "path": str(path), "target": path.parent.name, "layer": str(layer.root),
        "bytes": use.bytes, "age_s": round(max(0.0, now - use.published), 1),
        "used_s": round(max(0.0, now - use.used), 1),
    }  # fmt: skip
    if isinstance(entry, ValueError):
        label = path.name.rpartition("-")[0]
        return Row(
            op="", variant=label, kind="", compiler="", package="", ok=False, problem=str(entry),
            **place,
        )  # fmt: skip
    manifest, inputs = entry.manifest, entry.manifest.inputs
    return Row(
        op=entry.op, variant=entry.variant, ok=True,
        kind=str(inputs.get("record") or inputs.get("source", {}).get("kind", "")),
        compiler=" ".join(manifest.compiler.values()), package=" ".join(manifest.package.values()),
        **place,
    )  # fmt: skip
