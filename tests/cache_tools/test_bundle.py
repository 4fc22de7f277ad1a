"""Bundles: what `pack` writes is taken in whole, and nothing else is."""

import io
import itertools
import json
import os
import shutil
import sys
import tarfile

import pytest
from bundling import END, SUFFIXES, joined, listing, member, members, packed, shipped

from jitkern import config
from jitkern.cache.manifest import NAME, Manifest
from jitkern.cache.store import Cache
from jitkern.cache_tools import bundle, chosen, signing, ustar
from jitkern.cache_tools.bundle import BundleError
from jitkern.cache_tools.listing import EntryFilter, rows
from jitkern.errors import CacheError, JitkernError

pytest.importorskip("cryptography")
zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


# --- what is packed comes out again


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_round_trip_keeps_every_byte(signed, other, tmp_path, suffix):
    path = tmp_path / f"b{suffix}"
    assert bundle.pack(signed, chosen(signed, EntryFilter()), path) == 3
    done = bundle.unpack(other, path)
    assert (done.new, done.present) == (3, 0)
    assert done.bytes == sum(row.bytes for row in rows(other)) - sum(
        len(data) for name, data in shipped(other).items() if "manifest" in name
    )
    assert shipped(other) == shipped(signed)
    assert sum(name.endswith("manifest.sig") for name in shipped(other)) == 3
    assert not list(other.root.rglob("compile.log"))


def test_what_is_there_already_is_not_written_again(cache, other, tmp_path, publish):
    path = tmp_path / "b.tar"
    bundle.pack(cache, chosen(cache, EntryFilter()), path)
    publish(other, 1)
    assert bundle.unpack(other, path)[:2] == (2, 1)
    before = [(p, p.stat().st_ino) for p in sorted(other.root.rglob("v1/cpu*/*"))]
    assert bundle.unpack(other, path) == (0, 3, 0)
    assert [(p, p.stat().st_ino) for p in sorted(other.root.rglob("v1/cpu*/*"))] == before


def test_a_damaged_entry_is_healed(cache, other, tmp_path):
    path = tmp_path / "b.tar"
    bundle.pack(cache, chosen(cache, EntryFilter()), path)
    bundle.unpack(other, path)
    next(other.root.rglob("out.cubin")).write_bytes(b"damage")
    assert bundle.unpack(other, path)[:2] == (1, 2)
    assert shipped(other) == shipped(cache)


def test_a_dry_run_only_counts(cache, other, tmp_path):
    path = tmp_path / "b.tar"
    bundle.pack(cache, chosen(cache, EntryFilter()), path)
    assert bundle.unpack(other, path, dry_run=True)[:2] == (3, 0)
    assert not other.root.exists()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_equal_entries_give_equal_bytes(signed, other, tmp_path, suffix):
    first = packed(signed, tmp_path, suffix)
    assert packed(signed, tmp_path, suffix) == first
    (tmp_path / f"b{suffix}").write_bytes(first)
    bundle.unpack(other, tmp_path / f"b{suffix}")
    assert packed(other, tmp_path, suffix) == first


def test_the_order_is_signature_manifest_artifacts_of_each_entry(signed, tmp_path):
    names = [name for name, _, _ in members(packed(signed, tmp_path))]
    folders = [name for name, _ in itertools.groupby(n.rpartition("/")[0] for n in names)]
    assert folders == sorted(f"{p.parent.name}/{p.name}" for p in signed.paths())
    assert [name.rpartition("/")[2] for name in names].count("compile.log") == 0
    for _, group in itertools.groupby(names, lambda name: name.rpartition("/")[0]):
        files = [name.rpartition("/")[2] for name in group]
        assert files[:2] == ["manifest.sig", NAME]
        assert files[2:] == sorted(files[2:])


def test_headers_are_plain_ustar_that_every_tar_reads(cache, tmp_path):
    data = packed(cache, tmp_path)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for info in archive:
            assert (info.mode, info.mtime, info.uid, info.gid) == (0o644, 0, 0, 0)
            assert (info.uname, info.gname, info.type) == ("", "", tarfile.REGTYPE)
        assert len(archive.getnames()) == len(members(data)) == 9
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
    whole = chosen(cache, EntryFilter())
    (tmp_path / "gone").rename(tmp_path / "there")
    assert len(whole) == 2
    next(cache.root.rglob("out.so")).write_bytes(b"damage")
    before = listing(tmp_path)
    with pytest.raises(BundleError, match="cannot be shipped: out.so"):
        bundle.pack(cache, whole, tmp_path / "b.tar")
    assert listing(tmp_path) == before


def test_an_entry_whose_manifest_was_changed_is_not_packed(cache, tmp_path):
    whole = chosen(cache, EntryFilter())
    path = whole[-1].path / NAME
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(BundleError, match="manifest was changed"):
        bundle.pack(cache, whole, tmp_path / "b.tar")


def test_a_signature_that_is_a_link_is_not_followed(cache, tmp_path):
    whole = chosen(cache, EntryFilter())
    (tmp_path / "secret").write_text("secret")
    (whole[0].path / "manifest.sig").symlink_to(tmp_path / "secret")
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
        bundle.pack(cache, chosen(cache, EntryFilter()), tmp_path / name)
    with pytest.raises(BundleError, match=r"expected NAME.tar or NAME.tar.zst"):
        bundle.unpack(other, tmp_path / name)


def test_nothing_chosen_is_an_error(cache, tmp_path):
    with pytest.raises(BundleError, match="nothing to pack"):
        bundle.pack(cache, [], tmp_path / "b.tar")


def test_a_place_that_cannot_be_written_is_a_clear_error(cache, tmp_path):
    with pytest.raises(BundleError, match="cannot be written: No such file"):
        bundle.pack(cache, chosen(cache, EntryFilter()), tmp_path / "no" / "b.tar")


def test_a_file_that_cannot_be_read_is_a_clear_error(other, tmp_path):
    with pytest.raises(BundleError, match="cannot be read: No such file"):
        bundle.unpack(other, tmp_path / "b.tar")


def test_a_cache_that_cannot_be_written_is_a_cache_error(cache, tmp_path):
    (tmp_path / "b.tar").write_bytes(packed(cache, tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError):
        bundle.unpack(Cache(tmp_path / "file"), tmp_path / "b.tar")


def test_without_zstandard_the_line_that_installs_it_is_given(cache, tmp_path, monkeypatch):
    for package in ("compression", "backports"):  # of Python from 3.14 on, and of before
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(JitkernError, match=r'pip install "jitkern\[zstd\]"'):
        packed(cache, tmp_path, ".tar.zst")
    assert not list(tmp_path.glob(".*"))


# --- signatures


def test_unsigned_and_foreign_entries_are_refused_unparsed(
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
    found[0] = member(found[0][0], b"x" * (65 << 10))
    refused(joined(found), "manifest.sig` has")


# --- the command line


@pytest.fixture
def filled(cache_dir, publish):
    cache = Cache(cache_dir, fsync=False)
    publish(cache, 1)
    publish(cache, 2)
    return cache


@pytest.mark.parametrize(
    ("path", "says"),
    [("nowhere/b.tar", "there is no folder nowhere"), ("b.zip", "is no name of a bundle")],
)
def test_a_bundle_needs_a_name_and_a_folder(cli, filled, path, says):
    code, _, err = cli("cache", "pack", "-o", path)
    assert (code, says in err) == (2, True), err


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
    assert code == 2 and "none" in err and not (tmp_path / "c.tar").exists()


def test_errors_are_one_line_and_an_exit_code(cli, filled, tmp_path):
    assert cli("cache", "pack")[0] == 2
    assert cli("cache", "pack", "-o", str(tmp_path / "b.zip"))[0] == 2
    assert cli("cache", "pack", "-o", str(tmp_path / "none" / "b.tar"))[0] == 2
    assert cli("cache", "pack", "-o", str(tmp_path / "b.tar"), "--name", "x")[0] == 2
    assert cli("cache", "unpack", str(tmp_path / "b.txt"))[0] == 2
    code, _, err = cli("cache", "unpack", str(tmp_path / "none.tar"))
    assert code == 2 and "there is no file" in err and err.count("\n") == 1
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
        assert code == 1 and "not signed by a trusted key" in err and "cache sign --key" in err
        assert not (tmp_path / "there").exists()
        assert cli("cache", "unpack", path, "--allow-unsigned", *there)[0] == 0
        shutil.rmtree(tmp_path / "there")
        assert cli("cache", "sign", "--key", str(tmp_path / "key"))[0] == 0
        assert cli("cache", "pack", "-o", path)[0] == 0
        code, out, _ = cli("cache", "unpack", path, "--require-signature", "--json", *there)
        assert (code, json.loads(out)["signed"]) == (0, True)
