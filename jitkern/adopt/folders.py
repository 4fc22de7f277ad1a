"""The folder of a JIT: filled from entries of the cache, and what is new in it kept as entries.

    <root>/v1/run/<target>/<jit>-<digest>/        what the JIT reads and writes
    <root>/v1/run/<target>/<jit>-<digest>.json    which files are known: size, time and SHA-256

An entry holds files of one JIT: its artifacts are numbered, and `meta["files"]` says their paths.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import json
import operator
import os
import shutil
import stat
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jitkern import cache as cache_room
from jitkern.adopt.jits import RECORD, SKIPPED, Jit
from jitkern.adopt.machine import Machine
from jitkern.cache import VERSION, eviction
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
PER_FILE = 2048  # bytes that a file counts for beside its own
LARGEST_FILE = 512 << 20  # bytes; what is larger stays where it is


class Kept(NamedTuple):
    """What is in the folder of a JIT: the files of new entries, and paths left out with reasons."""

    files: int = 0
    bytes: int = 0
    left_out: tuple[str, ...] = ()


class Folder:
    """The folder of a JIT on a machine, in the root of a cache.

    elsewhere: a folder that the JIT has made by itself: nothing is known of its files.
    """

    def __init__(
        self, cache: Cache, machine: Machine, jit: Jit, elsewhere: Path | None = None
    ) -> None:
        """Name the folder; nothing is made."""
        self.jit = jit
        self._elsewhere = elsewhere
        self._cache = cache
        self._facts = machine.facts(jit)
        self._target = str(machine.target)
        self._op = f"{KIND}::{jit.name}"
        name = machine.name_of(jit)
        place = cache.root / VERSION / JITS / self._target
        self.path = elsewhere or place / name
        self._state_path = place / f"{name}.json"
        self._lock = f"{name.rpartition('-')[2]}-{self._target.encode().hex()[-16:]}"
        self._label = label_of(self._op, name.rpartition("-")[2], self._target)

    def variables(self) -> dict[str, str]:
        """Return the environment that has the JIT use this folder."""
        return {**dict.fromkeys(self.jit.variables, str(self.path)), **dict(self.jit.also)}

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those of the entries of all JITs for this target that are to be laid here."""
        mine = [name for name in names if name.startswith(f"{self._label}-")]
        known = self._state()["entries"] if mine else []
        return [name for name in mine if name not in known]

    def lay(self, names: Iterable[str]) -> int:
        """Write what entries have and the folder lacks; return how many files. Raises CacheError.

        names: of the entries of all JITs. Files are read through the checks of every lookup, and
        appear whole, by renames. What is here stays: the JIT may have changed it.
        """
        if not self.missing(names):
            return 0
        laid = 0
        with self._writing():
            state = self._state()
            found = [self._cache.look_up(self._target, name).entry for name in self.missing(names)]
            atomic.make_directory(self.path, 0o700, fsync=False)
            here = {self._unit(path) for path in self._files()}
            for entry in sorted(filter(None, found), key=_made, reverse=True):
                files = _files_of(entry)
                taken = {path: n for path, n in files.items() if self._unit(path) not in here}
                for path, number in taken.items():
                    laid += self._write(path, entry, number, state)
                here |= {self._unit(path) for path in taken}
                state["entries"].append(entry.path.name)
            self._save(state)
        return laid

    def keep(self, settled: float = 0.0) -> Kept:
        """Publish what is new as entries, and return what it was. Raises CacheError.

        settled: seconds since the last change of a file before it counts as whole.
        """
        with contextlib.suppress(OSError):
            os.utime(self._state_path)  # for `sweep`
        odd: list[str] = []
        files = self._files(odd)
        if not self._fresh(files, self._known()):
            return Kept(left_out=(*odd,))
        with self._writing():
            state = self._known()  # another process may have kept some
            fresh = self._fresh(files, state)
            units: dict[str, list[str]] = defaultdict(list)
            for path in files:
                units[self._unit(path)].append(path)
            new = {unit: paths for unit, paths in units.items() if not fresh.isdisjoint(paths)}
            reasons = {unit: self._why_not(paths, files, settled) for unit, paths in new.items()}
            odd += (f"{unit}: {why}" for unit, why in reasons.items() if why)
            done = Kept(left_out=(*odd,))
            wanted = [paths for unit, paths in new.items() if not reasons[unit]]
            for paths in _batches(wanted, files):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    done = self._publish(paths, state, done)
            if done.files:
                self._save(state)
        return done

    def _fresh(self, files: Mapping[str, os.stat_result], state: dict[str, Any]) -> set[str]:
        """Return the files that have other content than when they were laid or kept."""
        fresh = set()
        for path, status in files.items():
            *stamp, sha256 = state["files"].get(path, ("",))
            with contextlib.suppress(OSError):  # removed meanwhile
                if stamp != _stamp(status) and (not sha256 or sha256 != digest(self.path / path)):
                    fresh.add(path)
        return fresh

    def _known(self) -> dict[str, Any]:
        """Return the state, without files if entries are gone: what they had is new again."""
        state = self._state()
        there = _there(self._cache, self._target, state["entries"])
        return state if there == state["entries"] else {"entries": there, "files": {}}

    def _publish(self, paths: list[str], state: dict[str, Any], done: Kept) -> Kept:
        stamps = {path: _stamp((self.path / path).lstat()) for path in paths}
        numbers = {path: str(number) for number, path in enumerate(paths)}
        with self._cache.staging() as staging:
            for path, number in numbers.items():
                shutil.copyfile(self.path / path, staging / number)
            digests = {path: digest(staging / number) for path, number in numbers.items()}
            if stamps != {path: _stamp((self.path / path).lstat()) for path in paths}:
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
        if self._elsewhere and any(path.count("/") < self.jit.unit for path in paths):
            return f"it is in no folder that {self.jit.name} makes"
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

    def _files(self, odd: list[str] | None = None) -> dict[str, os.stat_result]:
        """Return the files of the folder that may be kept, by path; note `odd` others."""
        return dict(_walk(self.path, (*SKIPPED, *self.jit.skipped), odd))

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
            state = {} if self._elsewhere else json.loads(self._state_path.read_bytes())
            if isinstance(state.get("entries"), list) and isinstance(state.get("files"), dict):
                return dict(state)
        return {"entries": [], "files": {}}

    def _save(self, state: dict[str, Any]) -> None:
        if not self._elsewhere:
            atomic.write(self._state_path, canonical(state))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the lock of this folder: the ranks of a host lay and keep one after the other."""
        try:
            with cache_room.lock.held(self._lock, f"the cache of {self.jit.name}", doing="filling"):
                yield
        except OSError as e:
            raise self._cache.write_error(e) from e


def sweep(cache: Cache, *, max_size: int, max_age: float) -> None:
    """Delete the folders that were used least lately, so that all keep to limits; 0 keeps all."""
    uses = []
    for path in (cache.root / VERSION / JITS).glob("*/*.json"):
        with contextlib.suppress(OSError):
            sizes = [status.st_size for _, status in _walk(path.with_suffix(""))]
            used = path.stat().st_mtime
            uses.append(eviction.Use(path, sum(sizes), used, used))

    def idle(path: Path) -> bool:
        return not eviction.used_lately(path)

    for use in eviction.victims(uses, idle, max_size=max_size or None, max_age=max_age):
        _delete(use.path)


def _there(cache: Cache, target: str, names: Iterable[str]) -> list[str]:
    """Return those of the entries for a target that the root or a layer has."""
    folders = [root / VERSION / target for root in (cache.root, *cache.layers)]
    return [name for name in names if any((folder / name).is_dir() for folder in folders)]


def _stamp(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns]


def forget(cache: Cache) -> None:
    """Delete the folders of which no entry is left."""
    for path in (cache.root / VERSION / JITS).glob("*/*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            names = json.loads(path.read_bytes())["entries"]
            if names and not _there(cache, path.parent.name, names):
                _delete(path)


def _delete(state: Path) -> None:
    atomic.delete(state.with_suffix(""))
    atomic.delete(state)


def _walk(
    root: Path, skipped: tuple[str, ...] = (), odd: list[str] | None = None
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path below a folder, and the status, of each file of this user, without links.

    odd: gets the others, with the reason.
    """

    def wanted(names: Iterable[str]) -> list[str]:
        return [n for n in sorted(names) if not any(fnmatch.fnmatchcase(n, p) for p in skipped)]

    for folder, folders, names in os.walk(root):
        folders[:] = wanted(folders)
        for path in (f"{folder}/{name}" for name in wanted(names)):
            with contextlib.suppress(OSError):
                status, inner = os.lstat(path), os.path.relpath(path, root)
                why = (
                    "it is no regular file" if not stat.S_ISREG(status.st_mode)
                    else "another user owns it" if status.st_uid != os.geteuid()
                    else "its name is not printable" if not inner.isprintable()
                    else ""
                )  # fmt: skip
                if not why:
                    yield inner, status
                elif odd is not None:
                    odd.append(f"{inner!r}: {why}")


def _batches(
    units: Iterable[list[str]], files: Mapping[str, os.stat_result]
) -> Iterator[list[str]]:
    """Yield the paths of one entry after the other; a unit is in one entry."""
    size = 0
    sized = []
    for paths in units:
        size += sum(files[path].st_size + PER_FILE for path in paths)
        sized.append((size // BATCH, paths))
    for _, group in itertools.groupby(sized, key=operator.itemgetter(0)):
        yield [path for _, paths in group for path in paths]


def _made(entry: Entry) -> int:
    """Return when an entry was made, in nanoseconds of Unix time."""
    made = entry.manifest.meta.get("made")
    return made if isinstance(made, int) else 0


def _files_of(entry: Entry) -> dict[str, str]:
    """Return the number of each file of an entry by its path; none if a path leads elsewhere."""
    files = entry.manifest.meta.get("files")
    if not isinstance(files, dict) or not all(isinstance(path, str) for path in files.values()):
        return {}
    odd = [p for p in files.values() if not p.isprintable() or p != os.path.normpath(f"/./{p}")[1:]]
    known = "" not in files.values() and files.keys() <= entry.manifest.artifacts.keys()
    return {path: number for number, path in files.items()} if known and not odd else {}
