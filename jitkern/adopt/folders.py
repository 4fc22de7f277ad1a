"""The folder of a JIT: filled from entries of the cache, and what is new in it kept as entries.

    <root>/v1/run/<target>/<jit>-<digest>/        what the JIT reads and writes
    <root>/v1/run/<target>/<jit>-<digest>.json    which files are known: size, time and SHA-256

An entry holds files of one JIT: its artifacts are numbered, and `meta["files"]` says their paths.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import shutil
import stat
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jitkern.adopt.jits import SKIPPED, Jit
from jitkern.adopt.machine import Machine
from jitkern.cache import VERSION
from jitkern.cache.entry import Entry
from jitkern.cache.key import SCHEMA, Key, canonical, digest_of, label_of
from jitkern.cache.layout import JITS
from jitkern.cache.manifest import Manifest
from jitkern.cache.store import Cache
from jitkern.files import atomic
from jitkern.files.trust import digest
from jitkern.named_tuple import NamedTuple

KIND = "run"  # of the entries, and the namespace of their ops
BATCH = 1 << 20  # bytes of an entry, about: what a bundle of a remote takes
MOST_FILES = 500  # of an entry
LARGEST_FILE = 512 << 20  # bytes; what is larger stays where it is
SETTLED = 2.0  # seconds after its last change, when a file counts as whole while a program runs


class Kept(NamedTuple):
    """What is in the folder of a JIT: the files of new entries, and paths left out with reasons."""

    files: int = 0
    bytes: int = 0
    left_out: tuple[str, ...] = ()


class Folder:
    """The folder of a JIT on a machine, in the root of a cache."""

    def __init__(self, cache: Cache, machine: Machine, jit: Jit) -> None:
        """Name the folder; nothing is made."""
        self.jit = jit
        self._cache = cache
        self._facts = machine.facts(jit)
        self._target = str(machine.target)
        self._op = f"{KIND}::{jit.name}"
        name = machine.name_of(jit)
        self.path = cache.root / VERSION / JITS / self._target / name
        self._root = self.path
        self._state_path = self.path.with_name(f"{name}.json")
        self.lock = f"{name.rpartition('-')[2]}-{self._target.encode().hex()[-16:]}"
        self._label = label_of(self._op, name.rpartition("-")[2], self._target)

    def variables(self) -> dict[str, str]:
        """Return the environment that has the JIT use this folder."""
        places = {name: str(self.path / inner) for name, inner in self.jit.variables.items()}
        return {**places, **dict(self.jit.also)}

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those of the entries of all JITs for this target that are to be laid here."""
        mine = [name for name in names if name.startswith(f"{self._label}-")]
        known = self._state()["entries"] if mine else []
        return [name for name in mine if name not in known]

    def lay(self, names: Iterable[str]) -> int:
        """Write what entries have and the folder lacks; return how many files. Raises CacheError.

        names: those `missing`. Files are read through the checks of every lookup, and appear whole,
        by renames. What is here stays: the JIT may have changed it.
        """
        state = self._state()
        found = [self._cache.look_up(self._target, name).entry for name in names]
        entries = [entry for entry in found if entry]
        laid = 0
        with self._writing():
            atomic.make_directory(self.path, 0o700, fsync=False)
            here = {self._unit(path) for path in self._files()}
            for entry in sorted(entries, key=_made, reverse=True):
                files = _files_of(entry)
                taken = {path: n for path, n in files.items() if self._unit(path) not in here}
                for path, number in taken.items():
                    laid += self._write(path, entry, number, state)
                here |= {self._unit(path) for path in taken}
                state["entries"].append(entry.path.name)
            self._save(state)
        return laid

    def has_new(self) -> bool:
        """Return whether files are here that no entry has; note that the folder is in use."""
        state = self._known()
        with contextlib.suppress(OSError):
            os.utime(self._state_path)  # for `sweep`
        return any(self._is_new(p, status, state["files"]) for p, status in self._files().items())

    def keep(
        self, root: Path | None = None, *, settled: float = 0.0, dry_run: bool = False
    ) -> Kept:
        """Publish what is new as entries, and return what it was. Raises CacheError.

        root: where the files are; by default this folder. settled: seconds since the last change
        of a file before it counts as whole. dry_run: publish nothing.
        """
        state = self._known() if root is None else {"entries": [], "files": {}}
        self._root = root or self.path
        files = self._files()
        known: dict[str, Any] = state["files"]
        fresh = {path for path, status in files.items() if self._is_new(path, status, known)}
        units: dict[str, list[str]] = defaultdict(list)
        for path in files:
            units[self._unit(path)].append(path)
        left_out: list[str] = []
        wanted: list[list[str]] = []
        for unit, paths in units.items():
            if fresh.isdisjoint(paths):
                continue
            why = self._why_not(paths, files, settled)
            if why:
                left_out.append(f"{unit}: {why}")
            else:
                wanted.append(paths)
        done = Kept(left_out=tuple(left_out))
        for paths in _batches(wanted, files):
            if dry_run:
                size = sum(files[path].st_size for path in paths)
                done = done._replace(files=done.files + len(paths), bytes=done.bytes + size)
                continue
            with self._writing(), contextlib.suppress(FileNotFoundError):  # removed meanwhile
                done = self._publish(paths, state, done)
        if done.files and root is None:
            with self._writing():
                self._save(state)
        return done

    def _known(self) -> dict[str, Any]:
        """Return the state, without files if entries are gone: what they had is new again."""
        state = self._state()
        return state if all(map(self._is_there, state["entries"])) else {**state, "files": {}}

    def _is_there(self, name: str) -> bool:
        """Return whether the cache or one of its layers has an entry of this name."""
        roots = (self._cache.root, *self._cache.layers)
        return any((root / VERSION / self._target / name).is_dir() for root in roots)

    def _is_new(self, path: str, status: os.stat_result, known: Mapping[str, Any]) -> bool:
        """Return whether a file has other content than when it was laid or kept."""
        before = known.get(path)
        if not before:
            return True
        if before[:2] == _stamp(status):
            return False
        with contextlib.suppress(OSError):
            return bool(before[2] != digest(self._root / path))
        return False

    def _publish(self, paths: list[str], state: dict[str, Any], done: Kept) -> Kept:
        stamps = {path: _stamp((self._root / path).lstat()) for path in paths}
        numbers = {path: str(number) for number, path in enumerate(paths)}
        with self._cache.staging() as staging:
            for path, number in numbers.items():
                shutil.copyfile(self._root / path, staging / number)
            digests = {path: digest(staging / number) for path, number in numbers.items()}
            if stamps != {path: _stamp((self._root / path).lstat()) for path in paths}:
                return done  # written right now
            inputs = {
                "schema": SCHEMA, "op": self._op, "target": self._target, "source": {"kind": KIND},
                "jit": self._facts, "files": digests,
            }  # fmt: skip
            key = Key(inputs, digest_of(inputs), self._label)
            meta = {"files": {n: path for path, n in numbers.items()}, "made": time.time_ns()}
            self._cache.publish(key, staging, Manifest(inputs, meta=meta))
        state["entries"].append(key.name)
        state["files"].update({path: [*stamps[path], digests[path]] for path in paths})
        size = sum(stamp[0] for stamp in stamps.values())
        return done._replace(files=done.files + len(paths), bytes=done.bytes + size)

    def _why_not(
        self, paths: list[str], files: Mapping[str, os.stat_result], settled: float
    ) -> str:
        """Return why a unit is not kept, or ""."""
        if self.jit.ninja and not any(path.endswith(f"/{RECORD}") for path in paths):
            return "what it depends on is not on record"
        if sum(files[path].st_size for path in paths) > LARGEST_FILE:
            return "it is too large for an entry"
        if any(not files[path].st_size for path in paths) and not self.jit.unit:
            return "it is empty"
        now = time.time()
        if settled and any(now - files[path].st_mtime < settled for path in paths):
            return "it was written a moment ago"
        return ""

    def _files(self) -> dict[str, os.stat_result]:
        """Return the files of the folder that may be kept, by path, without links."""
        return dict(_walk(self._root, "", (*SKIPPED, *self.jit.skipped)))

    def _unit(self, path: str) -> str:
        """Return what is only whole together with a file: its first folders, or the file itself."""
        parts = path.split("/")
        return "/".join(parts[: self.jit.unit]) if 0 < self.jit.unit < len(parts) else path

    def _write(self, path: str, entry: Entry, number: str, state: dict[str, Any]) -> int:
        """Write a file of an entry unless one is there; return how many were written."""
        place = self.path / path
        if place.exists():
            return 0
        data = entry.read(number)
        atomic.make_directory(place.parent, 0o755, fsync=False)
        atomic.write(place, data)
        sha256 = entry.manifest.artifacts[number].sha256
        state["files"][path] = [*_stamp(place.lstat()), sha256]
        return 1

    def _state(self) -> dict[str, Any]:
        """Return which entries and files are known: `{"entries": […], "files": {…}}`."""
        with contextlib.suppress(OSError, ValueError):
            self.path.stat()  # the folder may have been deleted, and is laid anew then
            state = json.loads(self._state_path.read_bytes())
            if isinstance(state.get("entries"), list) and isinstance(state.get("files"), dict):
                return dict(state)
        return {"entries": [], "files": {}}

    def _save(self, state: dict[str, Any]) -> None:
        atomic.write(self._state_path, canonical(state))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise self._cache.write_error(e) from e


def sweep(cache: Cache, max_age: float) -> None:
    """Delete the folders that no run has used for so many seconds; 0 keeps all."""
    for place in (cache.root / VERSION / JITS).glob("*/*/") if max_age else ():
        with contextlib.suppress(OSError):
            if time.time() - place.with_name(f"{place.name}.json").stat().st_mtime > max_age:
                atomic.delete(place)
                atomic.delete(place.with_name(f"{place.name}.json"))


RECORD = "jitkern.json"  # what a build by ninja depends on; see `ninja`


def _stamp(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns]


def _walk(root: Path, inner: str, skipped: tuple[str, ...]) -> Iterator[tuple[str, os.stat_result]]:
    try:
        with os.scandir(root / inner) as items:
            found = sorted(items, key=lambda item: item.name)
    except OSError:
        return
    for item in found:
        if any(fnmatch.fnmatchcase(item.name, pattern) for pattern in skipped):
            continue
        path = f"{inner}/{item.name}" if inner else item.name
        with contextlib.suppress(OSError):
            status = item.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                yield from _walk(root, path, skipped)
            elif stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                yield path, status


def _batches(
    units: Iterable[list[str]], files: Mapping[str, os.stat_result]
) -> Iterator[list[str]]:
    """Yield the paths of one entry after the other; a unit is in one entry."""
    batch: list[str] = []
    size = 0
    for paths in units:
        more = sum(files[path].st_size for path in paths)
        if batch and (size + more > BATCH or len(batch) + len(paths) > MOST_FILES):
            yield batch
            batch, size = [], 0
        batch = [*batch, *paths]
        size += more
    if batch:
        yield batch


def _made(entry: Entry) -> int:
    """Return when an entry was made, in nanoseconds of Unix time."""
    made = entry.manifest.meta.get("made")
    return made if isinstance(made, int) else 0


def _files_of(entry: Entry) -> dict[str, str]:
    """Return the number of each file of an entry by its path; none if a path leads elsewhere."""
    files = entry.manifest.meta.get("files")
    if not isinstance(files, dict) or not all(isinstance(path, str) for path in files.values()):
        return {}
    for number, path in files.items():
        parts = path.split("/")
        odd = "" in parts or "." in parts or ".." in parts or not path.isprintable()
        if odd or number not in entry.manifest.artifacts:
            return {}
    return {path: number for number, path in files.items()}
