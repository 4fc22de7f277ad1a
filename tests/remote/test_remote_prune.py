"""Pruning a store: what an index names stays, what is young stays, and a push in between loses nothing."""

from __future__ import annotations

import os
import threading
import time

import pytest
from helpers import LONGEST
from odd_stores import Odd
from stocked import CPU, add, everything, stock

from jitkern.cache.store import Cache
from jitkern.cache_tools import signing
from jitkern.remote import layout, prune, publish
from jitkern.remote.index import read_index

HERE = f"{CPU}-linux_x86_64"
DAY = 24 * 3600


def push(cache, store, **options):
    return publish.push(
        cache, everything(cache), store, **{"unsigned": not options.get("key"), **options}
    )


def pruned(store, **options):
    return prune.prune(store, **{"keep": 3, **options})


def age(directory, hours, names=("",)):
    """Let objects whose names hold one of these texts be as old as this."""
    then = time.time() - hours * 3600
    for found in list(directory.list("v1/")):
        if any(name in found.name for name in names):
            os.utime(directory.root / found.name, (then, then))


def files(directory):
    return sorted(
        found.name.rpartition("/")[2] for found in directory.list("v1/") if ".tar" in found.name
    )


def named(store, machine=HERE):
    return sorted(bundle.file for bundle in read_index(store, machine)[0].bundles)


@pytest.fixture
def pushes(tmp_path, directory):
    """Five pushes of one package, of which the index names all."""
    caches = [stock(Cache(tmp_path / f"c{i}", fsync=False), version=f"{i}") for i in range(5)]
    for cache in caches:
        push(cache, directory, keep=9)
    return caches


def test_an_index_keeps_the_newest_and_deletes_a_day_later(pushes, directory):
    assert len(files(directory)) == 6
    done = pruned(directory, keep=2)
    assert len(done.dropped) == 3 and done.deleted == ()
    assert len(named(directory)) == 3 and len(files(directory)) == 6
    age(directory, 23)
    assert pruned(directory).deleted == ()
    age(directory, 25)
    done = pruned(directory)
    assert len(done.deleted) == 3 and done.dropped == ()
    assert files(directory) == named(directory)


def test_what_is_named_stays_however_old_it_is(pushes, directory):
    before = named(directory)
    age(directory, 10_000)
    assert pruned(directory, keep=9) == ((), ())
    assert named(directory) == files(directory) == before


@pytest.mark.long
def test_a_dry_run_tells_the_same_and_changes_nothing(pushes, directory):
    push(pushes[0], directory, keep=9)
    age(directory, 25)
    before = {found.name: found for found in directory.list("")}
    plan = pruned(directory, keep=1, dry_run=True)
    assert {found.name: found for found in directory.list("")} == before
    done = pruned(directory, keep=1)
    assert (done.dropped, [f.name for f in done.deleted]) == (
        plan.dropped,
        [f.name for f in plan.deleted],
    )
    assert len(done.dropped) == len(done.deleted) == 4


def test_the_clock_is_that_of_the_store(pushes, directory):
    """A store whose clock is a year behind has no objects of tomorrow, nor very old ones."""

    class Behind(Odd):
        def _strike(self, verb, name, call):
            answer = call()
            year = 365 * DAY
            if verb == "stat" and answer:
                return answer._replace(modified=answer.modified - year)
            return (
                [found._replace(modified=found.modified - year) for found in answer]
                if verb == "list"
                else answer
            )

    assert pruned(Behind(directory), keep=1).deleted == ()
    age(directory, 25)
    assert len(pruned(Behind(directory), keep=1).deleted) == 4


def test_what_is_not_ours_stays_and_old_probes_go(pushes, directory):
    names = [
        "v1/notes.txt",
        f"v1/{HERE}/notes.tar",
        f"{layout.PROBES}/left",
        "elsewhere/" + "0" * 64 + ".tar",
    ]
    for name in names:
        directory.create(name, b"x")
        os.utime(directory.root / name, (1, 1))
    assert [found.name for found in pruned(directory, keep=9).deleted] == [f"{layout.PROBES}/left"]
    assert sorted(f.name for f in directory.list("") if f.name in names) == sorted(
        {*names} - {f"{layout.PROBES}/left"}
    )


@pytest.mark.long
def test_an_index_forgets_what_is_missing(pushes, directory):
    gone, *left = named(directory)
    (directory.root / layout.bundle_of(HERE, gone)).unlink()
    assert pruned(directory, keep=9).dropped == (layout.bundle_of(HERE, gone),)
    assert named(directory) == left


def test_what_a_revoked_key_signed_goes(tmp_path, directory, key, public):
    good = stock(Cache(tmp_path / "good", fsync=False), "beta")
    add(good, "beta::large", size=layout.LARGE_ENTRY)
    signing.keygen(tmp_path / "other")
    push(good, directory, key=tmp_path / "other")
    bad = stock(Cache(tmp_path / "bad", fsync=False))
    add(bad, "alpha::large", size=layout.LARGE_ENTRY)
    push(bad, directory, key=key)
    done = pruned(directory, signer=public)
    assert len(done.dropped) == 3  # the package, its large entry, and the runtime that came with it
    assert [b.package for b in read_index(directory, HERE)[0].bundles] == ["beta", "beta"]


@pytest.mark.long
def test_what_a_push_has_just_written_again_is_not_deleted(pushes, directory):
    """The push comes after the listing, and before the deletion."""
    pruned(directory, keep=1)
    age(directory, 25)

    class Between(Odd):
        pushed = False

        def _strike(self, verb, name, call):
            if verb == "stat" and ".tar" in name and not self.pushed:
                self.pushed = True
                push(pushes[0], self.store)
            return call()

    done = pruned(Between(directory), keep=1)
    assert len(done.deleted) == 3
    assert {*named(directory)} <= {*files(directory)}


def test_a_push_whose_bundle_is_deleted_under_it_writes_it_again(pushes, directory):
    """The deletion comes at the worst time: after the push has looked, and before its index is written."""
    pruned(directory, keep=1)

    class Deleting(Odd):
        left = 2

        def _strike(self, verb, name, call):
            answer = call()
            if verb == "replace" and name.endswith("index.json") and self.left:
                self.left -= 1
                for bundle in read_index(self.store, HERE)[0].bundles[:2]:  # of this push
                    self.store.delete(layout.bundle_of(HERE, bundle.file))
            return answer

    done = push(pushes[0], Deleting(directory))
    assert {bundle.file for bundle in done[0].bundles} <= {*named(directory)} <= {*files(directory)}


@pytest.mark.long
def test_a_deletion_after_a_pushs_last_look_leaves_no_name(pushes, directory):
    """A prune that stops between its look and its deletion, while a whole push passes."""
    pruned(directory, keep=1)
    age(directory, 25)

    class Late(Odd):
        pushed = False

        def _strike(self, verb, name, call):
            if verb == "delete" and ".tar" in name and not self.pushed:
                self.pushed = True
                push(pushes[0], self.store)
            return call()

    pruned(Late(directory), keep=3)
    assert {*named(directory)} <= {*files(directory)}


def race(store, tmp_path, rounds, make_old):
    """Push and prune at once, again and again, while somebody reads; return what the reader found missing."""
    caches = [stock(Cache(tmp_path / name, fsync=False), version=name) for name in ("one", "two")]
    chosen = [everything(cache) for cache in caches]
    done, missing = threading.Event(), []

    def read():
        while not done.wait(0.001):
            index, tag = read_index(store, HERE)
            for bundle in index.bundles if index else ():
                name, end = layout.bundle_of(HERE, bundle.file), time.monotonic() + LONGEST
                while store.stat(name) is None and read_index(store, HERE)[1] == tag:
                    if time.monotonic() > end:
                        missing.append(name)
                        return

    publish.push(caches[0], chosen[0], store, unsigned=True, keep=1)
    reader = threading.Thread(target=read)
    reader.start()
    errors = []
    try:
        for number in range(rounds):
            publish.push(
                caches[1 - number % 2], chosen[1 - number % 2], store, unsigned=True, keep=1
            )
            make_old()
            barrier = threading.Barrier(2)

            def at_once(what, barrier=barrier):
                barrier.wait(LONGEST)
                try:
                    what()
                except Exception as e:
                    errors.append(e)

            pusher = threading.Thread(
                target=at_once,
                args=(
                    lambda n=number % 2: publish.push(
                        caches[n], chosen[n], store, unsigned=True, keep=1
                    ),
                ),
            )
            pusher.start()
            at_once(lambda: prune.prune(store, keep=1))
            pusher.join()
            assert errors == []
            for bundle in read_index(store, HERE)[0].bundles:
                assert store.stat(layout.bundle_of(HERE, bundle.file)), number
    finally:
        done.set()
        reader.join()
    return missing


@pytest.mark.long
def test_push_against_prune_leaves_no_index_with_missing_names(directory, tmp_path):
    deleted = []
    real = type(directory).delete

    class Counting(type(directory)):
        def delete(self, name):
            deleted.append(name)
            real(self, name)

    store = Counting(directory.url)
    assert race(store, tmp_path, 100, lambda: age(directory, 25, [".tar"])) == []
    assert any(layout.is_bundle(name.rpartition("/")[2]) for name in deleted)  # the race took place


@pytest.mark.conformance
@pytest.mark.parametrize("url", ["moto", "azurite"], indirect=True)
def test_rounds_of_push_against_prune_in_a_bucket(store, tmp_path, monkeypatch):
    """No object there can be made old: so every age will do for prune, and a push keeps to seconds."""
    monkeypatch.setattr(prune, "AGE", -60)
    monkeypatch.setattr(publish, "FRESH", 2)
    assert race(store, tmp_path, 20, lambda: None) == []
