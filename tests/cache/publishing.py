"""A disk whose calls fail or kill, caches to publish into, and what must be true of them afterwards."""

import builtins
import contextlib
import errno
import io
import itertools
import os
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jitkern.cache.eviction import after_publish
from jitkern.cache.key import Key, digest_of
from jitkern.cache.manifest import NAME, Artifact, Manifest
from jitkern.cache.root import QUARANTINED
from jitkern.cache.store import Cache
from jitkern.cache_tools import evictable, remove
from jitkern.errors import CacheError

CHANGES = frozenset((
    "mkdir", "rename", "replace", "chmod", "unlink", "remove", "rmdir", "utime", "fsync", "write",
    "sendfile", "symlink", "link",
))  # fmt: skip
LOOKS = frozenset(("open", "stat", "lstat", "fstat", "scandir", "listdir"))
CREATES = os.O_CREAT | os.O_TRUNC


class Disk:
    """While it is entered, `strike(call, changes)` runs before every call that touches the disk.

    And again after one that changes something, and between the two halves of what is written.
    What it raises comes out of the call, as if the disk had answered so.
    """

    def __init__(self, strike: Callable[[str, bool], None]) -> None:
        self.strike = strike
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        wrapped = {name: self._wrapped(name) for name in CHANGES | LOOKS}
        for name in ("supports_fd", "supports_dir_fd", "supports_follow_symlinks"):
            known = getattr(os, name)
            same = {new for old, new in wrapped.items() if getattr(os, old) in known}
            self._patch.setattr(os, name, known | same)
        for name, new in wrapped.items():
            self._patch.setattr(os, name, new)
        self._patch.setattr(os, "close", self._close(os.close))
        for module in (io, builtins):
            self._patch.setattr(module, "open", self._open(builtins.open))

    def __exit__(self, *raised: object) -> None:
        self._patch.undo()

    def _wrapped(self, name: str) -> Callable[..., object]:
        real = getattr(os, name)

        def call(*args, **kwargs):
            flags = kwargs.get("flags", args[1] if len(args) > 1 else 0)
            changes = name in CHANGES or (name == "open" and bool(flags & CREATES))
            self.strike(name, changes)
            result = real(*args, **kwargs)
            if changes:
                try:
                    self.strike(f"after {name}", changes)
                except BaseException:
                    if name == "open":
                        os.close(result)
                    raise
            return result

        call.__name__ = name
        return call

    def _close(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def close(descriptor: int) -> None:
            real(descriptor)
            self.strike("close", False)

        return close

    def _open(self, real: Callable[..., io.IOBase]) -> Callable[..., object]:
        def open_(file, mode="r", *args, **kwargs):
            changes = mode[0] != "r"
            if not isinstance(file, int):
                self.strike("open", changes)
            return File(real(file, mode, *args, **kwargs), self.strike, changes)

        return open_


class File:
    """A file whose every read, and half of every write, is a call that touches the disk."""

    def __init__(self, file: io.IOBase, strike: Callable[[str, bool], None], changes: bool) -> None:
        self.file, self.strike, self.changes = file, strike, changes

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def close(self):
        self.file.close()
        self.strike("close", self.changes)

    def read(self, *args):
        self.strike("read", False)
        return self.file.read(*args)

    def write(self, data):
        self.strike("write", True)
        for half in (data[: len(data) // 2], data[len(data) // 2 :]):
            self.file.write(half)
            self.file.flush()
            self.strike("after write", True)
        return len(data)


class Fault:
    """An OSError with this number at the n-th call, and for ever after if it is `lasting`."""

    def __init__(self, code: int, n: int, *, lasting: bool = False, reads: bool = True) -> None:
        self.code, self.n, self.lasting, self.reads = code, n, lasting, reads
        self.seen, self.at = 0, ""

    def __str__(self) -> str:
        return f"{errno.errorcode[self.code]} at {self.at}{' and later' if self.lasting else ''}"

    @property
    def struck(self) -> bool:
        return self.seen >= self.n

    def __call__(self, call: str, changes: bool) -> None:
        if changes or self.reads:
            self.seen += 1
            if self.seen == self.n or (self.lasting and self.struck):
                self.at = self.at or call
                raise OSError(self.code, os.strerror(self.code), f"({call})")


def kill_at(n: int) -> Callable[[str, bool], None]:
    """A kill at the n-th call that changes something: between two of them the disk is the same."""
    count = itertools.count(1)

    def strike(call: str, changes: bool) -> None:
        if changes and next(count) == n:
            os.kill(os.getpid(), signal.SIGKILL)

    return strike


def start(work: Callable[[], object]) -> int:
    """The number of a child process that does `work` and exits with 0, or 1 if that raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Torch's threads: none is needed
        pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def wait(pid: int) -> int:
    """The exit code of a child, or the negative number of the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_a_child(work: Callable[[], object]) -> int:
    return wait(start(work))


def key_of(name: str) -> Key:
    inputs = {"op": f"test::{name}", "target": "cpu-x-torch2"}
    return Key(inputs, digest_of(inputs), name)


def publish(cache, key, content):
    with cache.staging() as staging:
        try:
            (staging / "out.so").write_bytes(content)
            (staging / "compile.log").write_text("log")
        except OSError as e:  # as jit does for compilers
            raise cache.write_error(e) from e
        return cache.publish(key, staging, Manifest(key.inputs))


def content_of(cache, key):
    entry = cache.find(key)
    return entry and entry.read("out.so")


KEY, OLDER, RECENT = key_of("op"), key_of("older"), key_of("recent")
RECENT_CONTENT = b"recent" * 9


def nothing(cache):
    pass


def an_entry(cache):
    publish(cache, KEY, b"old")


def a_damaged_entry(cache):
    entry = publish(cache, KEY, b"old")
    (entry.path / "out.so").write_bytes(b"odd")
    for i in range(QUARANTINED):
        (cache.root / "v1" / "bad" / f"{i}.x").mkdir(parents=True)


def a_file_for_a_target(cache):
    with cache.staging():
        pass
    (cache.root / "v1" / KEY.target).write_text("")


def entries_of_long_ago(cache):
    """And one that was used just now."""
    for key, content in ((OLDER, b"older"), (KEY, b"old")):
        entry = publish(cache, key, content)
        for path in (entry.path / NAME, entry.path):
            os.utime(path, (1e9, 1e9))
    publish(cache, RECENT, RECENT_CONTENT)


def look_up_and_publish(cache):
    cache.find(KEY)
    return publish(cache, KEY, b"new")


def refresh(cache):
    old = cache.find(KEY)
    if old:
        cache.remove(old.path)
    return publish(cache, KEY, b"new")


def adopt(cache):
    files = {"out.so": b"new", NAME: ADOPTED.encode()}
    return cache.adopt(KEY.target, KEY.name, files)


def evict(cache):
    after_publish(cache, 1 << 20, max_size=1, max_age=0)


def prune_the_old(cache):
    remove(cache, [use.path for use in evictable(cache, max_age=86400)])


ADOPTED = Manifest(KEY.inputs, {"out.so": Artifact.of(b"new")})


@dataclass
class Scenario:
    """What is there before, what is done, and what may be found when that did not end."""

    before: Callable[[Cache], object]
    work: Callable[[Cache], object]
    found: frozenset[bytes | None]
    damaged: bool = field(default=False)


SCENARIOS = {
    "first publish": Scenario(nothing, look_up_and_publish, frozenset((None, b"new"))),
    "publish over a damaged entry": Scenario(
        a_damaged_entry, look_up_and_publish, frozenset((None, b"new")), damaged=True
    ),
    "publish over a file": Scenario(
        a_file_for_a_target, look_up_and_publish, frozenset((None, b"new")), damaged=True
    ),
    "refresh": Scenario(an_entry, refresh, frozenset((None, b"old", b"new"))),
    "adopt": Scenario(nothing, adopt, frozenset((None, b"new"))),
    "evict": Scenario(entries_of_long_ago, evict, frozenset((None, b"old"))),
    "prune": Scenario(entries_of_long_ago, prune_the_old, frozenset((None, b"old"))),
}


@contextlib.contextmanager
def in_memory() -> Iterator[Path]:
    """A folder for hundreds of caches, in memory where that is to be had."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="jitkern-tests-", dir=memory))
    try:
        yield path
    finally:
        shutil.rmtree(path)


class Roots:
    """A fresh copy, each time, of a cache in which a scenario can begin."""

    def __init__(self, folder: Path, scenario: Scenario) -> None:
        self.folder, self.numbers = folder, itertools.count()
        scenario.before(Cache(folder / "template", fsync=False))

    def fresh(self) -> Path:
        root = self.folder / str(next(self.numbers))
        if (self.folder / "template").exists():
            shutil.copytree(self.folder / "template", root)
        return root


def check_that_all_is_well(root: Path, scenario: Scenario) -> None:
    """Whole or absent; quarantined for nothing; mended by the next publish; swept in the end."""
    cache = Cache(root, fsync=False)
    bad = names(root / "v1" / "bad")
    found = cache.look_up(KEY.target, KEY.name, KEY.digest)
    content = found.entry and found.entry.read("out.so")
    assert content in scenario.found
    if not scenario.damaged:
        assert found.entry or found.reason == "absent"
        assert names(root / "v1" / "bad") == bad
    check_the_recent_one(cache, scenario)
    assert publish(cache, KEY, b"next").read("out.so") == (content or b"next")
    assert content_of(cache, KEY) == (content or b"next")
    for left in (root / "v1" / "tmp").iterdir():
        os.utime(left, (0, 0))
    with cache.staging() as staging:
        assert names(root / "v1" / "tmp") == [staging.name]
    cache.purge(0.0)
    assert names(root / "v1" / "trash") == []


def check_the_recent_one(cache, scenario):
    if scenario.before is entries_of_long_ago:
        assert content_of(cache, RECENT) == RECENT_CONTENT


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory)) if directory.exists() else []


WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # what a disk answers to changes only
ANY = (errno.EIO, errno.EACCES, errno.ESTALE, errno.EBUSY, errno.ENOTEMPTY)


def failed_everywhere(roots, work, codes, *, lasting, errors=CacheError):
    """Yields (root, what the work returned or the error it raised) for each call and error."""
    for code in codes:
        for n in itertools.count(1):
            root = roots.fresh()
            fault = Fault(code, n, lasting=lasting, reads=code not in WRITING)
            result: object
            with Disk(fault):
                try:
                    result = work(root)
                except errors as e:
                    result = e
                except Exception as e:
                    raise AssertionError(f"{type(e).__name__} at call {n}, {fault}") from e
            if not fault.struck:
                break
            yield root, result
