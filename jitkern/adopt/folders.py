"""The folder of a JIT: filled from entries of the cache, and what is new in it kept as entries.

    <root>/v1/run/<target>/<jit>-<digest>/        what the JIT reads and writes
    <root>/v1/run/<target>/<jit>-<digest>.used    its time is that of the last use

An entry holds files of one JIT: its artifacts are numbered. `meta["files"]` says their paths, and
`meta["times"]` when they were changed. A file is new if the newest entry with this path has another
time and content, or if there is none.
"""

from __future__ import annotations

import contextlib
import fnmatch
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
from jitkern.adopt.start import USED
from jitkern.cache import VERSION, eviction
from jitkern.cache.entry import Entry
from jitkern.cache.key import SCHEMA, Key, digest_of, label_of
from jitkern.cache.layout import JITS
from jitkern.cache.manifest import NAME, Manifest
from jitkern.cache.store import Cache
from jitkern.files import atomic
from jitkern.files.trust import digest
from jitkern.named_tuple import NamedTuple

KIND = "run"  # of the entries, and the namespace of their ops
BATCH = 1 << 20  # bytes of an entry, about: what a bundle of a remote takes
PER_FILE = 2048  # bytes that a file counts for beside its own
DIFFERS = "it differs from its entry, and this run has not written it"
DELETED = f"{DIFFERS}: it is deleted, and laid again at the next start"
Files = Mapping[str, os.stat_result]  # by path
LARGEST_FILE = 512 << 20  # bytes; what is larger stays where it is


class Kept(NamedTuple):
    """How much of a JIT's folder new entries hold, and what was left out, with the reasons.

    differ: what was left out since it may be damaged.
    """

    files: int = 0
    bytes: int = 0
    left_out: tuple[str, ...] = ()
    differ: tuple[str, ...] = ()


class StoredFile(NamedTuple):
    """A file in an entry: its artifact, when it was changed in nanoseconds, and its content."""

    number: str
    changed: int
    size: int
    sha256: str

    @property
    def marks(self) -> set[object]:
        """Size with time, and content: a file with one of these is this one."""
        return {(self.size, self.changed), self.sha256}


class Folder:
    """The folder of a JIT on a machine, in the root of a cache.

    elsewhere: a folder that the JIT has made by itself.
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
        self._mark = place / f"{name}{USED}"
        self._lock = f"{name.rpartition('-')[2]}-{self._target.encode().hex()[-16:]}"
        self._label = _label(self._target, name)

    def missing(self) -> dict[str, set[str]]:
        """Return the paths that the folder lacks, by the newest entry that has each.

        A unit in which the JIT has changed something stays as it is.
        """
        found = {}
        here = self._files()
        done: set[str] = set()
        for name, files in self._stored():
            known = {path: file.marks for path, file in files.items()}
            gone = {path for path in known.keys() - here.keys() if self._unit(path) not in done}
            gone = {path for path in gone if not (self.path / path).exists()}
            units = {self._unit(path) for path in gone}
            beside = {path: status for path, status in here.items() if self._unit(path) in units}
            units -= {self._unit(path) for path in self._unknown(beside, known)}
            done |= units
            if lacking := {path for path in gone if self._unit(path) in units}:
                found[name] = lacking
        return found

    def lay(self) -> int:
        """Write what entries have and the folder lacks; return how many files. Raises CacheError.

        Files are read through the checks of every lookup, and appear whole, by renames.
        """
        if not self.missing():
            return 0
        laid = 0
        with self._writing():
            atomic.make_directory(self.path, 0o700, fsync=False)
            for name, lacking in self.missing().items():
                entry = self._cache.look_up(self._target, name).entry
                laid += self._write(entry, lacking) if entry else 0
        return laid

    def keep(self, settled: float = 0.0, began: int = 0, lost: int = 0) -> Kept:
        """Publish what is new as entries, and return what it was. Raises CacheError.

        settled: seconds since the last change of a file before it counts as whole. began: when the
        run began, in nanoseconds, by the clock of this disk: what differs from its entry, and was
        not written since, is damaged or of another run, and left out. lost: it is deleted if it was
        written before this time.
        """
        if self.path.is_dir():
            with contextlib.suppress(OSError):
                self._mark.touch()
        odd: list[str] = []
        files = self._files(odd)
        if not self._fresh(files, began):
            return Kept(left_out=(*odd,))
        with self._writing():
            fresh = self._fresh(files, began)  # another process may have kept some
            units: dict[str, list[str]] = defaultdict(list)
            for path in files:
                units[self._unit(path)].append(path)
            new = {u: paths for u, paths in units.items() if not fresh.keys().isdisjoint(paths)}
            doubtful = [path for path, differs in fresh.items() if differs]
            over = {self._unit(path) for path in doubtful if files[path].st_ctime_ns < lost}
            differ = {self._unit(path): DIFFERS for path in doubtful} | dict.fromkeys(over, DELETED)
            reasons = {u: self._why_not(paths, files, fresh, settled) for u, paths in new.items()}
            reasons |= differ
            for unit in over:
                atomic.delete(self.path / unit)
            odd += (f"{unit}: {why}" for unit, why in reasons.items() if why)
            told = (f"{unit}: {why}" for unit, why in differ.items())
            done = Kept(left_out=(*odd,), differ=(*told,))
            wanted = [paths for unit, paths in new.items() if not reasons[unit]]
            for paths in _batches(wanted, files):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    done = self._publish(paths, done)
        return done

    def _stored(self) -> list[tuple[str, dict[str, StoredFile]]]:
        """Return the names and files of the entries for this folder, the newest first."""
        found: dict[str, dict[str, StoredFile]] = {}
        for _, path in _entries(self._cache, self._target, self._label):
            with contextlib.suppress(OSError, ValueError):
                found.setdefault(path.name, _files_of(Manifest.decode((path / NAME).read_bytes())))
        newest = {n: max((f.changed for f in found[n].values()), default=0) for n in found}
        return sorted(found.items(), key=lambda item: newest[item[0]], reverse=True)

    def _fresh(self, files: Files, began: int) -> dict[str, bool]:
        """Return the files that are not in the newest entry of their unit, and whether they differ.

        Those differ that no entry has, and that were written before the run began. Those of older
        entries are new only if they were written since.
        """
        newest: dict[str, set[object]] = {}
        every: dict[str, set[object]] = defaultdict(set)
        units: set[str] = set()
        for _, stored in self._stored():
            for path, file in stored.items():
                every[path] |= file.marks
                if self._unit(path) not in units:
                    newest[path] = file.marks
            units |= {self._unit(path) for path in stored}
        fresh = self._unknown(files, newest)
        old = {p: files[p] for p in fresh if p in every and files[p].st_ctime_ns < began}
        differ = {*self._unknown(old, every)}
        return {path: path in differ for path in fresh if path in differ or path not in old}

    def _unknown(self, files: Files, known: Mapping[str, set[object]]) -> list[str]:
        """Return the files that are not as known ones; those with a known time are not read."""
        found = []
        for path, status in files.items():
            marks = known.get(path, set())
            with contextlib.suppress(OSError):  # removed meanwhile
                same = marks and (_stamp(status) in marks or digest(self.path / path) in marks)
                if not same:
                    found.append(path)
        return found

    def _publish(self, paths: list[str], done: Kept) -> Kept:
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
            times = {number: stamps[path][1] for path, number in numbers.items()}
            meta = {"files": {n: path for path, n in numbers.items()}, "times": times}
            older = self._cache.root / VERSION / self._target / key.name
            self._cache.remove(older)
            self._cache.publish(key, staging, Manifest(inputs, meta=meta))
        size = sum(stamp[0] for stamp in stamps.values())
        return done._replace(files=done.files + len(paths), bytes=done.bytes + size)

    def _why_not(self, paths: list[str], files: Files, fresh: Iterable[str], settled: float) -> str:
        """Return why a unit is not kept, or ""."""
        shallow = any(path.count("/") < self.jit.unit for path in paths)
        if self._elsewhere and (self.jit.renamed or shallow):
            return f"it is in no folder that {self.jit.name} makes under `jitkern run`"
        recorded = any(path.endswith(f"/{RECORD}") for path in paths if path in fresh)
        if self.jit.ninja and not recorded:  # or the record is of an earlier build
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

    def _write(self, entry: Entry, lacking: set[str]) -> int:
        """Write those of these files that an entry has, and return how many that are."""
        files = _files_of(entry.manifest)
        for path in lacking & files.keys():
            place = self.path / path
            atomic.make_directory(place.parent, 0o755, fsync=False)
            atomic.write(place, entry.read(files[path].number))
            os.utime(place, ns=(files[path].changed, files[path].changed))
        return len(lacking & files.keys())

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
    for path in (cache.root / VERSION / JITS).glob(f"*/*{USED}"):
        with contextlib.suppress(OSError):
            sizes = [status.st_size for _, status in _walk(path.with_suffix(""))]
            used = path.stat().st_mtime
            uses.append(eviction.Use(path, sum(sizes), used, used))

    def idle(path: Path) -> bool:
        return not eviction.used_lately(path)

    for use in eviction.victims(uses, idle, max_size=max_size or None, max_age=max_age):
        _delete(use.path)


def forget(cache: Cache) -> None:
    """Delete the folders of which no entry is left."""
    for path in (cache.root / VERSION / JITS).glob(f"*/*{USED}"):
        target = path.parent.name
        if not any(_entries(cache, target, _label(target, path.stem))):
            _delete(path)


def _delete(mark: Path) -> None:
    """Delete a folder, and its mark."""
    atomic.delete(mark.with_suffix(""))
    atomic.delete(mark)


def _label(target: str, name: str) -> str:
    """Return the label of the entries for the folder of this name."""
    jit, _, digest = name.rpartition("-")
    return label_of(f"{KIND}::{jit}", digest, target)


def _entries(cache: Cache, target: str, label: str) -> Iterator[tuple[object, Path]]:
    """Yield layer and path of the entries with a label, in the root and in the layers."""
    return cache.places(lambda place, name: place == target and name.startswith(f"{label}-"))


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


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
        names += [name for name in folders if Path(folder, name).is_symlink()]
        for path in (f"{folder}/{name}" for name in wanted(names)):
            with contextlib.suppress(OSError):
                status, inner = os.lstat(path), os.path.relpath(path, root)
                modes = status.st_mode | os.lstat(folder).st_mode
                why = (
                    "it is no regular file" if not stat.S_ISREG(status.st_mode)
                    else "another user owns it" if status.st_uid != os.geteuid()
                    else "everybody may write it" if modes & stat.S_IWOTH
                    else "its name is not printable" if not inner.isprintable()
                    else ""
                )  # fmt: skip
                if not why:
                    yield inner, status
                elif odd is not None:
                    odd.append(f"{inner!r}: {why}")


def _batches(units: Iterable[list[str]], files: Files) -> Iterator[list[str]]:
    """Yield the paths of one entry after the other; a unit is in one entry."""
    size = 0
    batch: list[str] = []
    for paths in units:
        batch += paths
        size += sum(files[path].st_size + PER_FILE for path in paths)
        if size >= BATCH:
            yield batch
            size, batch = 0, []
    if batch:
        yield batch


def _files_of(manifest: Manifest) -> dict[str, StoredFile]:
    """Return the files of an entry by path; none if one is odd: anybody may have written it."""
    paths: Any = manifest.meta.get("files")
    times: Any = manifest.meta.get("times")
    files = {}
    try:
        for number, path in paths.items():
            leads_elsewhere = path != os.path.normpath(f"/./{path}")[1:]
            if leads_elsewhere or not path.isprintable() or type(times[number]) is not int:
                return {}
            files[path] = StoredFile(number, times[number], *manifest.artifacts[number])
    except (AttributeError, KeyError, TypeError):
        return {}
    return files if "" not in files else {}
