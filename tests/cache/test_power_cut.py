"""A power cut: a file system in a file goes down without writing what it has in memory."""

import fcntl
import hashlib
import itertools
import os
import shutil
import struct
import subprocess
import sys

import pytest
from publishing import Disk as Calls, key_of, publish

from jitkern.cache.store import Cache

FS_IOC_GOINGDOWN = 0x8004587D
WITHOUT_THE_LOG = struct.pack("I", 2)
KEYS = [key_of(f"op{i}") for i in range(16)]
UNSYNCED, SYNCED = KEYS[:8], KEYS[8:]


def content_of(key):
    return hashlib.sha256(key.digest.encode()).digest() * 1000


class Disk:
    """An ext4 file system that can lose power."""

    def __init__(self, folder):
        self.image, self.path = folder / "image", folder / "mounted"
        self.path.mkdir()
        with open(self.image, "wb") as file:
            file.truncate(64 << 20)
        self.run("mkfs.ext4", "-q", "-F", self.image)
        self.mount()

    def run(self, *command):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no loop mounts here: {done.stderr.strip()}")

    def mount(self):
        self.run("mount", "-o", "loop", self.image, self.path)

    def cut(self):
        self.shut_down()
        self.come_back()

    def shut_down(self):
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, FS_IOC_GOINGDOWN, WITHOUT_THE_LOG)
        finally:
            os.close(descriptor)

    def come_back(self):
        self.run("umount", self.path)
        self.mount()


@pytest.fixture
def disk(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    if not shutil.which("mkfs.ext4"):
        pytest.skip("needs mkfs.ext4")
    try:
        yield Disk(tmp_path)
    finally:
        if os.path.ismount(tmp_path / "mounted"):  # the loop device goes with the mount
            subprocess.run(["umount", "-l", tmp_path / "mounted"], check=True)


@pytest.fixture
def after_a_cut(disk):
    """A cache whose entries were published, some synced and some not, just before the power went."""
    root = disk.path / "cache"
    for keys, fsync in ((UNSYNCED, False), (SYNCED, True)):  # so that syncs meet unsynced entries
        for key in keys:
            publish(Cache(root, fsync=fsync), key, content_of(key))
    disk.cut()
    return Cache(root)


def is_whole(cache, key):
    """What is there, not asked of the cache."""
    path = cache.root / "v1" / key.target / key.name
    return (path / "manifest.json").exists() and (path / "out.so").read_bytes() == content_of(key)


def test_entries_that_were_synced_are_all_there_and_whole(after_a_cut):
    for key in SYNCED:
        assert after_a_cut.find(key).read("out.so") == content_of(key)


def test_entries_that_were_not_synced_are_whole_or_a_miss(after_a_cut):
    lost = [key for key in UNSYNCED if not is_whole(after_a_cut, key)]
    assert lost  # else nothing was cut
    for key in UNSYNCED:
        assert (after_a_cut.find(key) is None) == (key in lost)
        assert publish(after_a_cut, key, content_of(key)).read("out.so") == content_of(key)
        assert after_a_cut.find(key).read("out.so") == content_of(key)


def test_a_cut_right_after_the_first_publish_keeps_it(disk):
    root = disk.path / "some" / "folders" / "cache"
    publish(Cache(root), KEYS[0], content_of(KEYS[0]))
    disk.cut()
    assert Cache(root).find(KEYS[0]).read("out.so") == content_of(KEYS[0])


class Dark(BaseException):
    """The machine is off."""


@pytest.mark.long
@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="pathlib took its calls from os when it was imported"
)
def test_a_cut_publish_is_whole_or_out_and_hurts_no_other(disk):
    """Each publish is cut at a later call than the one before it, until one is not."""
    cache = Cache(disk.path / "cache")
    there = []
    for n in itertools.count(1):
        key = key_of(f"cut{n}")
        calls = itertools.count(1)

        def strike(call, changes, n=n, calls=calls):
            if changes and next(calls) == n:
                disk.shut_down()
                raise Dark

        cut = False
        try:
            with Calls(strike):
                publish(cache, key, content_of(key))
        except Dark:
            cut = True
            disk.come_back()
        for old in there:
            assert cache.find(old).read("out.so") == content_of(old)
        found = cache.look_up(key.target, key.name, key.digest)
        assert found.entry or found.reason == "absent"
        assert publish(cache, key, content_of(key)).read("out.so") == content_of(key)
        there.append(key)
        if not cut:
            break
    assert n > 20
