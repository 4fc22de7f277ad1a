import errno
import os
import stat
import uuid
from pathlib import Path

import pytest

from jitkern.cache.manifest import NAME, Manifest
from jitkern.cache.root import QUARANTINED
from jitkern.cache.store import Cache, Entry, Found
from jitkern.config import Config
from jitkern.errors import CacheError, UntrustedCache
from jitkern.files import atomic
from jitkern.source.closure import closure_of
from jitkern.source.key import make_key


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


@pytest.fixture
def key(variant, target):
    return make_key(variant, target, (), closure_of(variant.source))


def publish(cache, key, content=b"code"):
    with cache.staging() as staging:
        (staging / "out.so").write_bytes(content)
        (staging / "compile.log").write_text("log")
        (staging / "build").mkdir()
        return cache.publish(key, staging, Manifest(key.inputs))


def test_nothing_is_made_before_something_is_staged(cache, key):
    assert cache.find(key) is None
    assert not cache.root.exists()


def test_layout_and_modes(cache, key):
    old = os.umask(0o002)
    try:
        entry = publish(cache, key)
    finally:
        os.umask(old)
    names = sorted(p.name for p in entry.path.iterdir())
    assert names == ["compile.log", "manifest.json", "out.so"]
    assert stat.S_IMODE(cache.root.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry.path.stat().st_mode) == 0o755
    assert {stat.S_IMODE(p.stat().st_mode) for p in entry.path.iterdir()} == {0o644}
    tag = (cache.root / "CACHEDIR.TAG").read_text()
    assert tag.startswith("Signature: 8a477f597d28d172789f06886806bc55")
    assert list((cache.root / "v1" / "tmp").iterdir()) == []
    assert entry.path == cache.root / "v1" / key.target / key.name
    assert cache.find(key).path == entry.path and cache.find(key).read("out.so") == b"code"


def test_the_manifest_is_written_last_and_everything_is_synced(cache, key, monkeypatch):
    with cache.staging():
        pass
    synced = []
    monkeypatch.setattr(atomic, "sync", synced.append)
    entry = publish(cache, key)
    assert [p.name for p in synced] == ["compile.log", "out.so", NAME, ".entry", "v1", key.target]
    assert synced[-1] == entry.path.parent


def test_the_second_publisher_gets_the_first_ones_entry(cache, key):
    first = publish(cache, key, b"first")
    assert publish(cache, key, b"second").path == first.path
    assert cache.find(key).read("out.so") == b"first"


def test_a_loser_that_cannot_see_the_winner_keeps_its_own_copy(cache, key, monkeypatch):
    publish(cache, key, b"first")
    monkeypatch.setattr(Cache, "look_up", lambda self, *key: Found(None))
    assert publish(cache, key, b"second").read("out.so") == b"second"


def damage_truncate(entry):
    (entry.path / "out.so").write_bytes(b"")


def damage_flip(entry):
    (entry.path / "out.so").write_bytes(b"codf")


def test_verify_size_notices_a_short_file_only(tmp_path, key):
    cache = Cache(tmp_path / "cache", verify="size")
    entry = publish(cache, key)
    damage_flip(entry)
    assert cache.find(key)
    damage_truncate(entry)
    assert cache.find(key) is None


def test_reading_verifies_again(cache, key):
    entry = publish(cache, key)
    damage_flip(entry)
    with pytest.raises(ValueError, match="out.so is not what was published"):
        entry.read("out.so")


def test_quarantine_is_bounded(cache, key, caplog):
    for _ in range(QUARANTINED + 5):
        damage_flip(publish(cache, key))
        assert cache.find(key) is None
    assert len(list((cache.root / "v1" / "bad").iterdir())) == QUARANTINED
    assert "damaged" in caplog.text


def test_a_layer_that_others_can_write_is_not_used(tmp_path, key):
    layer = Cache(tmp_path / "layer")
    publish(layer, key)
    layer.root.chmod(0o777)
    assert Cache(tmp_path / "user", (layer.root,)).find(key) is None


def test_an_error_that_may_pass_quarantines_nothing(cache, key, monkeypatch, caplog):
    publish(cache, key)

    def fail(*args, **kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fail)
        assert cache.find(key) is None
    assert "could not be read" in caplog.text
    assert cache.find(key)


def test_a_layer_is_not_touched_by_remove(tmp_path, key):
    layer = Cache(tmp_path / "layer")
    entry = publish(layer, key)
    Cache(tmp_path / "user", (layer.root,)).remove(entry.path)
    assert layer.find(key)


def test_entries_lists_whole_and_damaged_ones(cache, key, variant, target):
    good = publish(cache, key)
    other = make_key(variant, target, ("-x",), closure_of(variant.source))
    bad = publish(cache, other)
    damage_flip(bad)
    listed = dict(cache.entries("always"))
    assert isinstance(listed[good.path], Entry)
    assert isinstance(listed[bad.path], ValueError)


def test_remove_makes_room(cache, key):
    cache.remove(publish(cache, key, b"old").path)
    assert publish(cache, key, b"new").read("out.so") == b"new"


SAYS = {
    errno.ENOSPC: "no space is left", errno.EDQUOT: "no space is left", errno.EROFS: "make it writable",
    errno.EIO: "Input/output",
}  # fmt: skip


@pytest.mark.parametrize("code", SAYS)
@pytest.mark.parametrize("where", ["write_bytes", "rename", "mkdir", "chmod"])
def test_a_failing_disk_is_a_clear_error_and_harms_no_later_run(
    cache, key, monkeypatch, code, where
):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code), "path")

    real = Path.write_bytes
    with monkeypatch.context() as patch:
        if where == "write_bytes":  # of the manifest: the artifact is written by the compiler
            write = lambda self, data: fail() if self.name == NAME else real(self, data)
            patch.setattr(Path, where, write)
        else:
            patch.setattr(Path, where, fail)
        with pytest.raises(CacheError, match=SAYS[code]) as caught:
            publish(cache, key)
        assert caught.value.path == str(cache.root)
        assert caught.value.errno == code
    assert cache.find(key) is None
    publish(cache, key)
    assert cache.find(key)


def test_stale_staging_is_swept(cache, key):
    publish(cache, key)
    stale, fresh = (cache.root / "v1" / "tmp" / uuid.uuid4().hex for _ in range(2))
    stale.mkdir()
    fresh.mkdir()
    os.utime(stale, (0, 0))
    with cache.staging():
        assert not stale.exists()
        assert fresh.exists()


def test_an_untrusted_root_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(UntrustedCache, match="chmod 700"):
        Cache.open(Config.from_env({"JITKERN_CACHE_DIR": str(tmp_path)}))


def test_a_root_that_is_too_long_is_refused_at_once(tmp_path):
    root = tmp_path / "/".join(["a" * 200] * 19)
    with pytest.raises(CacheError, match="shorter one") as caught:
        Cache.open(Config.from_env({"JITKERN_CACHE_DIR": str(root)}))
    assert caught.value.errno == errno.ENAMETOOLONG


def test_a_lookup_ends_where_nothing_can_be_known_of_an_entry(cache, key, monkeypatch):
    damage_flip(publish(cache, key))
    monkeypatch.setattr(os.path, "samestat", lambda *_: False)
    assert cache.look_up(key.target, key.name).reason == "unreadable"
