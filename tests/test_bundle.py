"""Bundles: what `pack` writes is taken in whole, and nothing else is."""

import hashlib
import io
import itertools
import json
import os
import random
import re
import shutil
import sys
import tarfile

import pytest

from jitkern import config
from jitkern.cache.manifest import NAME, Artifact, Manifest
from jitkern.cache.store import Cache
from jitkern.cache_tools import bundle, chosen, signing, ustar
from jitkern.cache_tools.bundle import BLOCK, BundleError
from jitkern.cache_tools.listing import Wanted
from jitkern.errors import CacheError, JitkernError
from jitkern.source.closure import closure_of
from jitkern.source.variant_key import make_key

pytest.importorskip("cryptography")
zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")

END = bytes(2 * BLOCK)
SUFFIXES = (".tar", ".tar.zst")


@pytest.fixture
def publish(variant, target):
    """Publish an entry of its own for each number, with these artifacts."""

    def publish(cache, number, **files):
        key = make_key(variant, target, (f"-D{number}",), closure_of(variant.source))
        with cache.staging() as staging:
            (staging / "compile.log").write_text(str(staging))
            for name, data in (files or {"out_so": b"code %d" % number, "a_json": b"{}"}).items():
                (staging / name.replace("_", ".")).write_bytes(data)
            return cache.publish(key, staging, Manifest(key.inputs))

    return publish


@pytest.fixture
def cache(tmp_path, publish):
    """Three entries, of which one has an artifact that is no multiple of a block long."""
    cache = Cache(tmp_path / "from", fsync=False)
    publish(cache, 1)
    publish(cache, 2, out_so=bytes(range(256)) * 5, meta_json=b"")
    publish(cache, 3, out_cubin=b"x" * BLOCK, b_json=b"[]")
    return cache


@pytest.fixture
def key(tmp_path):
    signing.keygen(tmp_path / "key")
    return tmp_path / "key"


@pytest.fixture
def public(key):
    return (key.parent / "key.pub").read_text().split()[1]


@pytest.fixture
def signed(cache, key):
    signing.sign(cache, chosen(cache, Wanted()), key)
    return cache


@pytest.fixture
def other(tmp_path):
    return Cache(tmp_path / "deep" / "to", fsync=False)


@pytest.fixture
def refused(tmp_path, other):
    """A function that sees to it that nothing at all comes of an archive."""

    def refused(data, says=None, suffix=".tar", keys=()):
        path = tmp_path / f"bad{suffix}"
        path.write_bytes(data)
        before = listing(tmp_path)
        with pytest.raises(BundleError, match=says):
            bundle.unpack(other, path, keys=keys)
        assert listing(tmp_path) == before

    return refused


def packed(cache, tmp_path, suffix=".tar"):
    path = tmp_path / f"packed{suffix}"
    bundle.pack(cache, chosen(cache, Wanted()), path)
    data = path.read_bytes()
    path.unlink()
    return data


def listing(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def shipped(cache):
    """The files of every entry but the logs."""
    return {
        str(file.relative_to(cache.root)): file.read_bytes()
        for path in cache.paths()
        for file in path.iterdir()
        if file.name != "compile.log"
    }


def members(data):
    """[name, header, padded content] of each member, without the end."""
    found, at = [], 0
    while any(data[at : at + BLOCK]):
        info = tarfile.TarInfo.frombuf(data[at : at + BLOCK], "ascii", "strict")
        end = at + BLOCK + -(-info.size // BLOCK) * BLOCK
        found.append([info.name, data[at : at + BLOCK], data[at + BLOCK : end]])
        at = end
    return found


def joined(found):
    return b"".join(header + content for _, header, content in found) + END


def member(name, data, **fields):
    """One as tarfile makes it."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    made = fields.pop("format", tarfile.USTAR_FORMAT)
    for field, value in fields.items():
        setattr(info, field, value)
    header = info.tobuf(made)
    return [name, header, data + bytes(-len(data) % BLOCK)]


def archive(entries):
    """A bundle of {(target, folder): {file: bytes}}, whatever is wrong with them."""
    index = sorted([*p, hashlib.sha256(f.get(NAME, b"")).hexdigest()] for p, f in entries.items())
    return [
        member("bundle.json", bundle._index_bytes(index)),
        *(
            member(f"{target}/{folder}/{file}", data)
            for target, folder, _ in index
            for file, data in entries[target, folder].items()
        ),
    ]


def fixed(header):
    """A header with its checksum put right."""
    header = header[:148] + b" " * 8 + header[156:]
    return header[:148] + b"%06o\0 " % sum(header) + header[156:]


# --- what is packed comes out again


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_round_trip_keeps_every_byte(signed, other, tmp_path, suffix):
    path = tmp_path / f"b{suffix}"
    assert bundle.pack(signed, chosen(signed, Wanted()), path) == 3
    done = bundle.unpack(other, path)
    assert (done.new, done.present) == (3, 0)
    assert done.bytes == sum(row.bytes for row, _ in chosen(other, Wanted())) - sum(
        len(data) for name, data in shipped(other).items() if "manifest" in name
    )
    assert shipped(other) == shipped(signed)
    assert sum(name.endswith("manifest.sig") for name in shipped(other)) == 3
    assert not list(other.root.rglob("compile.log"))


def test_what_is_there_already_is_not_written_again(cache, other, tmp_path, publish):
    path = tmp_path / "b.tar"
    bundle.pack(cache, chosen(cache, Wanted()), path)
    publish(other, 1)
    assert bundle.unpack(other, path)[:2] == (2, 1)
    before = [(p, p.stat().st_ino) for p in sorted(other.root.rglob("v1/cpu*/*"))]
    assert bundle.unpack(other, path) == (0, 3, 0)
    assert [(p, p.stat().st_ino) for p in sorted(other.root.rglob("v1/cpu*/*"))] == before


def test_a_damaged_entry_is_healed(cache, other, tmp_path):
    path = tmp_path / "b.tar"
    bundle.pack(cache, chosen(cache, Wanted()), path)
    bundle.unpack(other, path)
    next(other.root.rglob("out.cubin")).write_bytes(b"damage")
    assert bundle.unpack(other, path)[:2] == (1, 2)
    assert shipped(other) == shipped(cache)


def test_a_dry_run_only_counts(cache, other, tmp_path):
    path = tmp_path / "b.tar"
    bundle.pack(cache, chosen(cache, Wanted()), path)
    assert bundle.unpack(other, path, dry_run=True)[:2] == (3, 0)
    assert not other.root.exists()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_equal_entries_give_equal_bytes(signed, other, tmp_path, suffix):
    first = packed(signed, tmp_path, suffix)
    assert packed(signed, tmp_path, suffix) == first
    (tmp_path / f"b{suffix}").write_bytes(first)
    bundle.unpack(other, tmp_path / f"b{suffix}")
    assert packed(other, tmp_path, suffix) == first


def test_the_order_is_index_then_signature_manifest_artifacts(signed, tmp_path):
    found = members(packed(signed, tmp_path))
    names = [name for name, _, _ in found]
    index = json.loads(found[0][2].rstrip(b"\0"))
    assert (names[0], index["schema"]) == ("bundle.json", 1)
    assert [tuple(name.split("/")[:2]) for name, _ in itertools.groupby(n.rpartition("/")[0] for n in names[1:])] == [
        (target, name) for target, name, _ in index["entries"]
    ] == sorted((p.parent.name, p.name) for p in signed.paths())  # fmt: skip
    assert [name.rpartition("/")[2] for name in names].count("compile.log") == 0
    for _, group in itertools.groupby(names[1:], lambda name: name.rpartition("/")[0]):
        files = [name.rpartition("/")[2] for name in group]
        assert files[:2] == ["manifest.sig", NAME]
        assert files[2:] == sorted(files[2:])


def test_headers_are_plain_ustar_that_every_tar_reads(cache, tmp_path):
    data = packed(cache, tmp_path)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for info in archive:
            assert (info.mode, info.mtime, info.uid, info.gid) == (0o644, 0, 0, 0)
            assert (info.uname, info.gname, info.type) == ("", "", tarfile.REGTYPE)
        assert len(archive.getnames()) == len(members(data)) == 10
    assert data.endswith(END)
    assert all(header[257:265] == b"ustar\x0000" for _, header, _ in members(data))


def test_long_names_are_split_between_prefix_and_name(tmp_path):
    name = "cuda-" + "x" * 60 + "/" + "y" * 89 + "/" + "z" * 90
    info = tarfile.TarInfo.frombuf(ustar.header_of(name, 5), "ascii", "strict")
    assert (info.name, info.size) == (name, 5)


@pytest.mark.parametrize("name", ["a/b/" + "z" * 101, "a/" + "y" * 155 + "/" + "z" * 100, "ü/b/c"])
def test_a_name_that_does_not_fit_is_a_clear_error(name):
    with pytest.raises(BundleError, match="does not fit a USTAR archive"):
        ustar.header_of(name, 5)


def test_a_failed_pack_leaves_nothing(cache, tmp_path):
    next(cache.root.rglob("out.cubin")).rename(tmp_path / "gone")
    whole = chosen(cache, Wanted())
    (tmp_path / "gone").rename(tmp_path / "there")
    assert len(whole) == 2
    next(cache.root.rglob("out.so")).write_bytes(b"damage")
    before = listing(tmp_path)
    with pytest.raises(BundleError, match="cannot be shipped: out.so"):
        bundle.pack(cache, whole, tmp_path / "b.tar")
    assert listing(tmp_path) == before


def test_an_entry_whose_manifest_was_changed_is_not_packed(cache, tmp_path):
    whole = chosen(cache, Wanted())
    path = whole[-1][1].path / NAME
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(BundleError, match="manifest was changed"):
        bundle.pack(cache, whole, tmp_path / "b.tar")


def test_a_signature_that_is_a_link_is_not_followed(cache, tmp_path):
    whole = chosen(cache, Wanted())
    (tmp_path / "secret").write_text("secret")
    (whole[0][1].path / "manifest.sig").symlink_to(tmp_path / "secret")
    with pytest.raises(BundleError, match="cannot be shipped"):
        bundle.pack(cache, whole, tmp_path / "b.tar")


def test_what_could_not_be_unpacked_is_not_packed(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "MAX_FILE", 600)
    with pytest.raises(BundleError, match="do not fit into a bundle: .*out.so` has 1280 bytes"):
        packed(cache, tmp_path)
    assert not list(tmp_path.glob("*.tar"))


@pytest.mark.parametrize("name", ["b.zip", "b", "tar", "b.tar.gz", "b.zst"])
def test_other_suffixes_are_refused(cache, other, tmp_path, name):
    with pytest.raises(BundleError, match=r"expected NAME.tar or NAME.tar.zst"):
        bundle.pack(cache, chosen(cache, Wanted()), tmp_path / name)
    with pytest.raises(BundleError, match=r"expected NAME.tar or NAME.tar.zst"):
        bundle.unpack(other, tmp_path / name)


def test_nothing_chosen_is_an_error(cache, tmp_path):
    with pytest.raises(BundleError, match="nothing to pack"):
        bundle.pack(cache, [], tmp_path / "b.tar")


def test_a_place_that_cannot_be_written_is_a_clear_error(cache, tmp_path):
    with pytest.raises(BundleError, match="cannot be written: No such file"):
        bundle.pack(cache, chosen(cache, Wanted()), tmp_path / "no" / "b.tar")


def test_a_file_that_cannot_be_read_is_a_clear_error(other, tmp_path):
    with pytest.raises(BundleError, match="cannot be read: No such file"):
        bundle.unpack(other, tmp_path / "b.tar")


def test_a_cache_that_cannot_be_written_is_a_cache_error(cache, tmp_path):
    (tmp_path / "b.tar").write_bytes(packed(cache, tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError):
        bundle.unpack(Cache(tmp_path / "file"), tmp_path / "b.tar")


def test_without_zstandard_the_line_that_installs_it_is_given(cache, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "backports", None)
    with pytest.raises(JitkernError, match=r'pip install "jitkern\[zstd\]"'):
        packed(cache, tmp_path, ".tar.zst")
    assert not list(tmp_path.glob(".*"))


# --- what is odd is refused, and nothing comes of it


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"type": tarfile.SYMTYPE, "linkname": "/etc"}, "a symbolic link"),
        ({"type": tarfile.LNKTYPE, "linkname": "bundle.json"}, "a hard link"),
        ({"type": tarfile.DIRTYPE}, "a directory"),
        ({"type": tarfile.CHRTYPE}, "a device"),
        ({"type": tarfile.BLKTYPE}, "a device"),
        ({"type": tarfile.FIFOTYPE}, "a FIFO"),
        ({"type": tarfile.AREGTYPE}, "an old tar"),
        ({"type": tarfile.CONTTYPE}, "an unknown type"),
        ({"type": tarfile.GNUTYPE_SPARSE}, "an unknown type"),
        ({"type": tarfile.XHDTYPE}, "a pax header"),
        ({"type": tarfile.XGLTYPE}, "a pax header"),
        ({"type": tarfile.GNUTYPE_LONGNAME}, "a GNU long name"),
        ({"type": tarfile.GNUTYPE_LONGLINK}, "a GNU long name"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.parametrize("at", [0, 1, 2, -1])
def test_only_regular_files_are_taken(cache, tmp_path, refused, fields, says, at):
    found = members(packed(cache, tmp_path))
    odd = member(found[at][0], b"", **fields)
    refused(joined([*found[:at], odd, *found[at:]]), says)
    found[at] = odd
    refused(joined(found), says)


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/x", "x", "a/../../b/c", "bundle.json", "cpu-x-torch1/y-0/../../x", "a\\..\\b", "ü", "\x1b[2J"],
)  # fmt: skip
@pytest.mark.parametrize("at", [0, 1, 3, None])
def test_a_member_that_is_not_listed_is_refused(cache, tmp_path, refused, name, at):
    found = members(packed(cache, tmp_path))
    at = len(found) if at is None else at
    odd = member(name, b"data")
    if (name, at) != ("bundle.json", 0):
        refused(joined([*found[:at], odd, *found[at:]]))


@pytest.mark.parametrize(
    ("target", "folder"),
    [
        ("..", "x-" + "0" * 16), ("cpu-torch2", ".."), ("cpu-torch2", "../x-" + "0" * 16), ("", ""),
        ("tmp", "x-" + "0" * 16), ("prune.json", "x-" + "0" * 16), ("trash", "x-" + "0" * 16),
        ("/etc-torch2", "x-" + "0" * 16), ("cpu-torch2", "x"), ("cpu-torch2/y", "x-" + "0" * 16),
        ("cpu-torch2", "-" + "0" * 16), ("cpu-torch2\n", "x-" + "0" * 16), (".x-torch2", "x-" + "0" * 16),
        ("cpu-torch2", "ü-" + "0" * 16), ("cpu-torch..2", "x-" + "0" * 16), ("cpu-torch2", "a b-" + "0" * 16),
    ],
)  # fmt: skip
def test_odd_names_in_the_index_are_refused(refused, target, folder):
    refused(joined(archive({(target, folder): {}})), "which is no entry")


@pytest.mark.parametrize(
    "index",
    [
        b"", b"[]", b"{}", b"null", b"{", b'{"entries":[],"schema":1} ', b'{"schema":1,"entries":[]}',
        b'{"entries":[],"entries":[],"schema":1}', b'{"entries":[],"schema":1,"x":1}', b"\xff\xfe",
        b'{"entries":[[]],"schema":1}', b'{"entries":[1],"schema":1}', b'{"entries":{"a":1},"schema":1}',
        b'{"entries":null,"schema":1}', b'{"entries":["abc"],"schema":1}', b'{"entries":[],"schema":true}',
        b'{"entries":[],"schema":1.0}', b'{"entries":[[1,2,3]],"schema":1}', b'{"entries":[["a","b","c","d"]],"schema":1}',
        b"[" * 100_000, b'{"entries":' + b"[" * 100_000 + b"]" * 100_000 + b',"schema":1}', b"9" * 5000,
        b'{"entries":[["\\ud800","b","c"]],"schema":1}', '{"entries":[],"schema":1}'.encode("utf-16"),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_an_index_that_pack_would_not_write_is_refused(refused, index):
    refused(joined([member("bundle.json", index)]), "bundle.json|schema")


@pytest.mark.parametrize("suffix", [".tar", ".tar.zst"])
def test_an_index_of_nothing_but_brackets_is_not_parsed(refused, monkeypatch, suffix):
    monkeypatch.setattr(json, "loads", lambda *a, **k: pytest.fail("a general parser read it"))
    index = b'{"entries":[' + b"[]," * (4 << 20) + b'[]],"schema":1}'
    data = joined([member("bundle.json", index)])
    data = zstd.compress(data) if suffix == ".tar.zst" else data
    refused(data, "lists no entry, or is not as|more than 200 times", suffix)
    refused(joined([member("bundle.json", b" " * (17 << 20))]), "and at most 16777216 are taken")


def test_an_empty_index_is_refused(refused):
    refused(joined([member("bundle.json", b'{"entries":[],"schema":1}')]), "lists no entry")


def test_a_newer_schema_says_so(refused):
    data = b'{"entries":{"new":1},"schema":2}'
    refused(joined([member("bundle.json", data)]), "it has schema 2, and this jitkern reads")


def test_an_index_out_of_order_or_with_duplicates_is_refused(cache, tmp_path, refused):
    found = members(packed(cache, tmp_path))
    entries = json.loads(found[0][2].rstrip(b"\0"))["entries"]
    for wrong in (entries[::-1], [entries[0], *entries], [entries[0], [*entries[0][:2], "0" * 64]]):
        found[0] = member("bundle.json", bundle._index_bytes(wrong))
        refused(joined(found), "twice, or not in order")


def test_members_out_of_order_missing_or_twice_are_refused(signed, tmp_path, refused):
    found = members(packed(signed, tmp_path))
    for i in range(len(found)):
        refused(joined([*found[: i + 1], *found[i:]]))  # twice
        if not found[i][0].endswith("manifest.sig"):
            refused(joined([*found[:i], *found[i + 1 :]]))  # missing
        for j in range(i):
            swapped = [*found]
            swapped[i], swapped[j] = found[j], found[i]
            refused(joined(swapped))


def test_swapped_content_is_refused(cache, tmp_path, refused):
    found = members(packed(cache, tmp_path))
    sizes = [(member[1][124:136], i) for i, member in enumerate(found)]
    for (one, i), (two, j) in itertools.combinations(sizes, 2):
        if one == two:
            found[i][2], found[j][2] = found[j][2], found[i][2]
            refused(joined(found), "is not what")
            found[i][2], found[j][2] = found[j][2], found[i][2]
    assert len({size for size, _ in sizes}) < len(sizes)


def entry_of(**changes):
    """A target, folder name and files, all of which fit, before the changes to the manifest."""
    manifest = Manifest(
        {"op": "a::b", "target": "cpu-x86_64-torch2.13.0"}, {"a": Artifact.of(b"a")}
    )
    manifest = manifest._replace(**changes)
    name = f"b-{manifest.digest[:16]}"
    return str(manifest.inputs["target"]), name, manifest


def test_an_entry_made_by_hand_is_taken(other, tmp_path):
    target, name, manifest = entry_of()
    data = joined(archive({(target, name): {NAME: manifest.encode(), "a": b"a"}}))
    (tmp_path / "b.tar").write_bytes(data)
    assert bundle.unpack(other, tmp_path / "b.tar") == (1, 0, 1)


@pytest.mark.parametrize(
    ("changes", "files", "says"),
    [
        ({"artifacts": {"a": Artifact(600 << 20, "0" * 64)}}, {}, "cut off"),
        ({"artifacts": {"a": Artifact(2 << 30, "0" * 64)}}, {}, "lists more than"),
        ({"artifacts": {"a": Artifact(1 << 99, "0" * 64)}}, {}, "out of range"),
        ({"artifacts": {"../a": Artifact.of(b"a")}}, {"../a": b"a"}, "invalid name"),
        ({"artifacts": {"a/b": Artifact.of(b"a")}}, {"a/b": b"a"}, "invalid name"),
        ({"artifacts": {}}, {}, "lists no artifact"),
        ({"artifacts": {NAME: Artifact.of(b"a")}}, {}, "no artifact"),
        ({"artifacts": {"manifest.sig": Artifact.of(b"a")}}, {"manifest.sig": b"a"}, "no artifact"),
        ({"artifacts": {"compile.log": Artifact.of(b"a")}}, {"compile.log": b"a"}, "no artifact"),
        ({}, {"a": b"b"}, "is not what its manifest lists"),
        ({}, {"a": b""}, "is not what its manifest lists"),
        ({}, {"a": b"ab"}, "at most 1 are taken"),
        ({}, {"a": b"a", "b": b"b"}, "something follows"),
        ({}, {"b": b"a"}, "stands where"),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_artifacts_are_those_of_the_manifest(refused, changes, files, says):
    target, name, manifest = entry_of(**changes)
    if says == "cut off":  # the size is believed, and read as it comes
        files = {}
    refused(joined(archive({(target, name): {NAME: manifest.encode(), **files}})), says if says != "cut off" else "ends before")  # fmt: skip


def test_an_entry_under_another_name_or_target_is_refused(refused):
    target, name, manifest = entry_of()
    files = {NAME: manifest.encode(), "a": b"a"}
    for place in (("cpu-x86_64-torch2.14.0", name), (target, f"b-{'0' * 16}")):
        refused(joined(archive({place: files})), "belongs to another entry")


@pytest.mark.parametrize("target", ["tmp", "..", "../../x"])
def test_a_target_that_is_a_folder_of_the_cache_is_refused(refused, target):
    target, name, manifest = entry_of(inputs={"op": "a", "target": target})
    refused(joined(archive({(target, name): {NAME: manifest.encode(), "a": b"a"}})), "is no entry")


def sealed(body):
    return body + b',"sha256":"%s"}\n' % hashlib.sha256(body).hexdigest().encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data + b" ",
        lambda data: data.replace(b"a::b", b"a::c"),
        lambda data: sealed(data[:-78].replace(b'{"artifacts"', b'{ "artifacts"')),
        lambda data: sealed(data[:-78].replace(b'"seconds":0.0', b'"seconds":NaN')),
        lambda data: sealed(data[:-78].replace(b'"meta":{}', b'"meta":[]')),
        lambda data: sealed(data[:-78].replace(b'"meta":{}', b'"meta":' + b"[" * 10**5 + b"]" * 10**5)),
        lambda data: sealed(data[:-78].replace(b'"meta":{}', b'"meta":{"a":' + b"[" * 970 + b"]" * 970 + b"}")[:-1]),
        lambda data: sealed(data[:-78].replace(b'"seconds":0.0', b'"seconds":' + b"9" * 9999)),
        lambda data: sealed(b"\xff" + data[:-78]),
        lambda data: b"",
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_a_manifest_that_jitkern_would_not_write_is_refused(refused, change):
    target, name, manifest = entry_of()
    data = manifest.encode()
    assert sealed(data[:-78]) == data
    changed = change(data)
    assert changed != data
    refused(joined(archive({(target, name): {NAME: changed, "a": b"a"}})), "is not usable")


def test_a_manifest_of_another_hash_is_refused(refused):
    target, name, manifest = entry_of()
    found = archive({(target, name): {NAME: manifest.encode(), "a": b"a"}})
    other = manifest._replace(seconds=1.0).encode()
    found[1] = member(found[1][0], other)
    refused(joined(found), "is not what bundle.json lists")


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_extensions_of_other_formats_are_refused(signed, tmp_path, refused, kind):
    long, made = "x" * 120, io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=kind) as archive:
        for name in ("bundle.json", f"cpu-torch2/{long}/{long}"):
            archive.addfile(tarfile.TarInfo(name))
    refused(made.getvalue())
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=kind) as archive:
        info = tarfile.TarInfo("bundle.json")
        info.mtime = 0.5
        archive.addfile(info)
    refused(made.getvalue())


def test_another_header_for_the_same_file_is_refused(cache, tmp_path, refused):
    found = members(packed(cache, tmp_path))
    for fields in (
        {"mode": 0o755}, {"mode": 0o4644}, {"mtime": 1}, {"uid": 1}, {"gid": 1}, {"uname": "root"},
        {"linkname": "x"}, {"format": tarfile.GNU_FORMAT},
    ):  # fmt: skip
        name, _, content = found[0]
        changed = member(name, content.rstrip(b"\0"), **fields)
        refused(joined([changed, *found[1:]]), "is not as jitkern writes it")


@pytest.mark.parametrize("at", range(0, BLOCK, 7))
def test_every_byte_of_a_header_counts(cache, tmp_path, refused, at):
    data = bytearray(packed(cache, tmp_path))
    data[at] ^= 1
    refused(bytes(data))
    refused(
        fixed(bytes(data[:BLOCK])) + bytes(data[BLOCK:]) if not 148 <= at < 156 else bytes(data)
    )


@pytest.mark.parametrize(
    "size", [b"77777777777\0", b"\x80" + bytes(3) + b"\x01" + bytes(7), b"\xff" * 12, b"-0000000001\0", b"      00071 ", bytes(12), b"0x000000071\0"],
    ids=itertools.count(),
)  # fmt: skip
def test_a_size_that_is_odd_or_too_large_is_refused(cache, tmp_path, refused, size):
    for at in (0, 1, 2):
        found = members(packed(cache, tmp_path))
        header = found[at][1]
        found[at][1] = fixed(header[:124] + size + header[136:])
        refused(joined(found), "bytes, and at most|is not as jitkern writes it")


def test_a_declared_size_is_refused_before_it_is_read(cache, tmp_path, monkeypatch, refused):
    found = members(packed(cache, tmp_path))
    monkeypatch.setattr(bundle, "MAX_FILE", 100)
    refused(joined(found), r"out.(so|cubin)` has (1280|512) bytes, and at most 100 are taken")
    monkeypatch.setattr(bundle, "MAX_INDEX", 100)
    refused(joined(found), r"bundle.json` has \d+ bytes, and at most 100 are taken")
    monkeypatch.undo()
    monkeypatch.setattr(bundle, "MAX_BYTES", 100)
    refused(joined(found), r"manifest.json` has \d+ bytes, and at most 100 are taken")


def test_the_whole_is_bounded(cache, tmp_path, monkeypatch, refused):
    data = packed(cache, tmp_path)
    monkeypatch.setattr(ustar, "MAX_BUNDLE", len(data) - 1)
    refused(data, "more than .* bytes")
    refused(zstd.compress(data), "more than .* bytes", ".tar.zst")
    monkeypatch.setattr(ustar, "MAX_BUNDLE", len(data))
    monkeypatch.setattr(ustar, "MAX_MEMBERS", 9)
    refused(data, "more than 9 members")


def test_the_caps_are_as_promised():
    assert (bundle.MAX_FILE, ustar.MAX_BUNDLE) == (512 << 20, 8 << 30)
    assert (ustar.MAX_MEMBERS, ustar.MAX_RATIO) == (100_000, 200)
    assert (bundle.MAX_INDEX, bundle.MAX_BYTES) == (16 << 20, 4 << 20)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("extra", [b"\0", b"x", bytes(BLOCK), END, bytes(10240), b"x" * BLOCK])
def test_nothing_may_follow_the_end(cache, tmp_path, refused, suffix, extra):
    data = packed(cache, tmp_path) + extra
    refused(zstd.compress(data) if suffix == ".tar.zst" else data, "follows its last file", suffix)


def test_padding_is_zero(cache, tmp_path, refused):
    found = members(packed(cache, tmp_path))
    for each in found:
        if each[2].endswith(b"\0") and not each[0].endswith("out.so"):
            before, each[2] = each[2], each[2][:-1] + b"x"
            refused(joined(found), "something is hidden after")
            each[2] = before


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_bundle_that_is_cut_off_anywhere_is_refused(signed, tmp_path, refused, suffix):
    data = packed(signed, tmp_path, suffix)
    for end in range(0, len(data), BLOCK if suffix == ".tar" else 37):
        refused(data[:end], "cut off", suffix)
    refused(data[:-1], "cut off", suffix)
    if suffix == ".tar":
        refused(data[: -2 * BLOCK] + bytes(BLOCK), "cut off")


def test_a_zstandard_bomb_is_stopped_early(tmp_path, refused, monkeypatch):
    taken = []

    class Chunks:
        def __init__(self, chunks):
            self.chunks = chunks

        def __next__(self):
            taken.append(len(chunk := next(self.chunks)))
            return chunk

    real = bundle.inflated
    monkeypatch.setattr(bundle, "inflated", lambda file: Chunks(real(file)))
    bomb = ustar.header_of("bundle.json", 15 << 20) + bytes(15 << 20)
    refused(zstd.compress(bomb), "inflates to more than 200 times", ".tar.zst")
    assert sum(taken) < 4 << 20


def test_a_bomb_behind_the_end_is_refused(cache, tmp_path, refused):
    refused(zstd.compress(packed(cache, tmp_path) + bytes(200 << 20)), "follows|inflates", ".tar.zst")  # fmt: skip


def test_one_zstandard_frame_and_nothing_else(cache, tmp_path, refused):
    data = packed(cache, tmp_path)
    frame = zstd.compress(data)
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    half = len(data) // BLOCK // 2 * BLOCK
    refused(frame + frame, "follows its Zstandard frame", ".tar.zst")
    refused(frame + b"x", "follows its Zstandard frame", ".tar.zst")
    refused(frame + skippable, "follows its Zstandard frame", ".tar.zst")
    refused(frame + bytes(3 << 20), "follows its Zstandard frame", ".tar.zst")
    refused(skippable + frame, None, ".tar.zst")
    refused(zstd.compress(data[:half]) + zstd.compress(data[half:]), None, ".tar.zst")
    refused(b"x" + frame, "is corrupt", ".tar.zst")
    refused(data, "is corrupt", ".tar.zst")
    refused(frame)


def test_a_bad_last_entry_publishes_none(cache, tmp_path, refused):
    found = members(packed(cache, tmp_path))
    name, _, content = found[-1]
    found[-1] = member(name, bytes([content[0] ^ 1]) + content[1 : int(found[-1][1][124:135], 8)])
    refused(joined(found), "is not what its manifest lists")


def test_a_bundle_that_changes_between_the_passes_is_refused(cache, other, tmp_path, monkeypatch):
    path, whole, look = tmp_path / "b.tar", chosen(cache, Wanted()), bundle._looked_through
    for later in (whole[1:], whole[:1], whole):
        bundle.pack(cache, whole[:2], path)

        def look_and_change(cache, entries, later=later):
            found = look(cache, entries)
            bundle.pack(cache, later, path.with_name("later.tar"))
            path.write_bytes(path.with_name("later.tar").read_bytes())
            return found

        monkeypatch.setattr(bundle, "_looked_through", look_and_change)
        with pytest.raises(BundleError, match="changed while it was read"):
            bundle.unpack(other, path)
        shutil.rmtree(other.root, ignore_errors=True)


# --- signatures


def test_a_bundle_of_a_trusted_key_is_taken(signed, other, tmp_path, public):
    (tmp_path / "b.tar").write_bytes(packed(signed, tmp_path))
    assert bundle.unpack(other, tmp_path / "b.tar", keys=("A" * 43 + "=", public)).new == 3


def test_unsigned_and_foreign_entries_are_refused_before_the_manifest_is_parsed(
    signed, tmp_path, refused, public, monkeypatch
):
    foreign = signing.keygen(tmp_path / "foreign").split()[1]
    data = packed(signed, tmp_path)
    found = members(data)
    monkeypatch.setattr(Manifest, "decode", lambda data: pytest.fail("it was parsed"))
    refused(data, "not signed by a trusted key", keys=(foreign,))
    unsigned = [each for each in found if not each[0].endswith(".sig")]
    refused(joined(unsigned), "not signed by a trusted key", keys=(public,))
    signatures = [each for each in found if each[0].endswith(".sig")]
    signatures[0][2], signatures[1][2] = signatures[1][2], signatures[0][2]  # equally long
    refused(joined(found), "signature by the key .* is wrong", keys=(public,))


def test_without_keys_signatures_are_kept_and_not_needed(signed, cache, other, tmp_path):
    found = members(packed(signed, tmp_path))
    name = next(name for name, _, _ in found if name.endswith(".sig"))
    data = joined([member(name, b"nonsense") if each[0] == name else each for each in found])
    (tmp_path / "b.tar").write_bytes(data)
    assert bundle.unpack(other, tmp_path / "b.tar").new == 3
    assert shipped(other)[f"v1/{name}"] == b"nonsense"


def test_a_signature_file_that_is_too_large_is_refused(signed, tmp_path, refused):
    found = members(packed(signed, tmp_path))
    found[1] = member(found[1][0], b"x" * (65 << 10))
    refused(joined(found), "manifest.sig` has")


# --- mutations: an error, or what was packed


def flip(random, data):
    for _ in range(random.choice((1, 1, 1, 2, 8))):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def overwrite(random, data):
    at = random.randrange(len(data))
    data[at : at + random.randrange(1, 20)] = random.randbytes(random.randrange(20))


def truncate(random, data):
    del data[random.randrange(len(data)) :]


def swap(random, data):
    one, two = (BLOCK * random.randrange(len(data) // BLOCK) for _ in range(2))
    data[one : one + BLOCK], data[two : two + BLOCK] = data[two : two + BLOCK], data[one : one + BLOCK]  # fmt: skip


def duplicate(random, data):
    at, size = (BLOCK * random.randrange(len(data) // BLOCK) for _ in range(2))
    where = BLOCK * random.randrange(len(data) // BLOCK + 1)
    data[where:where] = data[at : at + max(BLOCK, size)]


def insert(random, data):
    where = BLOCK * random.randrange(len(data) // BLOCK + 1)
    data[where:where] = random.choice((bytes(BLOCK), random.randbytes(BLOCK), random.randbytes(7)))


def delete(random, data):
    at = BLOCK * random.randrange(len(data) // BLOCK)
    del data[at : at + BLOCK * random.randrange(1, 4)]


def edit_header(random, data):
    starts = [at.start() - 257 for at in re.finditer(b"ustar\0", data) if at.start() >= 257]
    if not starts:
        return
    at = random.choice(starts)
    field, end = random.choice(
        ((0, 100), (100, 108), (108, 116), (124, 136), (124, 136), (136, 148), (156, 157), (156, 157),
         (157, 257), (257, 265), (265, 297), (329, 345), (345, 500), (500, 512))
    )  # fmt: skip
    header = bytearray(data[at : at + BLOCK])
    value = random.choice(
        (b"../../../evil", b"/tmp/evil", b"77777777777", b"00000000000", b"\x80\0\0\0\0\0\0\0\xff", b"L", b"x", b"2", b"5",
         random.randbytes(3), bytes([random.randrange(256)]), b"00000000001", b"bundle.json")
    )  # fmt: skip
    where = field + random.choice((0, random.randrange(end - field)))
    header[where : min(end, where + len(value))] = value[: end - where]
    data[at : at + BLOCK] = fixed(bytes(header[:BLOCK]))


def edit_index(random, data):
    """Change a name or hash of the index, its header and the rest unchanged."""
    at = BLOCK + random.randrange(300)
    data[at : at + 2] = random.choice((b"..", b"//", b'",', b"]]", b"\0\0", b"00"))


MUTATIONS = (flip, overwrite, truncate, swap, duplicate, insert, delete, edit_header, edit_header, edit_index)  # fmt: skip


def mutated(chance, whole):
    """(suffix, bytes): the archive changed before or after it is compressed, or not compressed."""
    suffix = chance.choice(SUFFIXES)
    late = suffix == ".tar.zst" and chance.random() < 0.5
    data = bytearray(zstd.compress(whole) if late else whole)
    for _ in range(chance.choice((1, 1, 2, 3))):
        if len(data) > BLOCK:
            chance.choice((flip, overwrite, truncate) if late else MUTATIONS)(chance, data)
    return suffix, bytes(data) if late or suffix == ".tar" else zstd.compress(bytes(data))


def fuzz(count, seed, signed, public, tmp_path):
    """Unpack mutated bundles into a cache whose surroundings are watched."""
    whole = packed(signed, tmp_path)
    good = {name: data for name, data in shipped(signed).items() if not name.endswith(".sig")}
    ground = tmp_path / "ground"
    ground.mkdir()
    outside = listing(tmp_path)
    taken = 0
    for number in range(seed, seed + count):
        chance = random.Random(number)
        suffix, data = mutated(chance, whole)
        path = tmp_path / f"mutated{suffix}"
        path.write_bytes(data)
        other = Cache(ground / "cache", fsync=False)
        try:
            bundle.unpack(other, path, keys=chance.choice(((), (public,))))
        except BundleError:
            assert listing(ground) == [], number
        else:
            taken += 1
            found = {n: d for n, d in shipped(other).items() if not n.endswith(".sig")}
            assert found == good, number
            assert os.listdir(ground) == ["cache"], number
            shutil.rmtree(other.root)
        path.unlink()
        assert listing(tmp_path) == outside, number
    assert taken < count / 4


def test_300_mutated_bundles_are_refused_or_whole(signed, public, tmp_path):
    fuzz(300, 0, signed, public, tmp_path)


@pytest.mark.stress
def test_10000_mutated_bundles_are_refused_or_whole(signed, public, tmp_path):
    fuzz(10_000, 1_000_000, signed, public, tmp_path)


# --- the command line


@pytest.fixture
def filled(cache_dir, publish):
    cache = Cache(cache_dir, fsync=False)
    publish(cache, 1)
    publish(cache, 2)
    return cache


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_pack_and_unpack(cli, filled, tmp_path, suffix):
    path = tmp_path / f"b{suffix}"
    code, out, err = cli("cache", "pack", "-o", str(path))
    assert (code, out) == (0, f"{path}\n")
    assert "2 entries packed" in err
    there = str(tmp_path / "there")
    code, out, err = cli("cache", "unpack", str(path), "--cache-dir", there, "--dry-run", "--json")
    assert code == 0 and not os.path.exists(there) and "would be" in err
    dry = json.loads(out)
    assert (dry["new"], dry["present"], dry["dry_run"], dry["signed"]) == (2, 0, True, False)
    code, out, _ = cli("cache", "unpack", str(path), "--cache-dir", there)
    assert (code, out) == (0, "")
    code, out, _ = cli("cache", "unpack", str(path), "--cache-dir", there, "--json")
    again = json.loads(out)
    assert (again["schema"], again["new"], again["present"], again["bytes"]) == (1, 0, 2, 0)


def test_pack_takes_filters_and_prints_json(cli, filled, tmp_path):
    path = tmp_path / "b.tar"
    code, out, _ = cli("cache", "pack", "--op", "test::*", "-o", str(path), "--json")
    report = json.loads(out.splitlines()[-1])
    assert (code, report["path"], report["entries"]) == (0, str(path), 2)
    assert report["bytes"] == path.stat().st_size
    code, _, err = cli("cache", "pack", "--op", "none", "-o", str(tmp_path / "c.tar"))
    assert code == 1 and "nothing to pack" in err and not (tmp_path / "c.tar").exists()


def test_errors_are_one_line_and_an_exit_code(cli, filled, tmp_path):
    assert cli("cache", "pack")[0] == 2
    assert cli("cache", "pack", "-o", str(tmp_path / "b.zip"))[0] == 1
    assert cli("cache", "pack", "-o", str(tmp_path / "b.tar"), "--name", "x")[0] == 2
    code, _, err = cli("cache", "unpack", str(tmp_path / "none.tar"))
    assert code == 1 and "cannot be read" in err and err.count("\n") == 1
    (tmp_path / "b.tar").write_bytes(b"nonsense")
    code, _, err = cli("cache", "unpack", str(tmp_path / "b.tar"))
    assert code == 1 and "is refused: it is cut off" in err
    assert cli("cache", "unpack", "x.tar", "--require-signature", "--allow-unsigned")[0] == 2


def test_signatures_are_required_where_there_are_trusted_keys(cli, filled, tmp_path, public):
    path, there = str(tmp_path / "b.tar"), ("--cache-dir", str(tmp_path / "there"))
    assert cli("cache", "pack", "-o", path)[0] == 0
    code, _, err = cli("cache", "unpack", path, "--require-signature", *there)
    assert code == 1 and "trusted_keys" in err
    with config.using(trusted_keys=(public,)):
        code, _, err = cli("cache", "unpack", path, *there)
        assert code == 1 and "not signed by a trusted key" in err
        assert not (tmp_path / "there").exists()
        assert cli("cache", "unpack", path, "--allow-unsigned", *there)[0] == 0
        shutil.rmtree(tmp_path / "there")
        assert cli("cache", "sign", "--key", str(tmp_path / "key"))[0] == 0
        assert cli("cache", "pack", "-o", path)[0] == 0
        code, out, _ = cli("cache", "unpack", path, "--require-signature", "--json", *there)
        assert (code, json.loads(out)["signed"]) == (0, True)
