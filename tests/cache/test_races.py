"""Many processes on one cache: one compile, no partial read, no lock that outlives its holder."""

import errno
import fcntl
import hashlib
import os
import random
import signal
import tempfile
import time

import pytest
from helpers import until
from publishing import in_a_child, key_of, names, start, wait

from jitkern import config, jit
from jitkern.cache import eviction, lock
from jitkern.cache.eviction import after_publish
from jitkern.cache.manifest import Manifest
from jitkern.cache.store import Cache
from jitkern.cache_tools import evictable, remove

pytestmark = pytest.mark.usefixtures("own_locks")
SECONDS = 60  # of the long soak


@pytest.fixture
def ensure(variant, target):
    """What a call of the kernel gets."""
    return lambda: jit.ensure(variant, target).read("out.so")


@pytest.mark.long
def test_64_processes_compile_one_key_once(tmp_path, cache_dir, compiler, ensure):
    here, compiles, answers = tmp_path / "here", tmp_path / "compiles", tmp_path / "answers"

    def note(path, text):
        with open(path, "a") as file:  # a short line is appended at once
            file.write(f"{text}\n")

    def compile_slowly():
        note(compiles, os.getpid())
        time.sleep(0.1)

    compiler.during = compile_slowly

    def call():
        note(here, os.getpid())
        until((tmp_path / "go").exists)
        note(answers, ensure().decode())

    children = [start(call) for _ in range(64)]
    until(lambda: here.exists() and len(here.read_text().splitlines()) == 64)
    (tmp_path / "go").touch()
    assert [wait(child) for child in children] == [0] * 64
    assert len(compiles.read_text().splitlines()) == 1
    assert answers.read_text().splitlines() == ["code of f32"] * 64
    assert names(cache_dir / "v1" / "tmp") == names(cache_dir / "v1" / "bad") == []


KEYS = [key_of(f"op{i}") for i in range(12)]


def files_of(key):
    """What an entry of this key holds, and no other."""
    block = hashlib.sha256(key.digest.encode()).digest()
    return {"out.so": block * 3000, "other.json": block[::-1] * 40}


def write(root, stop):
    cache = Cache(root, fsync=False)
    while not stop.exists():
        key = random.choice(KEYS)
        with cache.staging() as staging:
            for name, content in files_of(key).items():
                (staging / name).write_bytes(content)
            entry = cache.publish(key, staging, Manifest(key.inputs))
        if random.random() < 0.1:
            after_publish(cache, entry.size, max_size=4 * entry.size, max_age=0)


def read(root, stop):
    cache = Cache(root)
    hits, enough = 0, stop.with_name(f"read-{os.getpid()}")
    while not stop.exists():
        key = random.choice(KEYS)
        found = cache.look_up(key.target, key.name, key.digest)
        assert found.entry or found.reason == "absent", found
        if found.entry:
            assert found.entry.manifest.inputs == key.inputs
            try:
                assert {name: found.entry.read(name) for name in files_of(key)} == files_of(key)
                hits += 1
                if hits == 10:
                    enough.touch()
            except FileNotFoundError:  # evicted since
                continue


def evict(root, stop):
    cache = Cache(root)
    while not stop.exists():
        size = sum(len(content) for content in files_of(KEYS[0]).values())
        remove(cache, [use.path for use in evictable(cache, max_size=random.randrange(8) * size)])


def soak(root, stop, seconds, writers, readers):
    work = [*[write] * writers, *[read] * readers, evict]
    children = [start(lambda role=role: role(root, stop)) for role in work]
    try:
        time.sleep(seconds)
        until(lambda: len([*stop.parent.glob("read-*")]) == readers)
    finally:
        stop.touch()
    assert [wait(child) for child in children] == [0] * len(work)
    assert names(root / "v1" / "bad") == names(root / "v1" / "tmp") == []
    for _, entry in Cache(root).entries("always"):
        assert not isinstance(entry, ValueError)


@pytest.fixture
def anything_may_go(monkeypatch, folder):
    monkeypatch.setattr(eviction, "HOUR", 0.0)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))  # of losers that keep their own copy


@pytest.mark.long
def test_readers_writers_and_an_evictor_see_whole_entries_only(folder, anything_may_go):
    soak(folder / "cache", folder / "stop", 3, 4, 4)


@pytest.mark.long
def test_a_long_soak_of_readers_writers_and_an_evictor(folder, anything_may_go):
    soak(folder / "cache", folder / "stop", SECONDS, 16, 16)


class Child:
    """A process that compiles, and holds the lock, until it is told to go on."""

    def __init__(self, folder, call):
        self.folder, self.code = folder, None
        self.pid = start(call)
        until(lambda: (folder / "begun").exists() or self.ended())

    def ended(self):
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def signal(self, number):
        if not self.ended():
            os.kill(self.pid, number)

    def go_on(self):
        """Its exit code."""
        (self.folder / "go").touch()
        until(self.ended)
        return self.code


@pytest.fixture
def holder(tmp_path, compiler, ensure):
    def begin():
        (tmp_path / "begun").touch()
        until((tmp_path / "go").exists)

    def call():
        compiler.during = begin
        assert ensure() == b"code of f32"

    child = Child(tmp_path, call)
    yield child
    child.signal(signal.SIGKILL)
    until(child.ended)


def test_a_stopped_holder_is_waited_for_and_loses_harmlessly(holder, ensure, compiler, cache_dir):
    holder.signal(signal.SIGSTOP)
    with config.using(lock_timeout=1):
        assert ensure() == b"code of f32"
    assert len(compiler.compiles) == 1
    (entry,) = Cache(cache_dir).paths()
    first = entry.stat().st_ino
    holder.signal(signal.SIGCONT)
    assert holder.go_on() == 0
    assert ensure() == b"code of f32"
    assert entry.stat().st_ino == first
    assert names(cache_dir / "v1" / "tmp") == names(cache_dir / "v1" / "bad") == []


def test_a_killed_holder_frees_the_lock(holder, ensure, compiler, caplog):
    holder.signal(signal.SIGKILL)
    until(holder.ended)
    assert ensure() == b"code of f32"  # waits for half an hour where the lock is not free
    assert len(compiler.compiles) == 1
    assert "waiting" not in caplog.text


def test_who_waits_for_a_holder_gets_its_entry(holder, ensure, compiler):
    waiter = start(ensure)
    assert holder.go_on() == 0
    assert wait(waiter) == 0
    assert ensure() == b"code of f32"
    assert not compiler.compiles


def test_the_locks_of_two_caches_are_two(holder, ensure, compiler, tmp_path):
    with config.using(cache_dir=tmp_path / "other"):
        assert ensure() == b"code of f32"
    assert len(compiler.compiles) == 1


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF])
def test_where_locks_are_not_to_be_had_the_work_is_done_without(
    code, ensure, compiler, monkeypatch, tmp_path
):
    def fail(*args):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", fail)
        assert ensure() == b"code of f32"
    assert len(compiler.compiles) == 1
    for left in (tmp_path / "jitkern").iterdir():  # a soft lock would name its holder
        assert left.read_text() == ""
        os.close(lock.locked(left, os.O_RDWR, wait=False))


@pytest.mark.parametrize("what", ["a file", "a read-only folder", "a folder for the lock"])
def test_a_lock_folder_of_no_use_stops_nobody(what, ensure, compiler, monkeypatch, tmp_path):
    runtime = tmp_path / "runtime"
    monkeypatch.setattr(tempfile, "tempdir", str(runtime))
    if what == "a file":
        runtime.write_text("")
    else:
        runtime.mkdir()
        monkeypatch.setattr(lock.os, "access", lambda path, mode: "read-only" not in what)
    if what == "a folder for the lock":
        monkeypatch.setattr("jitkern.jit.build.lock_name", lambda key: "name")
        (runtime / "jitkern" / "name.lock").mkdir(parents=True)
    with config.using(runtime_dir=runtime):
        assert ensure() == b"code of f32"
    assert len(compiler.compiles) == 1


YEARS = 10 * 365 * 86400.0


@pytest.mark.parametrize("jump", [YEARS, -YEARS], ids=["forward", "back"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_clock_that_jumps_in_a_sweeping_process_stops_nobody(
    jump, when, ensure, compiler, cache_dir, monkeypatch
):
    """The other process may take a staging for one that a dead process left."""
    real, now = compiler.compile, time.time

    def sweep():
        time.time = lambda: now() + jump
        with Cache(cache_dir).staging():
            pass

    def compile_and_be_swept(*args):
        if len(compiler.compiles) == 0 and when == "before":
            assert in_a_child(sweep) == 0
        built = real(*args)
        if len(compiler.compiles) == 1 and when == "after":
            assert in_a_child(sweep) == 0
        return built

    monkeypatch.setattr(compiler, "compile", compile_and_be_swept)
    assert ensure() == b"code of f32"
    assert ensure() == b"code of f32"
    assert names(cache_dir / "v1" / "tmp") == names(cache_dir / "v1" / "bad") == []


@pytest.mark.parametrize("jump", [YEARS, -YEARS], ids=["forward", "back"])
def test_a_clock_that_jumps_in_mid_compile_stops_no_call(
    jump, ensure, compiler, cache_dir, monkeypatch, variant, target
):
    now = time.time
    compiler.during = lambda: monkeypatch.setattr(time, "time", lambda: now() + jump)
    jit.ensure(variant, target)
    assert ensure() == b"code of f32"
    assert names(cache_dir / "v1" / "tmp") == names(cache_dir / "v1" / "bad") == []
