"""Every kind of store keeps the contract that `jitkern.remote.store` states, and bundles travel through it.

`make conformance` runs this on all servers that are installed, and names those that are not.
"""

import time
from functools import partial

import pytest
from helpers import run_threads
from stocked import CPU, everything, names, stock

from jitkern.cache.store import Cache
from jitkern.remote import layout, publish, pull
from jitkern.remote.index import read_index
from jitkern.remote.opening import opened
from jitkern.remote.store import Store, TooLarge, Unchanged

NAME = "v1/cpu-x86_64-torch2.13.0-linux_x86_64/index.json"
LIMIT = 1 << 20


def test_what_is_not_there_is_none(store):
    assert isinstance(store, Store)
    assert store.get(NAME, limit=LIMIT) is None
    assert store.stat(NAME) is None
    assert list(store.list("v1/")) == []


def test_an_object_is_created_once_and_read_whole(store):
    assert store.create(NAME, b"one")
    assert not store.create(NAME, b"two")
    found = store.get(NAME, limit=LIMIT)
    assert found.data == b"one"
    with pytest.raises(Unchanged):
        store.get(NAME, limit=LIMIT, unless=found.tag)
    assert store.replace(NAME, b"three", found.tag)
    assert store.get(NAME, limit=LIMIT, unless=found.tag).data == b"three"


def test_only_the_version_that_was_read_is_replaced(store):
    store.create(NAME, b"one")
    old = store.get(NAME, limit=LIMIT).tag
    assert store.replace(NAME, b"two", old)
    assert not store.replace(NAME, b"three", old)
    new = store.get(NAME, limit=LIMIT)
    assert new.data == b"two"
    gone = f"{NAME}.gone"
    assert not store.replace(gone, b"four", new.tag)
    assert store.get(gone, limit=LIMIT) is None


def test_an_object_over_the_limit_is_too_large(store):
    store.create(NAME, bytes(1000))
    assert store.get(NAME, limit=1000).data == bytes(1000)
    with pytest.raises(TooLarge, match="1000 bytes"):
        store.get(NAME, limit=999)


def test_sizes_and_ages_are_told_by_listings_and_looks(store):
    before = time.time()
    for name in ("v1/a/one.tar", "v1/a/two.tar", "v1/ab/three.tar", "jitkern.json"):
        store.create(name, b"12345")
    listed = {found.name: found for found in store.list("v1/a/")}
    assert sorted(listed) == ["v1/a/one.tar", "v1/a/two.tar"]
    assert len(list(store.list("v1/"))) == 3
    assert len(list(store.list("v1/a"))) == 3
    assert len(list(store.list(""))) == 4
    for found in (listed["v1/a/one.tar"], store.stat("v1/a/one.tar")):
        assert found.bytes == 5
        assert before - 5 < found.modified < time.time() + 5


@pytest.mark.parametrize("verb", ["create", "replace"])
def test_one_of_eight_wins_a_race(store, verb):
    for attempt in range(5):
        name, won = f"v1/race/{attempt}", []
        if verb == "replace":
            store.create(name, b"old")
            tag = store.get(name, limit=LIMIT).tag
        write = store.create if verb == "create" else lambda name, data, tag=tag: store.replace(name, data, tag)  # fmt: skip

        def race(number, name=name, won=won, write=write):
            if write(name, b"%d" % number):
                won.append(b"%d" % number)

        run_threads(*(partial(race, i) for i in range(8)))
        assert [store.get(name, limit=LIMIT).data] == won


def test_what_is_pushed_is_pulled(store, full, empty, key, public):
    pushed = publish.push(full, everything(full), store, key=key)
    assert [p.machine for p in pushed] == [f"{CPU}-linux_x86_64"]
    assert sorted(b.package for b in pushed[0].bundles) == ["alpha", layout.RUNTIME_PACKAGE]
    done = pull.pull(empty, store, [pushed[0].machine], (public,))
    assert (done.new, done.present, done.failed) == (4, 0, ())
    assert names(empty) == names(full)
    again = pull.pull(empty, store, [pushed[0].machine], (public,))
    assert (again.new, again.present, again.bundles) == (0, 4, 0)


def test_a_second_push_of_the_same_sends_and_changes_nothing(store, full, key):
    publish.push(full, everything(full), store, key=key)
    before = {f.name: f for f in store.list("")}
    done = publish.push(full, everything(full), store, key=key)
    assert [(p.uploaded, p.dropped) for p in done] == [(0, ())]
    assert {f.name: f for f in store.list("")} == before


@pytest.mark.conformance
@pytest.mark.parametrize("url", ["moto", "azurite"], indirect=True)
def test_ls_names_a_bucket_that_is_missing(url, cli):
    url = url.replace("//kernels/", "//no-such-bucket/")
    assert opened(url).get(layout.ROOT, limit=LIMIT) is None
    code, _, err = cli("remote", "ls", url)
    assert code == 1 and "check the URL, the bucket" in err


@pytest.mark.long
def test_sixteen_pushes_at_once_lose_nothing(store, tmp_path):
    publish.push(
        stock(Cache(tmp_path / "0", fsync=False), "zero"),
        everything(Cache(tmp_path / "0")),
        store,
        unsigned=True,
    )
    caches = [stock(Cache(tmp_path / f"{i}", fsync=False), f"package{i}") for i in range(1, 17)]
    run_threads(*(partial(publish.push, c, everything(c), store, unsigned=True) for c in caches))
    machine = f"{CPU}-linux_x86_64"
    index = read_index(store, machine)[0]
    packages = [bundle.package for bundle in index.bundles]
    assert sorted(packages) == sorted(
        ["zero", layout.RUNTIME_PACKAGE, *(f"package{i}" for i in range(1, 17))]
    )
    for bundle in index.bundles:
        assert store.stat(layout.bundle_of(machine, bundle.file)).bytes == bundle.bytes
