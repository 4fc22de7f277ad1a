"""GET: the cache of the service looks like a bucket that somebody pushed to."""

import hashlib
import io
import os
import shutil
import threading
import types

import pytest
from clients import HERE, MACHINE, VEC_ADD, Client, at_once, figures, line, tensor
from helpers import LONGEST

import jitkern.ops
from jitkern import cache_tools, jit
from jitkern.cache.store import Cache
from jitkern.cache_tools import bundle as bundles
from jitkern.cache_tools.signing import keygen
from jitkern.files import signature
from jitkern.remote.index import Index
from jitkern.service import catalog

INDEX = f"/v1/{MACHINE}/index.json"


@pytest.fixture(autouse=True)
def no_rest(monkeypatch):
    """An index is compared with the cache each time."""
    monkeypatch.setattr(catalog, "REST", 0.0)
    monkeypatch.setattr(catalog, "COSTS", 0)


def read(body, **options):
    compressed = body[:4] == b"\x28\xb5\x2f\xfd"
    return [*bundles.read(io.BytesIO(body), compressed=compressed, **options)]


def indexed(client):
    return Index.decode(client.get(INDEX).body)


@pytest.mark.long
def test_an_index_names_bundles_that_hold_what_it_lists(client):
    assert indexed(client) == Index()
    client.build(VEC_ADD)
    index = indexed(client)
    assert [b.package for b in index.bundles] == ["jitkern", "jitkern-runtime"]
    there = []
    for bundle in index.bundles:
        answer = client.get(f"/v1/{MACHINE}/{bundle.file}")
        assert (answer.status, len(answer.body)) == (200, bundle.bytes)
        assert hashlib.sha256(answer.body).hexdigest() == bundle.file.partition(".")[0]
        assert "immutable" in answer.headers["Cache-Control"]
        found = [packed.name[-16:] for packed in read(answer.body)]
        assert sorted(found) == [*bundle.entries]
        there += found
    built = read(client.build(VEC_ADD).body)
    assert sorted(there) == sorted(packed.name[-16:] for packed in built)


@pytest.mark.long
def test_an_index_is_renewed_and_what_it_named_before_stays(client):
    client.build(VEC_ADD)
    before = client.get(INDEX)
    tag = before.headers["ETag"]
    again = client.get(INDEX, If_None_Match=tag)
    assert (again.status, again.body, again.headers["ETag"]) == (304, b"", tag)
    client.build(line("jitkern::vec_add", tensor(8, dtype="float64"), tensor(8, dtype="float64")))
    after = client.get(INDEX, If_None_Match=tag)
    assert after.status == 200
    kept = {digest for bundle in Index.decode(before.body).bundles for digest in bundle.entries}
    new = {digest for bundle in Index.decode(after.body).bundles for digest in bundle.entries}
    assert kept < new
    for bundle in Index.decode(before.body).bundles:
        assert client.get(f"/v1/{MACHINE}/{bundle.file}").status == 200


@pytest.mark.long
def test_an_index_names_what_exists_whatever_is_evicted(client, cache_dir):
    client.build(VEC_ADD)
    index = indexed(client)
    for path in (cache_dir / "v1" / MACHINE).iterdir():
        shutil.rmtree(path)
    for bundle in index.bundles:
        assert client.get(f"/v1/{MACHINE}/{bundle.file}").status == 200
    assert indexed(client) == Index()


@pytest.mark.long
def test_an_index_is_not_made_anew_at_each_request(client, monkeypatch):
    monkeypatch.setattr(catalog, "REST", 3600.0)
    client.build(VEC_ADD)
    first = indexed(client)
    client.build(line("jitkern::vec_add", tensor(8, dtype="float64"), tensor(8, dtype="float64")))
    assert indexed(client) == first


@pytest.mark.long
def test_a_bundle_is_found_by_its_name(client):
    client.build(VEC_ADD)
    path = f"/v1/{MACHINE}/{indexed(client).bundles[0].file}"
    answer = client.get(path)
    assert "immutable" in answer.headers["Cache-Control"]
    head = client.ask("HEAD", path)
    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Length"] == str(len(answer.body))
    assert client.get(path, If_None_Match=answer.headers["ETag"]).status == 304
    missing = client.get(f"/v1/{MACHINE}/{'0' * 64}.tar")
    assert (missing.status, missing.headers["Cache-Control"]) == (404, "no-store")
    found = figures(client.get("/metrics").body)
    assert found["jitkern_serve_hits_total"] == 4  # the index, too
    assert found["jitkern_serve_misses_total"] == 1


@pytest.mark.long
def test_only_entries_of_the_served_ops_are_handed_out(serve):
    jitkern.prewarm([jitkern.ops.softmax, jitkern.ops.vec_add], [HERE])
    rows = cache_tools.rows(jit.open_cache())
    client = Client(serve().url)
    listed = {digest for bundle in indexed(client).bundles for digest in bundle.entries}
    for row in rows:
        wanted = row.op != "jitkern::softmax" and row.kind != "object"
        assert (row.path[-16:] in listed) == wanted


@pytest.mark.long
def test_a_damaged_entry_is_left_out(client, cache_dir):
    client.build(VEC_ADD)
    (path,) = (cache_dir / "v1" / MACHINE).glob("vec_add.f32-*/*.so")
    path.write_bytes(path.read_bytes()[::-1])
    index = indexed(client)
    assert [len(bundle.entries) for bundle in index.bundles] == [1, 1]
    assert path.parent.name[-16:] not in {d for bundle in index.bundles for d in bundle.entries}


@pytest.mark.long
@pytest.mark.usefixtures("signing_package")
def test_all_that_is_handed_out_is_signed(serve, tmp_path):
    jitkern.prewarm([jitkern.ops.vec_add], [HERE])
    public = signature.public_key(keygen(tmp_path / "key"))
    client = Client(serve(key=tmp_path / "key").url)
    x = tensor(2, 2, dtype="int8")
    built = client.build(line("jitkern::vec_add", x, x))
    assert read(built.body, keys=(public,))
    index = indexed(client)
    assert index.bundles
    for bundle in index.bundles:
        assert read(client.get(f"/v1/{MACHINE}/{bundle.file}").body, keys=(public,))


NO_NAMES = [
    "/v1", "/v1/", "/v1/index.json", "/v1/../jitkern.json", "/jitkern.json/", "/jitkern.json?x=1", "/JITKERN.json",
    "/v1/nonsense/index.json", "/v1/../index.json", "/v1/%2e%2e/index.json", "/v1/..%2f..%2fetc/index.json",
    "/v1/%00/index.json", f"/v1/{MACHINE}/../{MACHINE}/index.json", f"/v1/{HERE}/index.json",
    f"/v1/{MACHINE}/index.json/", f"/v1/{MACHINE}/{'0' * 64}.tar", f"/v1/{MACHINE}/{'0' * 64}.tar.zst",
    f"/v1/{MACHINE}/{'0' * 63}.tar", "/v1/build/x", "/etc/passwd", f"/v1/{MACHINE}-cxx11_glibc2.36/index.json",
    "/v1/cpu-x86_64_v4-torch2.13.0-linux_x86_64/index.json", f"/{'a' * 60_000}",
]  # fmt: skip


def test_no_other_names_are_there(client):
    for path in NO_NAMES:
        answer = client.get(path)
        assert (answer.status, answer.headers["Cache-Control"]) == (404, "no-store")
        assert answer.json["reason"], path


def test_a_machine_that_has_no_entries_leaves_nothing_behind(serve):
    server = serve()
    client = Client(server.url)
    for version in range(50):
        answer = client.get(f"/v1/cpu-x86_64-torch9.{version}.0-linux_x86_64/index.json")
        assert Index.decode(answer.body) == Index()
    assert not server.catalog.known


def test_the_root_tells_a_remote_from_other_places(client):
    assert client.get("/jitkern.json").json == {"schema": 1}


@pytest.mark.long
def test_an_index_is_whole_while_entries_come(serve):
    server = serve(jobs=2)
    done = threading.Event()
    url = server.url

    def build(number):
        client = Client(url)
        for n in range(3):
            dtype = ("int8", "int16", "int32", "int64")[number]
            size = [2] * (n + 1)
            call = line("jitkern::vec_add", tensor(*size, dtype=dtype), tensor(*size, dtype=dtype))
            assert client.build(call).status == 200
        return 0

    def follow():
        client = Client(url)
        while not done.is_set():
            for bundle in indexed(client).bundles:
                answer = client.get(f"/v1/{MACHINE}/{bundle.file}")
                if answer.status != 200 or len(answer.body) != bundle.bytes:
                    return bundle
        return None

    found = []
    follower = threading.Thread(target=lambda: found.append(follow()))
    follower.start()
    try:
        assert at_once(4, build) == [0] * 4
    finally:
        done.set()
        follower.join(LONGEST)
    assert found == [None]
    assert sum(len(bundle.entries) for bundle in indexed(Client(url)).bundles) > 12


def test_files_that_no_index_names_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "MOST_BYTES", 100)
    files = catalog.Catalog(Cache(tmp_path / "cache"), (), tmp_path, None)
    files.known["a machine"] = types.SimpleNamespace(named={"1.tar"})

    def there():
        return sorted(path.name for path in tmp_path.glob("*.tar"))

    def add(number, size):
        (tmp_path / f"{number}.tar").write_bytes(bytes(size))
        os.utime(tmp_path / f"{number}.tar", (number, number))

    for number in range(8):
        add(number, 40)
        files.sweep()
    assert there() == ["1.tar", "6.tar", "7.tar"]
    with files.opened("6.tar") as kept:  # so it is no longer the one that goes first
        add(8, 40)
        files.sweep()
        assert there() == ["1.tar", "6.tar", "8.tar"]
        add(9, 9000)
        os.utime(tmp_path / "9.tar")
        files.sweep()
        assert kept.read() == bytes(40)  # who reads a file reads it to its end
    assert there() == ["1.tar", "9.tar"]
    add(10, 90)
    files.known.clear()
    files.sweep()
    assert there() == ["9.tar"] and files.opened("1.tar") is None
