"""A hostile store: what it sends is never loaded, costs one line in the log, and is then compiled."""

import hashlib
import json
import zlib

import pytest
import web_servers as servers
from web_servers import Server, always, one_entry, put, said, static, trusting

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
    with trusting(url):
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


@pytest.mark.parametrize(
    ("odd", "of_index", "why"),
    [
        (servers.endless, True, f"it has more than {layout.LARGEST_INDEX} bytes"),
        (servers.endless, False, "it has more than "),
        (always(said(304)), True, "304"),
        (always(said(304)), False, "304"),
    ],
)
def test_an_answer_without_an_end_or_that_nobody_asked_for(place, refused, odd, of_index, why):
    good = static(place[0])

    def answer(connection, request):
        is_odd = request.path.endswith("index.json") == of_index
        return (odd if is_odd else good)(connection, request)

    with Server(answer) as server:
        refused(server.url, why)


def test_a_body_that_is_announced_to_be_a_hundred_gigabytes(refused):
    with Server(always(said(200, Content_Length=10**11))) as server:
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
@pytest.mark.parametrize("by_another", [False, True], ids=["by nobody", "by another"])
def test_what_no_trusted_key_signed_is_refused_unread(
    tmp_path, place, files, refused, by_another, monkeypatch
):
    folder, machine, key = place
    public = signing.keygen(tmp_path / "key", "")
    if by_another:
        signing.keygen(tmp_path / "other", "")
        cache = Cache(tmp_path / "builder")
        signing.sign(cache, chosen(cache, EntryFilter()), tmp_path / "other")
        ((_, entry),) = cache.entries()
        data = one_entry({**files, "manifest.sig": entry.signatures()}, key.target, key.name)
        put(folder, machine, data, [key.digest[:16]])
    monkeypatch.setattr("jitkern.cache_tools.bundle.Manifest", None)  # would be an error
    why = "not signed by a trusted key"
    refused(f"file://{folder}", why, trusted_keys=[public], trusted_remotes=[])


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


def test_a_compressed_page_is_taken_as_it_is(place, refused):
    """No filter of the transport may unpack more than was counted."""
    data = zlib.compress(bytes(1 << 20))
    with Server(always(said(200, data, Content_Encoding="deflate"))) as server:
        refused(server.url, "index.json")


NO_FORMAT = "it is not in jitkern's format"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"bytes": 1 << 40}, f"it has {1 << 40} bytes"),
        ({"file": "../../../secret.tar"}, NO_FORMAT),
        ({"file": f"../{'0' * 64}.tar"}, NO_FORMAT),
        ({"file": f"{'0' * 64}.tar/.."}, NO_FORMAT),
        ({"file": "index.json"}, NO_FORMAT),
        ({"bytes": 10**4000}, NO_FORMAT),
        ({"package": "\x1b[2J"}, NO_FORMAT),
        ({"version": "\ud800"}, NO_FORMAT),
        ({"push": "\n"}, NO_FORMAT),
    ],
)
def test_an_index_that_names_what_no_bundle_can_be(place, refused, fields, why):
    folder, machine, key = place
    file = put(folder, machine, b"x", [key.digest[:16]])
    row = {"bytes": 1, "entries": [key.digest[:16]], "file": file, "package": "", "push": "", "version": "", **fields}  # fmt: skip
    index = json.dumps({"bundles": [row], "schema": 2}, sort_keys=True, separators=(",", ":"))
    (folder / "v1" / machine / "index.json").write_text(index)
    refused(f"file://{folder}", why)


def test_a_key_is_more_than_the_digits_in_a_name(place, cache_dir):
    """Two keys of one short name: the index may list one, and the cache tells them apart."""
    folder, _, key = place
    cache = Cache(cache_dir, fsync=False)
    url = f"file://{folder}"
    with trusting(url):
        twin = Key(key.inputs, key.digest[:16] + hashlib.sha256(b"x").hexdigest()[:48], key.label)
        assert "no such entry" in fetch.fetch(fetch.Miss(cache, twin, 1.0))
        assert cache.find(twin) is None
