"""A cache that an image brought: in a container, its directories cannot be renamed."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import published

from jitkern import cache_tools, jit
from jitkern.cache import eviction
from jitkern.cache.manifest import NAME
from jitkern.cache.store import Cache

ON_OVERLAY = """
import sys
from pathlib import Path
from jitkern.cache.store import Cache
from jitkern.cache_tools import remove

cache = Cache(Path(sys.argv[1]), fsync=False)
damaged, old, *others = cache.paths()
files = {file.name: file.read_bytes() for file in damaged.iterdir()}
place = damaged.parent.name, damaged.name
(damaged / "out.so").write_bytes(b"damaged")
assert cache.look_up(*place).reason == "damaged"
cache.adopt(*place, files)
assert cache.look_up(*place).entry
assert cache.look_up(*place).entry
assert remove(cache, [old, *others]) == [old, *others]
assert list(cache.paths()) == [damaged]
"""


@pytest.fixture
def put(variant, target):
    return lambda cache, number, content=b"code": published(
        cache, variant, target, f"-D{number}", out_so=content
    )


@pytest.fixture
def from_an_image(monkeypatch):
    """Make the directories that are below a folder now, and no others, such as cannot be renamed."""
    held, lower, rename = [], set(), os.rename

    def refuse(source, target, **keywords):
        if os.lstat(source).st_ino in lower:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source))
        rename(source, target, **keywords)

    def moved(path, target):  # in Python 3.10 it does not ask `os`
        refuse(path, target)
        return Path(target)

    def from_an_image(folder):
        for path in folder.rglob("*"):
            if path.is_dir():
                held.append(os.open(path, os.O_RDONLY))  # so that its number is not given again
                lower.add(path.stat().st_ino)
        monkeypatch.setattr(os, "rename", refuse)
        monkeypatch.setattr(Path, "rename", moved)

    yield from_an_image
    for descriptor in held:
        os.close(descriptor)


@pytest.fixture
def image(cache_dir, put, from_an_image):
    """A cache of three entries that came with an image."""
    cache = Cache(cache_dir, fsync=False)
    made = [put(cache, number) for number in range(3)]
    from_an_image(cache_dir)
    return cache, made


def test_damage_is_replaced(image, put):
    cache, made = image
    key, entry = made[0]
    (entry.path / "out.so").write_bytes(b"damaged")
    assert cache.find(key) is None
    assert not entry.path.exists()
    put(cache, 0, b"again")
    assert cache.find(key).read("out.so") == b"again"


def test_an_entry_without_a_manifest_is_replaced(image, put):
    cache, made = image
    key, entry = made[0]
    (entry.path / NAME).unlink()  # as by a process that was killed while it removed it
    assert cache.find(key) is None
    put(cache, 0, b"again")
    assert cache.find(key).read("out.so") == b"again"


def test_entries_are_removed(image):
    cache, made = image
    paths = [entry.path for _, entry in made]
    assert cache_tools.remove(cache, paths) == paths
    assert list(cache.paths()) == []


def test_the_manifest_goes_first(image, monkeypatch):
    cache, made = image
    gone = []
    unlink = os.unlink

    def note(path, **keywords):
        gone.append(os.path.basename(path))
        unlink(path, **keywords)

    monkeypatch.setattr(os, "unlink", note)
    monkeypatch.setattr(Path, "unlink", lambda path, **_: note(path))  # Python 3.10's own
    cache.remove(made[0][1].path)
    assert "out.so" in gone[1:]
    assert gone[0] == NAME


def test_the_automatic_run_frees_space(image):
    cache, made = image
    for _, entry in made:
        os.utime(entry.path / NAME, (1, 1))
    eviction.after_publish(cache, 10**9, max_size=100, max_age=0)
    assert list(cache.paths()) == []


def test_a_refresh_replaces_what_the_image_brought(
    compiler, variant, target, cache_dir, from_an_image
):
    path = jit.ensure(variant, target).path
    from_an_image(cache_dir)
    assert jit.ensure(variant, target, refresh=True).path == path
    assert len(compiler.compiles) == 2
    assert jit.open_cache().find(jit.key_of(variant, target))


@pytest.mark.long
def test_on_a_real_overlay(put, tmp_path):
    if not shutil.which("unshare"):
        pytest.skip("needs unshare to mount an overlay")
    folders = [tmp_path / name for name in ("lower", "upper", "work", "merged")]
    for folder in folders:
        folder.mkdir(mode=0o700)
    lower, upper, work, merged = folders
    for number in range(4):
        put(Cache(lower / "cache", fsync=False), number)
    options = f"lowerdir={lower},upperdir={upper},workdir={work},redirect_dir=off"
    mount = f"mount -t overlay -o {options} overlay {merged}"
    alone = ["unshare", "-m" if os.geteuid() == 0 else "-rm", "sh", "-c"]
    if subprocess.run([*alone, mount], capture_output=True, check=False).returncode:
        pytest.skip("no overlay can be mounted here")
    script = tmp_path / "on_overlay.py"
    script.write_text(ON_OVERLAY)
    command = f"{mount} && exec {sys.executable} {script} {merged}/cache"
    done = subprocess.run([*alone, command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
