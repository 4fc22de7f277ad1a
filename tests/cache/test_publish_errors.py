"""An error at every call that touches the disk, for everything that changes a cache."""

import errno
import os
import shutil
import sys

import pytest
from publishing import (
    ANY,
    KEY,
    OLDER,
    RECENT,
    RECENT_CONTENT,
    SCENARIOS,
    WRITING,
    Roots,
    check_that_all_is_well,
    content_of,
    evict,
    failed_everywhere,
    in_a_child,
    prune_the_old,
    publish,
)

from jitkern.cache.store import Cache
from jitkern.config import Config
from jitkern.errors import CacheError, JitkernError

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="pathlib took its calls from os when it was imported"
)


@pytest.mark.long
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
def test_an_error_at_any_call_is_a_clear_cache_error_or_harmless(
    folder, monkeypatch, scenario, lasting
):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    failed = 0
    for root, result in failed_everywhere(
        Roots(folder, scenario), lambda root: scenario.work(Cache(root)), (*WRITING, *ANY), lasting=lasting
    ):  # fmt: skip
        if isinstance(result, CacheError):
            failed += 1
            check_that_it_is_clear(result, root)
        elif result:
            assert result.read("out.so") in scenario.found
        check_that_all_is_well(root, scenario)
        shutil.rmtree(root)
    assert failed or scenario.work is evict


def check_that_it_is_clear(error, root):
    says = str(error)
    assert str(root) in says or "cannot compile here" in says
    assert "JITKERN_CACHE_DIR" in says
    assert "None" not in says
    if error.path == str(root) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        assert "free some" in says


@pytest.mark.long
def test_a_prune_that_meets_an_error_takes_no_recent_entry(folder):
    scenario = SCENARIOS["prune"]
    for root, _ in failed_everywhere(
        Roots(folder, scenario), lambda root: prune_the_old(Cache(root)), ANY, lasting=False, errors=(CacheError, OSError)
    ):  # fmt: skip
        assert content_of(Cache(root), RECENT) == RECENT_CONTENT


@pytest.mark.long
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("key", [KEY, OLDER, RECENT], ids=["in_the_root", "in_a_layer", "nowhere"])
def test_a_lookup_that_meets_an_error_is_a_hit_or_a_miss(folder, key, lasting):
    layer = (folder / "layer",)
    publish(Cache(*layer, fsync=False), OLDER, b"older")
    content = {KEY.name: b"old", OLDER.name: b"older"}.get(key.name)
    for root, entry in failed_everywhere(
        Roots(folder, SCENARIOS["refresh"]), lambda root: Cache(root, layer).find(key), (*PASSING, *ANY), lasting=lasting
    ):  # fmt: skip
        assert entry is None or entry.read("out.so") == content
        cache = Cache(root, layer, fsync=False)
        if key == KEY:
            publish(cache, KEY, b"old")
        assert content_of(cache, key) == content


PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ESTALE)


@pytest.mark.long
def test_an_entry_that_an_error_which_passes_hid_is_found_again(folder):
    for root, _ in failed_everywhere(
        Roots(folder, SCENARIOS["refresh"]),
        lambda root: Cache(root).find(KEY),
        PASSING,
        lasting=True,
    ):
        assert content_of(Cache(root), KEY) == b"old"


@pytest.fixture
def as_a_user(folder):
    """Do something as somebody whom modes bind, in a child if this is root; `folder` is theirs."""

    def run(work):
        if os.geteuid() == 0:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, 12345, 12345, follow_symlinks=False)

        def as_user():
            if os.geteuid() == 0:
                os.seteuid(12345)
            work()

        assert in_a_child(as_user) == 0

    return run


def test_a_damaged_entry_in_a_closed_folder_is_a_miss_and_heals(folder, as_a_user):
    entry = publish(Cache(folder / "cache", fsync=False), KEY, b"old")
    (entry.path / "out.so").write_bytes(b"odd")
    entry.path.chmod(0o555)  # a directory moves only if it can be written

    def heal():
        cache = Cache(folder / "cache", fsync=False)
        assert cache.find(KEY) is None
        assert publish(cache, KEY, b"new").read("out.so") == b"new"
        assert content_of(cache, KEY) == b"new"

    as_a_user(heal)


def test_a_damaged_entry_that_cannot_be_moved_is_a_miss(folder, as_a_user):
    entry = publish(Cache(folder / "cache", fsync=False), KEY, b"old")
    entry.path.rename(folder / "moved")
    entry.path.symlink_to(folder / "moved")
    entry.path.parent.chmod(0o555)

    def miss():
        assert Cache(folder / "cache", fsync=False).find(KEY) is None

    as_a_user(miss)


@pytest.mark.parametrize("place", ["root", "layer"])
def test_a_cache_that_this_user_cannot_reach_is_a_miss(folder, as_a_user, place):
    closed = folder / "closed"
    publish(Cache(closed / "cache", fsync=False), KEY, b"old")
    closed.chmod(0o000)

    def miss():
        root, layer = folder / "own", closed / "cache"
        if place == "root":
            root, layer = layer, root
        settings = Config.from_env(
            {"JITKERN_CACHE_DIR": str(root), "JITKERN_SYSTEM_CACHE": str(layer)}
        )
        assert Cache.open(settings).find(KEY) is None

    as_a_user(miss)
    closed.chmod(0o700)


@pytest.mark.long
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
def test_a_closed_disk_in_a_first_call_is_an_error_or_harmless(folder, ensure, lasting):
    roots = Roots(folder, SCENARIOS["first publish"])
    for root, result in failed_everywhere(
        roots, ensure, WRITING, lasting=lasting, errors=JitkernError
    ):
        if isinstance(result, JitkernError):
            assert "JITKERN_CACHE_DIR" in str(result)
        else:
            assert result.read("out.so") == b"code of f32"
        assert ensure(root).read("out.so") == b"code of f32"
