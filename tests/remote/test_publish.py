"""Pushing: what is signed, which bundles there are, when an index names them, and what it names no longer."""

import contextlib
import os
import time

import pytest
from odd_stores import Failing, Hindered, Odd, Policed
from stocked import CPU, GPU, GPU_HOST, HOST, add, everything, names, stock

from jitkern.cache.store import Cache
from jitkern.cache_tools import signing
from jitkern.cache_tools.ustar import BundleError
from jitkern.errors import JitkernError
from jitkern.files.trust import Trust
from jitkern.remote import bundles, index, layout, patience, publish, pull
from jitkern.remote.index import Bundle, Index, read_index
from jitkern.remote.store import Unavailable

HERE = f"{CPU}-linux_x86_64"


def push(cache, store, **options):
    return publish.push(
        cache, everything(cache), store, **{"unsigned": not options.get("key"), **options}
    )


def index_of(store, machine=HERE):
    return read_index(store, machine)[0]


def packages(store, machine=HERE):
    return [bundle.package for bundle in index_of(store, machine).bundles]


@pytest.fixture(autouse=True)
def no_naps(monkeypatch):
    monkeypatch.setattr(patience.time, "sleep", lambda _: None)


def test_without_a_key_nothing_unsigned_is_pushed(full, directory):
    with pytest.raises(JitkernError, match=r"--key FILE.*--unsigned.*trusted_remotes"):
        push(full, directory, unsigned=False)
    assert list(directory.list("")) == []


@pytest.mark.long
def test_a_push_signs_what_the_key_has_not_signed(full, empty, directory, key, public):
    push(full, directory, key=key)
    assert all(
        signing.signers(entry.manifest.encode(), entry.signatures()) == [public]
        for entry in everything(full)
    )
    assert pull.pull(empty, directory, [HERE], (public,)).new == 4
    assert push(full, directory, unsigned=False)[0].uploaded == 0  # everything is signed by now


@pytest.mark.parametrize("size", [0, layout.LARGE_ENTRY + 1])
def test_an_entry_whose_name_does_not_fit_is_left_out(size, full, empty, directory, caplog):
    long = add(full, f"alpha::{'x' * 160}", size=size)
    push(full, directory)
    assert f"{long.path} is left out" in caplog.text
    assert pull.pull(empty, directory, [HERE], ()).new == 4
    with pytest.raises(BundleError, match="nothing to push"):
        publish.push(full, [long], directory, unsigned=True)


def test_an_unsigned_entry_of_a_read_only_layer_is_refused(full, tmp_path, directory, key):
    user = Cache(tmp_path / "user", (full.root,), fsync=False, rules=Trust(frozenset({full.root})))
    with pytest.raises(JitkernError, match="read-only layer"):
        push(user, directory, key=key)


def test_a_bundle_is_there_before_the_index_names_it(full, directory):
    watched = Odd(directory)
    push(full, watched)
    writes = [name for verb, name in watched.asked if verb in ("create", "replace")]
    assert writes[0] == layout.ROOT
    assert [name.endswith("index.json") for name in writes[1:]] == [False, False, True]


def test_each_machine_gets_the_bundles_of_its_packages(tmp_path, directory):
    cache = Cache(tmp_path / "c", fsync=False)
    for op, target in (
        ("alpha::a", GPU),
        ("alpha::a", GPU_HOST),
        ("beta::b", GPU),
        ("alpha::a", CPU),
        ("alpha::x", f"{CPU.replace('x86_64', 'x86_64_v4')}-linux_x86_64"),
    ):
        add(cache, op, target)
    add(cache, "jitkern::runtime", HOST)
    add(cache, "jitkern::softmax", GPU)
    push(cache, directory)
    assert packages(directory, GPU_HOST) == ["alpha", "beta", "jitkern"]
    assert packages(directory) == ["alpha", layout.RUNTIME_PACKAGE]
    assert [len(bundle.entries) for bundle in index_of(directory).bundles] == [2, 1]
    assert directory.get(layout.ROOT, limit=100).data == b'{"schema":1}'


def test_a_version_is_that_of_the_package_and_not_of_the_stubs(tmp_path, directory):
    cache = stock(Cache(tmp_path / "c", fsync=False), "alpha", version="1.9")
    add(cache, "alpha::op0", source="newer", version="1.10")
    push(cache, directory)
    assert {b.package: b.version for b in index_of(directory).bundles} == {
        "alpha": "1.10",
        layout.RUNTIME_PACKAGE: "0.1",
    }


def test_large_entries_have_bundles_of_their_own(full, empty, directory):
    large = [add(full, f"alpha::large{n}", size=layout.LARGE_ENTRY) for n in range(2)]
    (done,) = push(full, directory)
    alone = [bundle.entries for bundle in done.bundles if bundle.package == "alpha"]
    assert sorted(map(len, alone)) == [1, 1, 3]
    assert {(entry.manifest.digest[:16],) for entry in large} < {*alone}
    assert len({bundle.push for bundle in done.bundles if bundle.package == "alpha"}) == 1
    assert pull.pull(empty, directory, [HERE], ()).new == 6
    assert names(empty) == names(full)
    assert pull.pull(empty, directory, [HERE], ())[:4] == (0, 6, 0, 0)
    assert push(full, directory)[0].uploaded == 0


@pytest.mark.long
def test_a_large_package_is_split_and_counts_as_one_push(tmp_path, directory, monkeypatch):
    monkeypatch.setattr(layout, "FULL_BUNDLE", 40_000)
    for version in ("1", "2", "3", "4"):
        cache = Cache(tmp_path / version, fsync=False)
        for number in range(6):
            add(cache, f"alpha::op{number}", source=version, size=10_000)
        done = push(cache, directory, keep=3)
        assert len(done[0].bundles) == 3
    assert len(done[0].dropped) == 3
    kept = index_of(directory).bundles
    assert len(kept) == 9 and len({bundle.push for bundle in kept}) == 3
    assert sum(len(bundle.entries) for bundle in kept) == 18
    to = Cache(tmp_path / "to", fsync=False)
    assert pull.pull(to, directory, [HERE], ()).new == 18


def test_a_newer_bundle_replaces_one_that_it_contains(tmp_path, directory):
    cache = stock(Cache(tmp_path / "c", fsync=False), ops=1)
    first = push(cache, directory)[0].bundles[0]
    stock(cache, ops=3)
    done = push(cache, directory)[0]
    assert done.dropped == (first,)
    assert packages(directory) == ["alpha", layout.RUNTIME_PACKAGE]


def test_only_the_packages_of_a_push_are_trimmed(tmp_path, directory):
    for number in range(5):
        push(
            stock(Cache(tmp_path / f"a{number}", fsync=False), version=f"{number}"),
            directory,
            keep=9,
        )
    push(stock(Cache(tmp_path / "b", fsync=False), "beta"), directory, keep=1)
    assert packages(directory).count("alpha") == 5
    push(stock(Cache(tmp_path / "c", fsync=False), version="9"), directory, keep=2)
    assert packages(directory).count("alpha") == 2
    assert packages(directory).count("beta") == 1


def test_a_named_bundle_of_twelve_hours_is_written_again(full, directory):
    done = push(full, directory)[0]
    path = directory.root / layout.bundle_of(HERE, done.bundles[0].file)
    for hours, again in ((11, False), (13, True)):
        then = time.time() - hours * 3600
        os.utime(path, (then, then))
        assert bool(push(full, directory)[0].uploaded) is again
        assert (path.stat().st_mtime > then + 60) is again


def test_a_policy_against_replacing_bundles_stops_no_push(full, directory):
    done = push(full, directory)[0]
    for bundle in done.bundles:
        os.utime(directory.root / layout.bundle_of(HERE, bundle.file), (1, 1))
    assert push(full, Policed(directory))[0].uploaded == 0


def test_a_bundle_that_is_cut_off_is_written_again(full, directory):
    path = directory.root / layout.bundle_of(HERE, push(full, directory)[0].bundles[0].file)
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    assert push(full, directory)[0].uploaded == len(whole)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("data", [b"", b"{}", b'{"bundles":[],"schema":1}', b"<html>login</html>"])
def test_an_index_that_jitkern_did_not_write_is_not_overwritten(full, directory, data):
    directory.create(layout.index_of(HERE), data)
    with pytest.raises(JitkernError, match=r"cannot be used: .*newer jitkern.*delete this object"):
        push(full, directory)
    assert directory.get(layout.index_of(HERE), limit=1000).data == data


def test_an_index_that_no_reader_would_take_is_not_written(full, directory, monkeypatch):
    monkeypatch.setattr(layout, "LARGEST_INDEX", 200)
    with pytest.raises(JitkernError, match="smaller --keep"):
        push(full, directory)
    assert directory.stat(layout.index_of(HERE)) is None


@pytest.mark.long
def test_a_push_gives_up_where_others_are_always_faster(full, directory):
    push(stock(Cache(directory.root.parent / "b", fsync=False), "beta"), directory)
    push(full, Hindered(directory, index.ATTEMPTS - 1))
    assert "alpha" in packages(directory)
    stock(full, "gamma")
    with pytest.raises(JitkernError, match="20 times in a row"):
        push(full, Hindered(directory, index.ATTEMPTS))


def test_an_empty_choice_is_refused(empty, directory):
    with pytest.raises(JitkernError, match="nothing to push"):
        push(empty, directory)


def test_without_zstandard_bundles_are_plain(full, empty, directory, monkeypatch):
    monkeypatch.setattr(bundles, "has_zstd", lambda: False)
    push(full, directory)
    assert all(bundle.file.endswith(".tar") for bundle in index_of(directory).bundles)
    assert pull.pull(empty, directory, [HERE], ()).new == 4


@pytest.mark.parametrize("seed", range(10))
def test_failures_and_lost_answers_harm_no_push(full, empty, directory, seed):
    """A command asks four times, so that with one failure in five a push may still fail, and be tried again."""
    add(full, "alpha::large", size=layout.LARGE_ENTRY)
    failing = Failing(directory, seed=seed, share=0.2)
    for _ in range(20):
        with contextlib.suppress(Unavailable):
            push(full, failing)
            break
    assert pull.pull(empty, directory, [HERE], ()).new == 5


def test_a_store_that_ignores_conditions_takes_one_writer(tmp_path, full, stub, bucket):
    stub.honours = False
    push(full, bucket)
    push(stock(Cache(tmp_path / "b", fsync=False), "beta"), bucket)
    assert {*packages(bucket)} == {"alpha", "beta", layout.RUNTIME_PACKAGE}


def test_a_bundle_that_is_gone_is_left_out_and_pushed_again(full, empty, directory):
    gone, left = push(full, directory)[0].bundles
    name = layout.bundle_of(HERE, gone.file)
    (directory.root / name).unlink()  # as a rule of the bucket would
    done = pull.pull(empty, directory, [HERE], ())
    assert (done.new, done.failed, done.gone) == (len(left.entries), (), (name,))
    assert push(full, directory)[0].uploaded == gone.bytes
    done = pull.pull(empty, directory, [HERE], ())
    assert (done.new, done.gone) == (len(gone.entries), ())
    assert names(empty) == names(full)


def test_indexes_merge_and_trim():
    def bundle(number, package="a", push="", entries=()):
        return Bundle(
            f"{number:064}.tar",
            1,
            package,
            "1",
            tuple(f"{e:016}" for e in entries or (number,)),
            push,
        )

    one, two, three = (bundle(i, push=str(i)) for i in (1, 2, 3))
    index = Index((one,)).merged([two], 2).merged([three], 2)
    assert index.bundles == (three, two)
    assert index.merged([two], 2).bundles == (two, three)
    both = bundle(4, push="4", entries=(1, 2))
    assert Index((two, one)).merged([both], 9).bundles == (both,)
    assert Index((two, one)).merged([bundle(5, "b")], 1).bundles == (bundle(5, "b"), two, one)
    assert Index.decode(index.encode()) == index
