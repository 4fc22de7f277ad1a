"""Every kind of entry, damaged in every way: a miss, out of the way, and replaced by the next."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import processes
import pytest
from helpers import LONGEST
from publishing import in_a_child, key_of, names, publish

from jitkern.cache.manifest import NAME, Manifest
from jitkern.cache.store import Cache

CALL = """
import torch, jitkern.ops
x = torch.arange(10.0)
print(jitkern.ops.vec_add(x, x).tolist() == (2 * x).tolist())
"""
KINDS = {"kernel": "vec_add.f32-", "call": "vec_add.call.", "runtime": "runtime-", "fake": "op-"}  # fmt: skip
LIBRARIES = ("kernel", "runtime")


def call(root: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Add two vectors in a process of its own, with the cache at `root`."""
    others = {n: v for n, v in os.environ.items() if not n.startswith("JITKERN_")}
    return processes.run(
        [sys.executable, "-W", "ignore", "-c", CALL],
        env={**others, "JITKERN_CACHE_DIR": str(root), **environment}, cwd=root.parent, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A cache with a compiled kernel, what launches it, and an entry of the fake compiler's kind."""
    root = tmp_path_factory.mktemp("made") / "cache"
    done = call(root)
    assert done.stdout == "True\n", done.stderr
    publish(Cache(root, fsync=False), key_of("op"), b"code of f32")
    return root


class Subject(NamedTuple):
    """A published entry of a copy of `made`, and what it held."""

    root: Path
    path: Path
    digest: str
    files: dict[str, bytes]

    @classmethod
    def of(cls, root: Path, kind: str) -> Subject:
        (path,) = root.glob(f"v1/*/{KINDS[kind]}*")
        files = {file.name: file.read_bytes() for file in path.iterdir()}
        return cls(root, path, Manifest.decode(files[NAME]).digest, files)

    @property
    def artifact(self) -> Path:
        (name,) = Manifest.decode(self.files[NAME]).artifacts or [NAME]  # a record has none
        return self.path / name

    def look_up(self, cache: Cache):
        return cache.look_up(self.path.parent.name, self.path.name, self.digest)

    def check_that_it_is_a_miss_and_heals(self):
        cache = Cache(self.root, fsync=False)
        found = self.look_up(cache)
        assert (found.entry, found.reason) == (None, "damaged")
        assert not os.path.lexists(self.path)
        assert len(names(self.root / "v1" / "bad")) > 0
        self.publish_again(cache)

    def publish_again(self, cache: Cache) -> None:
        cache.adopt(self.path.parent.name, self.path.name, self.files)
        entry = self.look_up(cache).entry
        assert entry.path == self.path
        assert entry.files() == {name: self.files[name] for name in entry.files()}


@pytest.fixture
def subject(made, folder):
    shutil.copytree(made, folder / "cache")
    return lambda kind: Subject.of(folder / "cache", kind)


def flipped(data: bytes, at: int, bits: int = 0xFF) -> bytes:
    return data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :]


def every_damage(data: bytes, step: int):
    for at in range(0, len(data), step):
        yield flipped(data, at)
        yield flipped(data, at, 1)
        yield data[:at]


def check_every_damage_of_the_manifest(it, caplog, step):
    caplog.set_level(logging.CRITICAL, logger="jitkern")
    for data in every_damage(it.files[NAME], step):
        (it.path / NAME).write_bytes(data)
        it.check_that_it_is_a_miss_and_heals()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_any_manifest_with_any_byte_changed_or_missing_heals(kind, subject, caplog):
    check_every_damage_of_the_manifest(subject(kind), caplog, 1)


def section(data: bytes, name: bytes) -> slice:
    """Where a section of a 64-bit ELF file lies."""
    table, size, count, index = (
        *struct.unpack_from("<Q", data, 0x28),
        *struct.unpack_from("<HHH", data, 0x3A),
    )
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    texts = headers[index][4]
    for text, *_, offset, length in headers:
        if data[texts + text :].startswith(name + b"\0"):
            return slice(offset, offset + length)
    raise KeyError(name)


def middle(where: slice) -> int:
    return (where.start + where.stop) // 2


CONTENT: dict[str, Callable[[bytes], bytes]] = {
    "magic": lambda data: flipped(data, 0),
    "header": lambda data: flipped(data, 0x20),
    "code": lambda data: flipped(data, middle(section(data, b".text")), 1),
    "names": lambda data: flipped(data, middle(section(data, b".dynstr"))),
    "last byte": lambda data: flipped(data, len(data) - 1, 1),
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "a byte less": lambda data: data[:-1],
    "a byte more": lambda data: data + b"\0",
    "a zeroed page": lambda data: data[:4096] + bytes(4096) + data[8192:],
    "all zero": lambda data: bytes(len(data)),
}


@pytest.fixture(params=["the user's", "a layer"])
def check_miss(request, folder):
    """Whether an entry is a miss in either root: the user's heals, a layer stays to the nanosecond."""

    def in_a_layer(it):
        before = listing(it.root)
        cache = Cache(folder / "user", (it.root,), fsync=False)
        assert it.look_up(cache).entry is None
        assert list(cache.paths()) == []
        assert listing(it.root) == before
        cache.adopt(it.path.parent.name, it.path.name, it.files)
        assert it.look_up(cache).root == cache.root
        assert listing(it.root) == before

    return in_a_layer if request.param == "a layer" else Subject.check_that_it_is_a_miss_and_heals


@pytest.mark.parametrize("damage", CONTENT)
@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_library_of_other_content_is_a_miss(kind, damage, subject, check_miss):
    it = subject(kind)
    it.artifact.write_bytes(CONTENT[damage](it.artifact.read_bytes()))
    check_miss(it)


def missing(file: Path) -> None:
    file.unlink()


def directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def link_to_the_same(file: Path) -> None:
    file.rename(file.with_name("real"))
    file.symlink_to("real")


def link_to_itself(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def hard_link_to_another(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(bytes(file.stat().st_size))
    file.unlink()
    file.hardlink_to(other)


def not_readable(file: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads it all the same")
    file.chmod(0)


def of_another_user(file: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a file away")
    os.chown(file, 12345, 12345)


def writable_by_a_group(file: Path) -> None:
    file.chmod(0o664)


PLACES = [
    missing, directory, fifo, link_to_the_same, link_to_itself, hard_link_to_another, not_readable,
    of_another_user, writable_by_a_group,
]  # fmt: skip


@pytest.fixture(params=PLACES, ids=lambda damage: damage.__name__)
def place(request):
    return request.param


@pytest.mark.parametrize(
    ("kind", "what"), [("kernel", "artifact"), ("kernel", "manifest"), ("call", "manifest")]
)
def test_a_file_that_is_not_as_published_is_a_miss(kind, what, place, subject, check_miss):
    it = subject(kind)
    place(it.artifact if what == "artifact" else it.path / NAME)
    check_miss(it)


@pytest.mark.parametrize("damage", [of_another_user, writable_by_a_group])
def test_an_entry_that_others_could_write_is_a_miss_and_heals(damage, subject):
    it = subject("kernel")
    damage(it.path)
    it.check_that_it_is_a_miss_and_heals()


def moved_out(path: Path, outside: Path) -> None:
    """A link, to what was there and is whole."""
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


def a_file(path: Path, outside: Path) -> None:
    path.rename(outside / path.name)
    path.write_text("")


def a_pipe(path: Path, outside: Path) -> None:
    path.rename(outside / path.name)
    os.mkfifo(path)


def listing(root: Path) -> dict[str, tuple[int, ...]]:
    """Everything below a folder, with what a write would change."""
    found = {}
    for path in (root, *root.rglob("*")):
        status = path.lstat()
        found[str(path)] = (
            status.st_ino, status.st_mode, status.st_uid, status.st_size, status.st_mtime_ns, status.st_ctime_ns,
        )  # fmt: skip
    return found


@pytest.mark.parametrize("displace", [moved_out, a_file, a_pipe])
@pytest.mark.parametrize("level", ["entry", "target", "version"])
def test_what_is_no_folder_is_a_miss_alone(level, displace, subject, folder, check_miss):
    it = subject("kernel")
    outside = folder / "outside"
    outside.mkdir()
    displace(
        {"entry": it.path, "target": it.path.parent, "version": it.path.parents[1]}[level], outside
    )
    before = listing(outside)
    if check_miss is Subject.check_that_it_is_a_miss_and_heals:  # a folder above may stay there
        cache = Cache(it.root, fsync=False)
        assert it.look_up(cache).entry is None
        it.publish_again(cache)
    else:
        check_miss(it)
    assert listing(outside) == before


@pytest.mark.parametrize("displace", [moved_out, a_file, a_pipe])
def test_what_is_no_folder_is_no_entry_to_remove(displace, subject, folder):
    it = subject("kernel")
    (folder / "outside").mkdir()
    displace(it.path, folder / "outside")
    before = listing(folder)
    cache = Cache(it.root, fsync=False)

    def remove():
        signal.alarm(LONGEST)  # a pipe that is opened waits for its other end
        assert not cache.remove(it.path)
        assert it.path not in cache.paths()

    assert in_a_child(remove) == 0
    assert listing(folder) == before


def test_a_root_that_is_a_link_is_used(subject, folder):
    it = subject("kernel")
    (folder / "link").symlink_to(it.root)
    cache = Cache(folder / "link", fsync=False)
    assert it.look_up(cache).entry
    cache.remove(it.look_up(cache).entry.path)
    cache.adopt(it.path.parent.name, it.path.name, it.files)
    assert it.look_up(cache).entry


def test_a_hit_in_a_layer_leaves_it_untouched(subject, folder):
    it = subject("kernel")
    os.utime(it.path / NAME, (0, 0))
    before = listing(it.root)
    cache = Cache(folder / "user", (it.root,), fsync=False)
    assert it.look_up(cache).root == it.root
    assert listing(it.root) == before
    assert not cache.root.exists()


@pytest.fixture
def on_disk(made, tmp_path):
    """As `subject`: from memory, libraries cannot be loaded everywhere."""
    shutil.copytree(made, tmp_path / "copy")
    return lambda kind: Subject.of(tmp_path / "copy", kind)


def check_that_a_call_heals(root, kinds, **environment):
    done = call(root, **environment)
    assert done.stdout == "True\n", done.stderr
    cache = Cache(root)
    for kind in kinds:
        it = Subject.of(root, kind)
        assert it.look_up(cache).entry


@pytest.mark.long
def test_a_call_over_damage_everywhere_computes_and_heals(on_disk):
    for kind, damage in (("kernel", "magic"), ("call", "last byte"), ("runtime", "code")):
        it = on_disk(kind)
        it.artifact.write_bytes(CONTENT[damage](it.artifact.read_bytes()))
    check_that_a_call_heals(it.root, ("kernel", "call", "runtime"))
    assert len(names(it.root / "v1" / "bad")) == 3


@pytest.mark.long
@pytest.mark.parametrize("kind", LIBRARIES)
@pytest.mark.parametrize("damage", ["magic", "all zero"])
def test_with_sizes_verified_any_library_that_fails_heals(kind, damage, on_disk):
    it = on_disk(kind)
    it.artifact.write_bytes(CONTENT[damage](it.artifact.read_bytes()))
    check_that_a_call_heals(it.root, (kind,), JITKERN_VERIFY="size")
