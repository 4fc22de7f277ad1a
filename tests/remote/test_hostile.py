"""A hostile store: what it sends is never loaded, costs one line in the log, and is then compiled."""

import hashlib
import json
import zlib

import pytest
import web_servers as servers
from web_servers import Server, one_entry, put, said, static

from jitkern import config, jit
from jitkern.cache.key import Key
from jitkern.cache.manifest import NAME, Artifact, Manifest
from jitkern.cache.store import Cache
from jitkern.cache_tools import signing
from jitkern.cache_tools.listing import EntryFilter, chosen
from jitkern.remote import fetch, layout


@pytest.fixture
def place(filled):
    """(folder of the remote, machine, key)."""
    folder, key = filled
    return folder, layout.machine_of(key.target), key


@pytest.fixture
def files(tmp_path, filled):
    """The files of the good entry."""
    ((_, entry),) = Cache(tmp_path / "builder").entries()
    return entry.files()


@pytest.fixture
def refused(compiler, variant, target, caplog, cache_dir):
    """Miss twice under these settings: compiled, told in one line that says this, nothing adopted."""

    def check(url, why, *, requests=None, server=None, **settings):
        settings.setdefault("trusted_remotes", url)
        with config.using(remote=url, **settings):
            entry = jit.ensure(variant, target)
            assert entry.read("out.so") == f"code of {variant.label}".encode()
            other = variant._replace(template=(("T", "f64"),))
            jit.ensure(other, target)
        assert len(compiler.compiles) == 2
        assert sorted(e.path.name for _, e in Cache(cache_dir).entries()) == sorted(
            jit.key_of(v, target).name for v in (variant, other)
        )
        (line,) = caplog.messages
        assert why in line, line

    return check


def manifest_of(files):
    return Manifest.decode(files[NAME])


def test_the_entry_of_another_key(place, files, refused):
    folder, machine, key = place
    inputs = {**manifest_of(files).inputs, "op": "test::other"}
    other = manifest_of(files)._replace(inputs=inputs)
    data = one_entry({**files, NAME: other.encode()}, key.target, key.name)
    put(folder, machine, data, [key.digest[:16]])
    refused(f"file://{folder}", "it belongs to another entry")


@pytest.mark.long
def test_a_flipped_bit_in_any_byte_of_a_bundle(tmp_path, place, files, cache_dir):
    """Whatever the index says of it: its content is checked against its name, and by the reader."""
    folder, machine, key = place
    good = one_entry(files, key.target, key.name)
    url = f"file://{folder}"
    with config.using(trusted_remotes=url, remote=url):
        remote = fetch.remote_of(url)
        cache = Cache(cache_dir, fsync=False)
        miss = fetch.Miss(cache, key, 1.0)
        step = 1 if len(good) < 4000 else 7
        for at in range(0, len(good), step):
            bad = bytearray(good)
            bad[at] ^= 1 << at % 8
            assert not remote.adopt(miss, f"flipped {at}", bytes(bad), ()), at
        assert not list(cache.paths())
        assert remote.adopt(miss, "good", good, ())


def test_a_bundle_whose_content_is_not_its_name(place, files, refused):
    folder, machine, key = place
    (bundle,) = (folder / "v1" / machine).glob("*.tar")
    data = bytearray(bundle.read_bytes())
    data[len(data) // 2] ^= 1
    bundle.write_bytes(data)
    refused(f"file://{folder}", "its content is not what its name says")


def test_a_bundle_that_is_cut_off(place, files, refused):
    folder, machine, key = place
    put(folder, machine, one_entry(files, key.target, key.name)[:-1500], [key.digest[:16]])
    refused(f"file://{folder}", "is cut off before")


@pytest.mark.parametrize("of_index", [True, False])
def test_a_body_without_an_end(place, refused, of_index):
    files = static(place[0])

    def endless(connection, request):
        odd = request.path.endswith("index.json") == of_index
        return (servers.endless if odd else files)(connection, request)

    limit = f"{layout.LARGEST_INDEX} bytes" if of_index else ""
    with Server(endless) as server:
        refused(server.url, f"it has more than {limit}")


def test_a_body_that_is_announced_to_be_a_hundred_gigabytes(refused):
    with Server(servers.always(said(200, Content_Length=10**11))) as server:
        refused(server.url, f"it has {10**11} bytes")


@pytest.mark.long
@pytest.mark.parametrize("content", [bytes(64 << 20), b"MZ" * (32 << 20)])
def test_a_bomb(place, files, refused, content):
    zstd = pytest.importorskip("backports.zstd")
    folder, machine, key = place
    manifest = manifest_of(files)._replace(artifacts={"out.so": Artifact.of(content)})
    data = one_entry({NAME: manifest.encode(), "out.so": content}, key.target, key.name)
    put(folder, machine, zstd.compress(data, 10), [key.digest[:16]], suffix=".tar.zst")
    refused(f"file://{folder}", "inflates to more than 200 times its size")


@pytest.mark.usefixtures("signing_package")
def test_an_unsigned_bundle(tmp_path, place, refused):
    public = signing.keygen(tmp_path / "key", "")
    refused(f"file://{place[0]}", "not signed", trusted_keys=[public], trusted_remotes=[])


@pytest.mark.usefixtures("signing_package")
def test_a_signature_of_other_bytes(tmp_path, place, files, refused):
    folder, machine, key = place
    cache = Cache(tmp_path / "builder")
    public = signing.keygen(tmp_path / "key", "")
    signing.sign(cache, chosen(cache, EntryFilter()), tmp_path / "key")
    ((_, entry),) = cache.entries()
    changed = manifest_of(files)._replace(artifacts={"out.so": Artifact.of(b"evil")})
    signed = {"manifest.sig": entry.signatures(), NAME: changed.encode(), "out.so": b"evil"}
    put(folder, machine, one_entry(signed, key.target, key.name), [key.digest[:16]])
    refused(f"file://{folder}", "is wrong", trusted_keys=[public], trusted_remotes=[])


def test_an_index_that_names_a_bundle_of_a_terabyte(place, refused):
    folder, machine, key = place
    put(folder, machine, b"x", [key.digest[:16]], bytes=1 << 40)
    refused(f"file://{folder}", f"it has {1 << 40} bytes")


@pytest.mark.parametrize(
    "file", ["../../../secret.tar", f"../{'0' * 64}.tar", f"{'0' * 64}.tar/..", "index.json"]
)
def test_an_index_that_names_other_places(tmp_path, place, refused, file):
    folder, machine, key = place
    put(folder, machine, b"x", [key.digest[:16]], file=file)
    refused(f"file://{folder}", "it is not in jitkern's format")


@pytest.mark.long
def test_an_index_of_a_million_entries(place, refused):
    folder, machine, key = place
    index = folder / "v1" / machine / "index.json"
    row = {"bytes": 1, "entries": [f"{n:016x}" for n in range(10**6)], "file": f"{'0' * 64}.tar",
           "package": "", "version": ""}  # fmt: skip
    index.write_text(json.dumps({"bundles": [row], "schema": 2}))
    refused(f"file://{folder}", f"over {layout.LARGEST_INDEX}")


@pytest.mark.parametrize(
    "data",
    [b"", b"<html>please log in</html>", b"[" * 100_000, b"null", b'{"schema":2}', b'{"bundles":[],"schema":3}',
     b'{"bundles":[null],"schema":2}', b"\xff\xfe", b'{"bundles":[],"schema":2,"x":NaN}'],
)  # fmt: skip
def test_an_index_that_is_none(place, refused, data):
    folder, machine, _ = place
    (folder / "v1" / machine / "index.json").write_bytes(data)
    refused(f"file://{folder}", "index.json")


@pytest.mark.parametrize(
    "fields", [{"bytes": 10**4000}, {"package": "\x1b[2J"}, {"version": "\ud800"}, {"push": "\n"}]
)
def test_an_index_that_no_terminal_can_print(place, refused, fields):
    folder, machine, key = place
    row = {"bytes": 1, "entries": [key.digest[:16]], "file": f"{'0' * 64}.tar", "package": "",
           "push": "", "version": "", **fields}  # fmt: skip
    index = json.dumps({"bundles": [row], "schema": 2}, sort_keys=True, separators=(",", ":"))
    (folder / "v1" / machine / "index.json").write_text(index)
    refused(f"file://{folder}", "it is not in jitkern's format")


@pytest.mark.parametrize("of_index", [True, False])
def test_what_is_unchanged_though_nobody_asked(place, refused, of_index):
    folder, _, _ = place
    files = static(folder)

    def answer(connection, request):
        odd = request.path.endswith("index.json") == of_index
        return said(304) if odd else files(connection, request)

    with Server(answer) as server:
        refused(server.url, "304")


def test_a_compressed_page_is_taken_as_it_is(place, refused):
    """No filter of the transport may unpack more than was counted."""
    data = zlib.compress(bytes(1 << 20))
    with Server(servers.always(said(200, data, Content_Encoding="deflate"))) as server:
        refused(server.url, "index.json")


def test_a_key_is_more_than_the_digits_in_a_name(place, cache_dir):
    """Two keys of one short name: the index may list one, and the cache tells them apart."""
    folder, _, key = place
    cache = Cache(cache_dir, fsync=False)
    url = f"file://{folder}"
    with config.using(remote=url, trusted_remotes=url):
        twin = Key(key.inputs, key.digest[:16] + hashlib.sha256(b"x").hexdigest()[:48], key.label)
        assert "no such entry" in fetch.fetch(fetch.Miss(cache, twin, 1.0))
        assert cache.find(twin) is None
