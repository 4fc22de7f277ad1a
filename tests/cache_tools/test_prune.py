import os
import time

import pytest
from helpers import published

from jitkern import cache_tools, config, jit, mega_cache
from jitkern.cache import eviction
from jitkern.cache.manifest import NAME
from jitkern.cache.root import GRACE
from jitkern.cache.store import Cache
from jitkern.cache_tools import bundle
from jitkern.cache_tools.prune import Installed
from jitkern.source.closure import closure_of
from jitkern.source.key import make_key

HOUR, DAY = 3600.0, 86400.0


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


@pytest.fixture
def put(cache, variant, target):
    """Publish entry `number`, used `age` seconds ago, of about 10 kB."""

    def put(number, age=0.0, target=target, package=None):
        content, flag = b"x" * 10000, f"-D{number}"
        _, entry = published(cache, variant, target, flag, package=package, out_so=content)
        used = time.time() - age
        os.utime(entry.path / NAME, (used, used))
        return entry.path

    return put


def going(cache, **limits):
    return [use.path for use in cache_tools.evictable(cache, **limits)]


def test_the_least_recently_used_go_first(cache, put):
    paths = [put(i, age) for i, age in enumerate((300, 100, 200))]
    total = sum(use.bytes for use in eviction.uses(cache))
    assert going(cache, max_size=total) == []
    assert going(cache, max_size=total - 1) == [paths[0]]
    assert going(cache, max_size=1) == [paths[0], paths[2], paths[1]]


def test_what_was_not_used_for_so_long_goes(cache, put):
    old, _ = put(1, 3 * DAY), put(2, DAY)
    assert going(cache, max_age=2 * DAY) == [old]


def test_no_limit_evicts_nothing(cache, put):
    put(1, 1000 * DAY)
    assert going(cache) == []


def test_finding_an_entry_renews_it_at_most_once_an_hour(cache, put, variant, target):
    path = put(1, 2 * HOUR)
    key = make_key(variant, target, ("-D1",), closure_of(variant.source))
    assert cache.find(key)
    touched = (path / NAME).stat().st_mtime
    assert time.time() - touched < HOUR
    os.utime(path / NAME, (touched - HOUR / 2,) * 2)
    before = (path / NAME).stat().st_mtime_ns
    assert cache.find(key)
    assert (path / NAME).stat().st_mtime_ns == before


def test_a_removed_entry_is_gone_for_the_next_lookup_and_freed(cache, put):
    path = put(1)
    cache_tools.remove(cache, [path, path])
    assert not path.exists()
    assert list((cache.root / "v1" / "trash").iterdir()) == []


def test_what_was_put_aside_in_place_of_v1_is_purged(cache, put):
    put(1)
    aside = cache.root / f"v1.bad.{time.time_ns()}"
    aside.write_text("a file where v1 belongs")
    cache.purge()
    assert aside.exists()
    cache.purge(0.0)
    assert not aside.exists()


def test_the_trash_is_kept_for_those_who_read_it(cache, put):
    cache.remove(put(1))
    cache.purge()
    (trashed,) = (cache.root / "v1" / "trash").iterdir()
    assert (trashed / NAME).is_file()
    since, _, name = trashed.name.partition(".")
    trashed.rename(trashed.with_name(f"{int(since) - int((GRACE + 1) * 1e9)}.{name}"))
    cache.purge()
    assert list((cache.root / "v1" / "trash").iterdir()) == []


def after(cache, size=0, max_size=0, max_age=0.0):
    eviction.after_publish(cache, size, max_size=max_size, max_age=max_age)


def last_look(cache):
    return cache.root / "v1" / eviction.MARKER


@pytest.fixture
def looks(cache, monkeypatch):
    """One for each look through the cache."""
    looks, real = [], eviction.uses
    monkeypatch.setattr(eviction, "uses", lambda cache: looks.append(1) or real(cache))
    return looks


def test_a_publish_over_the_limit_evicts_down_to_nine_tenths(cache, put):
    for i in range(20):
        put(i, DAY)
    total = sum(use.bytes for use in eviction.uses(cache))
    after(cache)  # looks
    after(cache, size=total // 9, max_size=total - 1)
    left = sum(use.bytes for use in eviction.uses(cache))
    assert 0.8 * total < left <= 0.9 * total


def test_a_limit_of_one_byte_is_a_limit(cache, put):
    paths = [put(1, DAY), put(2, 2 * DAY)]
    after(cache, size=1)
    after(cache, size=1, max_size=1)
    assert not any(path.exists() for path in paths)


def test_the_automatic_run_spares_what_was_used_within_the_hour(cache, put):
    path = put(1)
    after(cache, size=1, max_size=1)
    assert path.exists()


def test_the_automatic_run_looks_once_an_hour(cache, put):
    put(0)
    after(cache)
    path = put(1, 10 * DAY)
    after(cache, max_age=DAY)
    assert path.exists()
    hour_ago = time.time() - 1.1 * HOUR
    os.utime(last_look(cache), (hour_ago, hour_ago))
    after(cache, max_age=DAY)
    assert not path.exists()


def test_the_automatic_run_looks_after_each_tenth_of_the_limit(cache, put, looks):
    put(1)
    after(cache, max_size=1000)
    for _ in range(50):
        after(cache, size=30, max_size=1000)
    assert len(looks) == 1 + 50 * 30 // 120  # 120 is the first multiple above a tenth


def test_a_look_of_another_process_is_a_look(cache, put, looks):
    put(1)
    caches = [cache, Cache(cache.root)]
    after(cache, max_size=1000)
    for i in range(40):
        after(caches[i % 2], size=90, max_size=1000)
    assert len(looks) == 1 + 40 // 3  # the third publish is the second of one of them


def test_a_cache_without_a_limit_is_looked_through_once_an_hour(cache, put, looks):
    put(1)
    for _ in range(5):
        after(cache, size=1 << 40)
    assert len(looks) == 1


@pytest.mark.parametrize("at", [1e10, 0])
def test_a_last_look_in_the_future_or_long_ago_means_look_now(cache, put, at):
    path = put(1, 10 * DAY)
    last_look(cache).touch()
    os.utime(last_look(cache), (at, at))
    after(cache, max_age=DAY)
    assert not path.exists()
    assert abs(time.time() - last_look(cache).stat().st_mtime) < HOUR


def test_a_failure_of_the_automatic_run_is_nobodys(cache, put):
    path = put(1, 10 * DAY)
    last_look(cache).mkdir()  # so that no look can be noted
    os.utime(last_look(cache), (0, 0))
    after(cache, max_age=DAY)
    assert path.exists()


HERE = Installed("2.13.0", "130", frozenset({"sm_90"}))


@pytest.mark.parametrize(
    ("target", "used"),
    [
        ("cuda-sm_90-cu130-torch2.13.0", True),
        ("cuda-sm_80-cu130-torch2.13.0", False),
        ("cuda-sm_90-cu126-torch2.13.0", False),
        ("cuda-sm_90-cu130-torch2.11.0", False),
        ("cpu-x86_64-torch2.13.0", True),
        ("cpu-x86_64-torch2.11.0-linux_x86_64", False),
        ("cpu-x86_64-torch2.13.0-win32_x86_64", False),
        ("something else", False),
    ],
)
def test_stale_is_another_torch_cuda_or_arch(target, used):
    assert HERE.uses_target(target) == used


def test_without_a_gpu_no_arch_is_stale():
    builder = Installed("2.13.0", "", frozenset())
    assert builder.uses_target("cuda-sm_80-cu126-torch2.13.0")
    assert not builder.uses_target("cuda-sm_80-cu126-torch2.11.0")


def test_stale_is_another_version_of_the_package_too(cache, put, monkeypatch, target):
    monkeypatch.setattr(Installed, "found", classmethod(lambda cls: HERE))
    kept = put(1), put(2, package={"name": "pytest", "version": pytest.__version__})
    stale = {
        put(3, package={"name": "pytest", "version": "0.1"}),
        put(4, package={"name": "no-such-package", "version": "1"}),
        put(5, target=target._replace(torch="2.11.0")),
    }
    assert set(going(cache, stale=True)) == stale
    assert all(path.exists() for path in kept)


@pytest.mark.long
def test_the_installed_torch_is_found_without_importing_it(fresh_python):
    done = fresh_python(
        "import sys; from jitkern.cache_tools.prune import Installed; print(Installed.found().torch, 'torch' in sys.modules)\n"
        "import torch; print(torch.__version__.split('+')[0])"
    )
    first, second = done.stdout.splitlines()
    assert first == f"{second} False", done.stderr


@pytest.fixture
def limited(cache, put, cache_dir):
    """Settings under which a cache with an entry of long ago is full."""
    old = put(0, 10 * DAY)
    with config.using(cache_dir=cache.root, max_size=15000, max_age=0):
        after(cache, max_size=15000)
        yield old


@pytest.fixture
def another(tmp_path, variant, target):
    """Another cache, and the key of the one entry that it has."""
    other = Cache(tmp_path / "other")
    return other, published(other, variant, target, "-other", out_so=b"x" * 10000)[0]


def test_what_a_bundle_brings_counts_at_once(limited, another, tmp_path):
    other, key = another
    whole = cache_tools.chosen(other, cache_tools.EntryFilter())
    cache_tools.pack(other, whole, tmp_path / "b.tar")
    assert limited.exists()
    cache_tools.unpack(Cache.open(config.current()), tmp_path / "b.tar")
    assert not limited.exists()
    assert jit.open_cache().find(key)


def test_what_the_mega_cache_brings_counts_at_once(limited, another):
    other, key = another
    content = bundle.packed(other, [other.find(key)])
    factory = pytest.importorskip("torch.compiler._cache").CacheArtifactFactory
    factory.create(mega_cache.KIND, f"{key.target}/{key.name}", content).populate_cache()
    assert not limited.exists()
    assert jit.open_cache().find(key)
