"""Which roots are trusted; links on the way to one are followed, unless somebody else could change them."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
from publishing import KEY, publish

from jitkern import config
from jitkern.cache import lock
from jitkern.cache.store import Cache
from jitkern.cache.temporary_cache import new_root_in
from jitkern.config import Config
from jitkern.errors import CacheError, UntrustedCache
from jitkern.files import trust
from jitkern.remote.stores.directory import DirectoryStore

SOMEBODY = 12345
LINKS = {
    "a link": {"link": "{here}/disk"},
    "two links in a row": {"link": "{here}/next", "next": "{here}/disk"},
    "a link below a link": {"link": "{here}/next/below", "next": "{here}/disk"},
    "a link to a folder with a space": {"link": "{here}/an other disk"},
    "a relative link": {"link": "disk"},
    "a link that climbs": {"link": "next/../disk", "next": "deep/er"},
}


@pytest.fixture
def linked(tmp_path):
    """Make links, by name, to targets; return the folder they lie in."""
    for name in ("disk/below", "an other disk", "deep/er", "deep/disk"):
        (tmp_path / name).mkdir(parents=True)

    def make(links):
        for name, to in links.items():
            (tmp_path / name).symlink_to(to.format(here=tmp_path))
        return tmp_path

    return make


def opened(root, **values):
    """Return the cache of a process with this root; a sync of the disk is part of its work."""
    return Cache.open(
        Config.from_env({"JITKERN_CACHE_DIR": str(root), "JITKERN_FSYNC": "1", **values})
    )


@pytest.mark.parametrize("links", LINKS.values(), ids=lambda links: "_".join(links.values()))
@pytest.mark.parametrize("below", ["cache", "new/parents/cache", ""])
def test_a_root_is_made_below_a_link(linked, links, below):
    root = linked(links) / "link" / below
    entry = publish(opened(root), KEY, b"new")
    assert entry.path.is_relative_to(root)
    assert opened(root).find(KEY).read("out.so") == b"new"


@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME"])
def test_the_default_root_may_lie_below_a_link(linked, monkeypatch, variable):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(variable, str(linked({"link": "disk"}) / "link"))
    settings = Config.from_env({})
    assert publish(Cache.open(settings), KEY, b"new").path.is_relative_to(settings.cache_dir)
    assert Cache.open(settings).find(KEY)


@pytest.mark.parametrize(
    "links",
    [{"link": "gone"}, {"link": "link"}, {"link": "next", "next": "link"}],
    ids=["dangling", "to itself", "to each other"],
)
@pytest.mark.parametrize("below", ["cache", ""])
def test_a_link_to_nowhere_is_named(linked, links, below):
    here = linked(links)
    with pytest.raises(CacheError, match="link is a link to no directory; remove it") as caught:
        publish(opened(here / "link" / below), KEY, b"new")
    assert caught.value.errno == errno.EEXIST
    assert opened(here / "link" / below).find(KEY) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a link away")
@pytest.mark.parametrize("changed", ["link", "next"])
@pytest.mark.parametrize("below", ["cache", ""])
def test_somebody_elses_link_is_not_followed(linked, changed, below):
    here = linked({"link": "next", "next": "disk"})
    os.chown(here / changed, SOMEBODY, SOMEBODY, follow_symlinks=False)
    with pytest.raises(UntrustedCache, match=f"{changed}, a link on the way to .* user {SOMEBODY}"):
        opened(here / "link" / below)
    assert "a link on the way" in trust.layer_of(here / "link", trust.Trust())
    vouched = trust.Trust(roots=(here / "link",))
    assert trust.why_untrusted_root(here / "link", vouched.roots) == ""
    assert isinstance(trust.layer_of(here / "link", vouched), trust.Layer)


@pytest.mark.skipif(os.geteuid() != 0, reason="root is who this process is not")
def test_a_link_of_root_is_followed_by_other_users(linked, monkeypatch):
    here = linked({"link": "disk"})
    os.chown(here / "disk", SOMEBODY, SOMEBODY)
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    assert trust.why_untrusted_root(here / "link") == ""


def test_a_link_where_all_can_write_is_not_followed(linked):
    here = linked({"link": "open/next"})
    (here / "open").mkdir()
    (here / "open/next").symlink_to(here / "disk")
    (here / "open").chmod(0o777)
    assert "open, a parent of" in trust.why_untrusted_root(here / "link/cache")
    (here / "open").chmod(0o1777)
    assert trust.why_untrusted_root(here / "link/cache") == ""


def test_a_read_only_layer_may_lie_below_a_link(linked, tmp_path):
    here = linked({"link": "disk"})
    publish(Cache(here / "disk/layer"), KEY, b"shared")
    for layer in (here / "link/layer", here / "link/layer/../layer"):
        cache = opened(tmp_path / "own", JITKERN_SYSTEM_CACHE=str(layer))
        assert cache.find(KEY).read("out.so") == b"shared"


def test_remotes_locks_and_temporary_roots_may_be_linked(linked, monkeypatch):
    there = linked({"link": "disk"}) / "link"
    assert DirectoryStore(f"file://{there}/remote").create("index", b"data")
    assert new_root_in(str(there)).is_dir()
    for settings in (config.using(runtime_dir=there), config.using(runtime_dir=None)):
        monkeypatch.setattr(tempfile, "tempdir", str(there))
        with settings:
            place = lock.lock_directory(config.current())
            assert place is not None and place.is_relative_to(there)
            with lock.held("01-02", "a kernel"):
                assert [path.name for path in Path(place).iterdir()] == ["01-02.lock"]


# ------------------------------------------------------------------ roots without a link


def test_own_private_root_is_trusted(tmp_path):
    assert trust.why_untrusted_root(tmp_path / "new" / "cache") == ""


@pytest.mark.parametrize("mode", [0o722, 0o702, 0o777])
def test_a_root_that_others_can_write_is_not(tmp_path, mode):
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(mode)
    assert "writable by others" in trust.why_untrusted_root(root)


def test_a_world_writable_parent_is_not_unless_sticky(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert "writable by every user" in trust.why_untrusted_root(shared / "cache")
    shared.chmod(0o1777)
    assert trust.why_untrusted_root(shared / "cache") == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_somebody_elses_root_is_not(tmp_path):
    root = tmp_path / "cache"
    root.mkdir()
    os.chown(root, SOMEBODY, SOMEBODY)
    assert "belongs to user 12345" in trust.why_untrusted_root(root)
    assert "belongs to user 12345" in trust.layer_of(root, trust.Trust())
