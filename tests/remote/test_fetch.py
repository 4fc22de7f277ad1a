"""A miss asks the remotes: what is adopted, how often they are asked, and what is told."""

import collections
import errno
import itertools
import sys
from functools import partial
from pathlib import Path

import pytest
from helpers import run_threads
from servers import free_port, started
from stocked import everything
from web_servers import Server, closed_port, digests, fill, put, static, trusting

import jitkern
from jitkern import config, jit, testing
from jitkern.cache.store import Cache
from jitkern.errors import NotCached
from jitkern.remote import fetch, layout, publish
from jitkern.source.kinds import Variant


@pytest.fixture
def events():
    heard = []
    stop = jitkern.on_compile(heard.append)
    yield heard
    stop()


@pytest.mark.parametrize("suffix", [".tar", ".tar.zst"])
def test_a_miss_is_answered_by_the_bundle_that_lists_it(
    tmp_path, filled, compiler, variant, target, events, cache_dir, suffix, caplog
):
    caplog.set_level("INFO", "jitkern")
    folder, key = filled
    fill(Cache(tmp_path / "builder"), folder, suffix=suffix)
    before = jitkern.stats()
    with trusting(f"file://{folder}"):
        entry, built = jit.ensure_and_tell(variant, target)
        assert entry.manifest.digest == key.digest and entry.root == cache_dir and not built
        jit.ensure(variant, target)
    assert not compiler.compiles
    assert [event.status for event in events] == ["fetched", "hit"]
    assert events[0].path == str(entry.path)
    assert {n: jitkern.stats()[n] - before[n] for n in ("fetched", "hits", "compiles")} == {
        "fetched": 1, "hits": 1, "compiles": 0,
    }  # fmt: skip
    (line,) = (m for m in caplog.messages if m.startswith("fetched v1/"))
    assert "1 new entries" in line and f"file://{folder}" in line


@pytest.fixture
def pushed(tmp_path, directory, compiler, variant, target):
    """A function that builds the entry elsewhere, and pushes it into a directory."""

    def push():
        with config.using(cache_dir=tmp_path / "builder"):
            jit.ensure(variant, target)
        cache = Cache(tmp_path / "builder")
        compiler.compiles.clear()
        return publish.push(cache, everything(cache), directory, unsigned=True)

    return push


def test_a_plain_web_server_of_a_directory_warms_an_empty_cache(
    tmp_path, directory, pushed, compiler, variant, target
):
    """The server of Python's library, which knows neither ETags nor us."""
    pushed()
    port = free_port()
    command = [sys.executable, "-m", "http.server", f"{port}", "-b", "127.0.0.1", "-d"]
    server, url = started([*command, directory.root], port, tmp_path), f"http://127.0.0.1:{port}"
    with server, trusting(url, compile="never"):
        jit.ensure(variant, target)
    assert not compiler.compiles


def test_a_bundle_that_is_gone_is_a_miss_until_the_next_push(
    tmp_path, directory, pushed, compiler, variant, target, caplog, monkeypatch
):
    (done,) = pushed()
    (bundle,) = done.bundles
    (directory.root / layout.bundle_of(done.machine, bundle.file)).unlink()
    with trusting(directory.url):
        jit.ensure(variant, target)
        assert len(compiler.compiles) == 1
        assert [line for line in caplog.messages if "it is gone" in line] == caplog.messages != []
        assert pushed()[0].uploaded == bundle.bytes
        testing.forget_remotes(monkeypatch)  # another process asks again
        with config.using(cache_dir=tmp_path / "node", compile="never"):
            jit.ensure(variant, target)
    assert not compiler.compiles


@pytest.fixture
def in_a_remote(tmp_path, compiler, source, target):
    """A function that returns so many variants, which the remote in `remote` has and no cache."""

    def make(count):
        variants = [Variant("test::scale", source, "scale", (("N", str(n)),)) for n in range(count)]
        with config.using(cache_dir=tmp_path / "builder"):
            for variant in variants:
                jit.ensure(variant, target)
        fill(Cache(tmp_path / "builder"), tmp_path / "remote")
        compiler.compiles.clear()
        return variants

    return make


def test_all_entries_of_a_bundle_are_adopted_at_once(tmp_path, compiler, target, in_a_remote):
    variants = in_a_remote(9)
    with Server(static(tmp_path / "remote")) as server, trusting(server.url):
        for variant in variants:
            jit.ensure(variant, target)
        assert len(server.requests) == 2 and server.connections == 1
    assert not compiler.compiles


def test_an_index_is_read_once_a_minute_and_only_if_changed(
    tmp_path, filled, compiler, source, target, monkeypatch
):
    numbers = itertools.count()

    def miss():
        jit.ensure(Variant("test::scale", source, "scale", (("N", str(next(numbers))),)), target)

    with Server(static(filled[0])) as server, trusting(server.url):
        miss()
        miss()
        assert len(server.requests) == 1
        monkeypatch.setattr(fetch, "FRESH", 0.0)
        miss()
        assert len(server.requests) == 2
        assert "if-none-match" in server.requests[1].headers


def test_a_new_process_reads_an_index_once_whatever_it_misses(
    filled, compiler, source, target, monkeypatch
):
    with Server(static(filled[0])) as server, trusting(server.url):
        for process in range(3):
            testing.forget_remotes(monkeypatch)
            for n in range(4):
                missed = Variant("test::scale", source, "scale", (("N", f"{process}{n}"),))
                jit.ensure(missed, target)
            assert len(server.requests) == process + 1


def test_remotes_are_asked_in_order_and_a_dead_one_is_skipped(
    filled, compiler, variant, target, caplog
):
    dead = f"http://127.0.0.1:{closed_port()}"
    with trusting(dead, f"file://{filled[0]}"):
        jit.ensure(variant, target)
    assert not compiler.compiles
    (line,) = caplog.messages
    assert dead in line and "refused" in line.lower()


def test_what_is_no_remote_after_all_is_told_once(compiler, source, target, caplog):
    with trusting("https://host:abc/x"):
        for n in range(3):
            jit.ensure(Variant("test::scale", source, "scale", (("N", str(n)),)), target)
    assert len(compiler.compiles) == 3
    (line,) = caplog.messages
    assert "names no host" in line


@pytest.mark.parametrize("settings", [{"offline": True}, {"remote": ""}])
def test_nothing_is_asked_offline(filled, compiler, variant, target, settings):
    with Server(static(filled[0])) as server, trusting(server.url), config.using(**settings):
        jit.ensure(variant, target)
        assert not server.requests
    assert len(compiler.compiles) == 1


@pytest.mark.parametrize(("captures", "words"), [(True, "CUDA graph"), (False, "not cached")])
def test_who_may_not_wait_asks_nobody(filled, variant, target, monkeypatch, captures, words):
    for module in jit.get_or_compile, jit.build:
        monkeypatch.setattr(module, "capturing", lambda: captures)
    with Server(static(filled[0])) as server, trusting(server.url):
        with pytest.raises(NotCached, match=words):
            jit.ensure(variant, target, may_compile=captures)
        assert not server.requests


def test_with_compiling_off_the_error_tells_what_remotes_said(filled, variant, target, source):
    other = Variant("test::scale", source, "other")
    with Server(static(filled[0])) as server, trusting(server.url, compile="never"):
        assert jit.ensure(variant, target)
        for _ in range(5):
            with pytest.raises(NotCached) as raised:
                jit.ensure(other, target)
        assert f"{server.url}: it has no such entry for cpu-x86_64" in str(raised.value)
        assert "JITKERN_COMPILE=never" in str(raised.value)
        assert len(server.requests) == 2


def test_what_another_compiler_made_is_not_asked_for(filled, compiler, variant, target):
    jit.ensure(variant, target)
    compiler.version = "2"
    with Server(static(filled[0])) as server, trusting(server.url, compiler="exact"):
        entry, built = jit.ensure_and_tell(variant, target)
        assert built and entry.manifest.compiler["version"] == "2"
        assert not server.requests


def test_a_bundle_without_what_its_index_says_is_asked_once(
    tmp_path, filled, compiler, source, target, caplog
):
    folder, key = filled
    machine = layout.machine_of(key.target)
    (old,) = (folder / "v1" / machine).glob("*.tar")
    variants = [Variant("test::scale", source, "scale", (("N", str(n)),)) for n in range(3)]
    named = digests(
        type("E", (), {"path": tmp_path / jit.key_of(v, target).name}) for v in variants
    )
    put(folder, machine, old.read_bytes(), named)
    with Server(static(folder)) as server, trusting(server.url):
        for variant in variants:
            jit.ensure(variant, target)
        assert len(server.requests) == 2
    assert len(compiler.compiles) == 3
    (line,) = caplog.messages
    assert "does not hold" in line and old.name in line


def test_threads_that_miss_at_once_fetch_a_bundle_once(tmp_path, compiler, target, in_a_remote):
    variants = in_a_remote(8)
    wanted = []

    def work(variant, url):
        with trusting(url):
            wanted.append(jit.ensure(variant, target))

    with Server(static(tmp_path / "remote")) as server:
        run_threads(*(partial(work, v, server.url) for v in variants))
        assert len(wanted) == 8 and len(server.requests) == 2
    assert not compiler.compiles


def test_what_the_cache_cannot_keep_is_kept_for_the_process(
    filled, compiler, variant, target, cache_dir, monkeypatch
):
    rename = Path.rename

    def read_only(self, to):
        if to.is_relative_to(cache_dir):
            raise OSError(errno.EROFS, "read-only", str(cache_dir))
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", read_only)
    with trusting(f"file://{filled[0]}"):
        entry = jit.ensure(variant, target)
    assert entry.read("out.so") and not compiler.compiles
    assert entry.root != cache_dir


def test_a_process_takes_so_many_bytes_and_no_more(
    filled, compiler, variant, target, monkeypatch, caplog
):
    monkeypatch.setattr(fetch, "MOST_TAKEN", 100)
    with trusting(f"file://{filled[0]}"):
        jit.ensure(variant, target)
    assert len(compiler.compiles) == 1
    (line,) = caplog.messages
    assert "over 100" in line


def test_a_bundle_that_the_disk_cannot_hold_is_left(
    tmp_path, filled, compiler, variant, target, cache_dir, monkeypatch, caplog
):
    """It would take the space that a compile needs."""
    folder, _ = filled
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(100_000, 99_000, 1000))
    with trusting(f"file://{folder}"):
        jit.ensure(variant, target)
    assert len(compiler.compiles) == 1
    (line,) = caplog.messages
    assert "are left in" in line


@pytest.mark.parametrize("place", [0, 1])
def test_a_disk_that_fills_up_while_a_bundle_is_adopted(
    tmp_path, compiler, target, in_a_remote, monkeypatch, place
):
    """The wanted entry is taken if it was adopted, and compiled if not: its own size may fit."""
    variants = in_a_remote(2)
    adopt, adopted = Cache.adopt, []

    def failing(cache, target, name, files, **options):
        if adopted:
            raise cache.write_error(OSError(errno.ENOSPC, "full"))
        adopted.append(name)
        return adopt(cache, target, name, files, **options)

    monkeypatch.setattr(Cache, "adopt", failing)
    names = sorted(jit.key_of(variant, target).name for variant in variants)
    wanted = next(v for v in variants if jit.key_of(v, target).name == names[place])
    with trusting(f"file://{tmp_path / 'remote'}"):
        jit.ensure(wanted, target)
    assert (adopted, len(compiler.compiles)) == (names[:1], place)
