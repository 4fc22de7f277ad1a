"""Anything in any order, against a dict: a lookup gives what was published, or nothing if it may."""

import contextlib
import os
import time
from pathlib import Path

import pytest
from publishing import Disk, in_memory, key_of, publish

from jitkern.cache.eviction import after_publish
from jitkern.cache.layout import is_entry
from jitkern.cache.manifest import Manifest
from jitkern.cache.store import Cache
from jitkern.cache_tools import evictable, remove
from jitkern.errors import CacheError

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
stateful = pytest.importorskip("hypothesis.stateful")
rule = stateful.rule

KEYS = {name: key_of(name) for name in ("a", "b", "c", "d")}
IN_THE_LAYER = ("a", "b")
SIZE = 300  # bytes of an artifact, at most
DAY = 86400.0

keys = st.sampled_from(sorted(KEYS))
caches = st.integers(0, 1)
sizes = st.integers(1, SIZE)
ages = st.sampled_from((0.0, 60.0, DAY, 400 * DAY))
jumps = st.sampled_from((-3650, -1, -0.1, 0.1, 1, 2, 3650))


class Crash(BaseException):
    """The process is dead: nothing that it would still do is done."""


class Dying:
    """Kills at the n-th call that changes something."""

    def __init__(self, n):
        self.left = n

    def __call__(self, call, changes):
        self.left -= changes
        if self.left <= 0 and (changes or self.left < 0):
            self.left = -1
            raise Crash


class Machine(stateful.RuleBasedStateMachine):
    """Two caches on one root and on one layer, used in turn.

    user: what the root may hold for each key, of which None is nothing that is whole; damaged:
    keys whose entry something was done to; staged: what is being built, and may be swept or not.
    """

    def __init__(self):
        super().__init__()
        self.open = contextlib.ExitStack()
        folder = self.open.enter_context(in_memory())
        self.root = folder / "cache"
        self.layer = {}
        layer = Cache(folder / "layer", fsync=False)
        for name in IN_THE_LAYER:
            self.layer[name] = f"{name} of the layer".encode()
            publish(layer, KEYS[name], self.layer[name])
        self.caches = [Cache(self.root, (layer.root,), fsync=False) for _ in range(2)]
        self.user = {name: {None} for name in KEYS}
        self.damaged = set()
        self.staged, self.taken_for_dead = [], set()
        self.published = 0
        self.offset, now, now_ns = 0.0, time.time, time.time_ns
        patch = self.open.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(time, "time", lambda: now() + self.offset)
        patch.setattr(time, "time_ns", lambda: now_ns() + int(self.offset) * 10**9)

    def teardown(self):
        try:
            for name in KEYS:
                self.get(0, name)
            for i in range(len(self.staged)):
                self.publish_what_was_staged(0, i)
        finally:
            self.open.close()

    def path(self, name):
        return self.root / "v1" / KEYS[name].target / KEYS[name].name

    def new_content(self, size):
        """Of no other entry."""
        self.published += 1
        return f"{self.published} ".encode() * size

    def was_published(self, name, content, got):
        """The first whole one stays; the next, or a layer's in place of a damaged one, is given."""
        held = self.user[name]
        self.damaged.discard(name)
        if got == content and None in held:
            self.user[name] = {content}
        elif got in held:
            self.user[name] = {got}
        else:
            assert None in held and got == self.layer.get(name)
            self.user[name] = {None}

    @rule(i=caches, name=keys, size=sizes)
    def put(self, i, name, size):
        content = self.new_content(size)
        entry = publish(self.caches[i], KEYS[name], content)
        self.was_published(name, content, entry.read("out.so"))

    @rule(i=caches, name=keys)
    def get(self, i, name):
        key = KEYS[name]
        entry, _, reason = self.caches[i].look_up(key.target, key.name, key.digest)
        assert entry or reason == ("damaged" if name in self.damaged else "absent")
        self.damaged.discard(name)
        got = entry and entry.read("out.so")
        held = self.user[name]
        assert got in held - {None} or (None in held and got == self.layer.get(name))
        self.user[name] = {got} if got in held else {None}

    @rule(i=caches, name=keys, size=sizes)
    def stage(self, i, name, size):
        staging = self.caches[i].staging()
        path = staging.__enter__()
        content = self.new_content(size)
        (path / "out.so").write_bytes(content)
        self.staged.append((staging, path, name, content))
        self.note_the_time()

    @stateful.precondition(lambda self: self.staged)
    @rule(i=caches, which=st.integers(0, 9))
    def publish_what_was_staged(self, i, which):
        staging, path, name, content = self.staged.pop(which % len(self.staged))
        try:
            entry = self.caches[i].publish(KEYS[name], path, Manifest(KEYS[name].inputs))
            self.was_published(name, content, entry.read("out.so"))
        except CacheError:
            assert not path.exists()
            assert path in self.taken_for_dead
        staging.__exit__(None, None, None)

    def damage(self, name, which, change):
        """Of a file of an entry; what is lost with the log is nothing."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            files = sorted(self.path(name).iterdir())
            if files:
                file = files[which % len(files)]
                change(file)
                if file.name != "compile.log":
                    self.user[name] = {None}
                    self.damaged.add(name)

    @rule(name=keys, which=st.integers(0, 2), at=st.integers(0, 10**6), bits=st.integers(1, 255))
    def corrupt(self, name, which, at, bits):
        def flip(file):
            data = bytearray(file.read_bytes())
            if data:
                data[at % len(data)] ^= bits
            else:
                data = b"x"
            file.write_bytes(data)

        if name not in self.damaged:  # a second flip of the same bits would mend it
            self.damage(name, which, flip)

    @rule(name=keys, which=st.integers(0, 2), part=st.floats(0, 0.999))
    def truncate(self, name, which, part):
        self.damage(name, which, lambda file: os.truncate(file, int(file.stat().st_size * part)))

    @rule(name=keys, which=st.integers(0, 2))
    def delete_a_file(self, name, which):
        self.damage(name, which, Path.unlink)

    @rule(i=caches, name=keys)
    def remove(self, i, name):
        with self.unless_it_stays(name):
            self.caches[i].remove(self.path(name))

    @contextlib.contextmanager
    def unless_it_stays(self, name):
        """What is there without a manifest of ours may be somebody's, and is left alone."""
        stays = self.path(name).exists() and not is_entry(self.path(name))
        yield
        assert self.path(name).exists() == stays
        if not stays:
            self.user[name] = {None}
            self.damaged.discard(name)

    @contextlib.contextmanager
    def going(self):
        """What goes meanwhile is no longer held."""
        there = {name for name in KEYS if self.path(name).exists()}
        yield
        for name in there:
            if not self.path(name).exists():
                self.user[name] = {None}
                self.damaged.discard(name)

    @rule(i=caches, max_size=st.integers(0, 4 * SIZE), max_age=ages)
    def prune(self, i, max_size, max_age):
        cache = self.caches[i]
        with self.going():
            uses = evictable(cache, max_size=max_size, max_age=max_age)
            remove(cache, [use.path for use in uses])
        held = [path for path in cache.paths() if is_entry(path)]
        if max_size and held:
            files = [file for path in held for file in path.iterdir()]
            assert sum(file.stat().st_size for file in files) <= max_size
        assert not evictable(cache, max_size=max_size, max_age=max_age)

    @rule(i=caches, max_size=st.integers(0, 4 * SIZE), max_age=ages, size=sizes)
    def evict(self, i, max_size, max_age, size):
        with self.going():
            after_publish(self.caches[i], size, max_size=max_size, max_age=max_age)

    @rule(i=caches, name=keys, size=sizes, n=st.integers(1, 60))
    def crash_in_a_publish(self, i, name, size, n):
        content = self.new_content(size)
        with contextlib.suppress(Crash), Disk(Dying(n)):
            publish(self.caches[i], KEYS[name], content)
        if None in self.user[name]:
            self.user[name] = self.user[name] | {content}
        if not self.path(name).exists():
            self.damaged.discard(name)

    @rule(i=caches, name=keys, n=st.integers(1, 6))
    def crash_in_a_remove(self, i, name, n):
        with contextlib.suppress(Crash), Disk(Dying(n)):
            self.caches[i].remove(self.path(name))
        if not self.path(name).exists():
            self.user[name] = {None}
            self.damaged.discard(name)

    @rule(i=caches, max_size=st.integers(1, 4 * SIZE), n=st.integers(1, 20))
    def crash_in_a_prune(self, i, max_size, n):
        cache = self.caches[i]
        with self.going(), contextlib.suppress(Crash), Disk(Dying(n)):
            remove(cache, [use.path for use in evictable(cache, max_size=max_size)])

    @rule(days=jumps)
    def jump(self, days):
        self.offset += days * DAY
        self.note_the_time()

    def note_the_time(self):
        if self.offset > 0.9 * DAY:
            self.taken_for_dead |= {path for _, path, *_ in self.staged}

    @rule()
    def set_the_clock(self):
        self.offset = 0.0

    @rule(i=caches)
    def begin_anew(self, i):
        other = self.caches[i]
        self.caches[i] = Cache(self.root, other.layers, fsync=False)

    @stateful.invariant()
    def layers_are_as_they_were(self):
        (root,) = self.caches[0].layers
        assert {path.name for path in root.iterdir()} == {"CACHEDIR.TAG", "v1"}


def run(examples, steps, *, derandomize):
    stateful.run_state_machine_as_test(
        Machine,
        settings=hypothesis.settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=derandomize,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )


@pytest.mark.long
def test_a_lookup_gives_what_was_published_or_nothing():
    run(300, 30, derandomize=True)


@pytest.mark.long
def test_a_lookup_gives_what_was_published_or_nothing_for_long():
    run(2000, 60, derandomize=False)
