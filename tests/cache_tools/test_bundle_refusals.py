"""Bundles that are odd in any way: they are refused, and nothing comes of them."""

import hashlib
import io
import itertools
import shutil
import sys
import tarfile

import pytest
from bundling import END, SUFFIXES, archive, fixed, joined, member, members, packed
from helpers import one_in_four

from jitkern.cache.manifest import NAME, Artifact, Manifest
from jitkern.cache.store import Cache
from jitkern.cache_tools import bundle, chosen, ustar
from jitkern.cache_tools.bundle import BLOCK, BundleError
from jitkern.cache_tools.listing import EntryFilter

pytest.importorskip("cryptography")
zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"type": tarfile.SYMTYPE, "linkname": "/etc"}, "a symbolic link"),
        ({"type": tarfile.LNKTYPE, "linkname": "x"}, "a hard link"),
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
    ["../x", "/etc/x", "x", "a/../../b/c", "manifest.json", "cpu-x-torch1/y-0/../../x", "a\\..\\b", "ü", "\x1b[2J"],
)  # fmt: skip
@pytest.mark.parametrize("at", [0, 1, 3, None])
def test_a_member_of_no_entry_is_refused(cache, tmp_path, refused, name, at):
    found = members(packed(cache, tmp_path))
    at = len(found) if at is None else at
    odd = member(name, b"data")
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
def test_odd_names_of_entries_are_refused(refused, target, folder):
    data = joined(archive({(target, folder): {NAME: b""}}))
    refused(data, "is not a file of an entry|is not in jitkern's format")


def test_an_empty_bundle_is_refused(refused):
    refused(END, "holds no entry")


def test_entries_out_of_order_or_twice_are_refused(cache, tmp_path, refused):
    found = members(packed(cache, tmp_path))
    entries = [
        [*group] for _, group in itertools.groupby(found, lambda one: one[0].rpartition("/")[0])
    ]
    for wrong in (entries[::-1], [entries[0], *entries], [*entries, entries[-1]]):
        refused(joined(itertools.chain(*wrong)), "twice, or out of order")


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
            refused(joined(found), "is not what|belongs to another")
            found[i][2], found[j][2] = found[j][2], found[i][2]
    assert len({size for size, _ in sizes}) < len(sizes)


def entry_of(**changes):
    """A target, folder name and files, all of which fit, before the changes to the manifest."""
    inputs = {"op": "a::b", "target": "cpu-x86_64-torch2.13.0"}
    manifest = Manifest(inputs, {"a": Artifact.of(b"a")})._replace(**changes)
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
        ({"artifacts": {NAME: Artifact.of(b"a")}}, {}, "invalid name"),
        ({"artifacts": {"manifest.sig": Artifact.of(b"a")}}, {"manifest.sig": b"a"}, "invalid name"),
        ({"artifacts": {"compile.log": Artifact.of(b"a")}}, {"compile.log": b"a"}, "invalid name"),
        ({}, {"a": b"b"}, "is not what its manifest lists"),
        ({}, {"a": b""}, "is not what its manifest lists"),
        ({}, {"a": b"ab"}, "over the limit of 1"),
        ({}, {"a": b"a", "b": b"b"}, "is not a file of an entry"),
        ({}, {"b": b"a"}, "was found where"),
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
    data = joined(archive({(target, name): {NAME: manifest.encode(), "a": b"a"}}))
    refused(data, "is not a file of an entry")


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


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_extensions_of_other_formats_are_refused(signed, tmp_path, refused, kind):
    long, made = "x" * 120, io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=kind) as archive:
        for name in (f"cpu-torch2/x-{'0' * 16}/{NAME}", f"cpu-torch2/{long}/{long}"):
            archive.addfile(tarfile.TarInfo(name))
    refused(made.getvalue())
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=kind) as archive:
        info = tarfile.TarInfo(f"cpu-torch2/x-{'0' * 16}/{NAME}")
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
        refused(joined([changed, *found[1:]]), "is not in jitkern's format")


@pytest.mark.parametrize("at", one_in_four(range(0, BLOCK, 7)))
def test_every_byte_of_a_header_counts(cache, tmp_path, refused, at):
    data = bytearray(packed(cache, tmp_path))
    data[at] ^= 1
    refused(bytes(data))
    if not 148 <= at < 156:  # the checksum itself
        refused(fixed(bytes(data[:BLOCK])) + bytes(data[BLOCK:]))


@pytest.mark.parametrize(
    "size", [b"77777777777\0", b"\x80" + bytes(3) + b"\x01" + bytes(7), b"\xff" * 12, b"-0000000001\0", b"      00071 ", bytes(12), b"0x000000071\0"],
    ids=itertools.count(),
)  # fmt: skip
def test_a_size_that_is_odd_or_too_large_is_refused(cache, tmp_path, refused, size):
    for at in (0, 1, 2):
        found = members(packed(cache, tmp_path))
        header = found[at][1]
        found[at][1] = fixed(header[:124] + size + header[136:])
        refused(joined(found), "bytes, over the limit|is not in jitkern's format")


def test_a_declared_size_is_refused_before_it_is_read(cache, tmp_path, monkeypatch, refused):
    found = members(packed(cache, tmp_path))
    monkeypatch.setattr(bundle, "MAX_FILE", 100)
    refused(joined(found), r"out.(so|cubin)` has (1280|512) bytes, over the limit of 100")
    monkeypatch.undo()
    monkeypatch.setattr(bundle, "MAX_BYTES", 100)
    refused(joined(found), r"manifest.json` has \d+ bytes, over the limit of 100")


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
    assert bundle.MAX_BYTES == 4 << 20


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("extra", [b"\0", b"x", bytes(BLOCK), END, bytes(10240), b"x" * BLOCK])
def test_nothing_may_follow_the_end(cache, tmp_path, refused, suffix, extra):
    data = packed(cache, tmp_path) + extra
    refused(
        zstd.compress(data) if suffix == ".tar.zst" else data, "data after its last file", suffix
    )


def test_padding_is_zero(cache, tmp_path, refused):
    found = members(packed(cache, tmp_path))
    for each in found:
        if each[2].endswith(b"\0") and not each[0].endswith("out.so"):
            before, each[2] = each[2], each[2][:-1] + b"x"
            refused(joined(found), "hidden data after")
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
    bomb = ustar.header_of(f"cpu-torch2/x-{'0' * 16}/{NAME}", 3 << 20) + bytes(15 << 20)
    refused(zstd.compress(bomb), "inflates to more than 200 times", ".tar.zst")
    assert sum(taken) < 4 << 20


@pytest.mark.long
def test_a_bomb_behind_the_end_is_refused(cache, tmp_path, refused):
    refused(zstd.compress(packed(cache, tmp_path) + bytes(200 << 20)), "after its last file|inflates", ".tar.zst")  # fmt: skip


def test_one_zstandard_frame_and_nothing_else(cache, tmp_path, refused):
    data = packed(cache, tmp_path)
    frame = zstd.compress(data)
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    half = len(data) // BLOCK // 2 * BLOCK
    for more in (frame, b"x", skippable, bytes(3 << 20)):
        refused(frame + more, "data after its Zstandard frame", ".tar.zst")
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
    path, whole, look_up = tmp_path / "b.tar", chosen(cache, EntryFilter()), Cache.look_up
    for later in (whole[1:], whole[:1], whole):
        bundle.pack(cache, whole[:2], path)
        bundle.pack(cache, later, tmp_path / "later.tar")

        def change_and_look_up(*args):  # once the whole bundle was read
            path.write_bytes((tmp_path / "later.tar").read_bytes())
            return look_up(*args)

        with monkeypatch.context() as patched:
            patched.setattr(Cache, "look_up", change_and_look_up)
            with pytest.raises(BundleError, match="changed while it was read"):
                bundle.unpack(other, path)
        shutil.rmtree(other.root, ignore_errors=True)
