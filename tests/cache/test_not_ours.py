"""What lies in the cache's directory and is not jitkern's is left alone, whatever is done there."""

import os
import time
from pathlib import Path

import pytest
from helpers import published

from jitkern import cache_tools, config
from jitkern.cache import eviction, layout
from jitkern.cache.layout import TAG, TAG_TEXT
from jitkern.cache.manifest import NAME
from jitkern.cache.root import QUARANTINED
from jitkern.cache.store import Cache
from jitkern.errors import CacheError

LONG_AGO = time.time() - 90 * 86400
A_TARGET, AN_ENTRY = "cpu-x86_64-torch2.13.0", "softmax.f32-0123456789abcdef"
FOREIGN = (
    "notes", "v1/models/llama/weights", "v1/models/README", "v1/README",
    f"v1/{A_TARGET}/models/weights", f"v1/{A_TARGET}/{AN_ENTRY}/weights",
    f"v1/{A_TARGET}/gelu-0123456789abcdef/{NAME}", f"v1/models/{AN_ENTRY}/{NAME}",
    "v1/tmp/mine/notes", "v1/trash/photos/1", "v1/bad/photos/1", "v1/stats/of-my-thesis.jsonl",
    "v1/pins/models/llama", "v1/prewarm/notes", "receipts/notes", f"receipts/{'0' * 64}",
    "v1.bad.1/notes", "v1.bad.notes",
)  # fmt: skip


def listing(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a folder that is not a directory: content, mode and time."""
    return {
        str(path.relative_to(folder)): (
            path.read_bytes() if path.is_file() else os.readlink(path),
            path.lstat().st_mode, path.lstat().st_mtime_ns,
        )
        for path in folder.rglob("*") if path.is_symlink() or path.is_file()
    }  # fmt: skip


def age(folder: Path) -> None:
    """Make all below a folder look as if it was not used for a long time."""
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (LONG_AGO, LONG_AGO), follow_symlinks=False)


@pytest.fixture
def put(variant, target):
    def put(cache, number, age=90 * 86400):
        key, entry = published(cache, variant, target, f"-D{number}", out_so=b"x" * 1000)
        os.utime(entry.path / NAME, (time.time() - age,) * 2)
        return key, entry

    return put


@pytest.fixture(params=["tagged", "not tagged"])
def root(request, cache_dir):
    cache_dir.mkdir(mode=0o700)
    for name in FOREIGN:
        (cache_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (cache_dir / name).write_text(f"my {name}")
    if request.param == "tagged":
        (cache_dir / TAG).write_text(TAG_TEXT)
    age(cache_dir)
    return cache_dir


def everything_automatic(cache, put):
    """All that a process does to a cache without being asked, more often than it keeps anything."""
    for number in range(QUARANTINED + 2):
        key, entry = put(cache, number)
        (entry.path / "out.so").write_bytes(b"damaged")
        assert cache.find(key) is None
    key, entry = put(cache, 0)
    cache.keep_log(key, entry.path)
    eviction.after_publish(cache, 10**9, max_size=1, max_age=1)
    cache.purge(0.0)
    with cache.staging():
        pass


def verbs(cli, put, cache):
    """Every verb that takes something away."""
    cli("cache", "prune", "--older-than", "1s", "--max-size", "1", "--stale", "--yes")
    cli("cache", "clear", "--older-than", "1s", "--yes")
    cli("cache", "clear", "--yes")
    cli("cache", "verify")


@pytest.mark.parametrize("work", [everything_automatic, verbs], ids=lambda work: work.__name__)
def test_files_of_others_are_left_alone(work, root, put, cli, caplog):
    before = {name: value for name, value in listing(root).items() if name in FOREIGN}
    assert len(before) == len(FOREIGN)
    cache = Cache(root, fsync=False)
    put(cache, 1)
    work(*((cache, put) if work is everything_automatic else (cli, put, cache)))
    after = listing(root)
    assert {name: after.get(name) for name in before} == before
    assert ("holds other files than jitkern's" in caplog.text) == (not (root / TAG).exists())


def test_a_root_with_other_files_serves_and_is_never_emptied(cache_dir, put, cli):
    (cache_dir / "v1" / "models").mkdir(parents=True)
    cache_dir.chmod(0o700)
    cache = Cache(cache_dir, fsync=False)
    key, _ = put(cache, 1)
    eviction.after_publish(cache, 10**9, max_size=1, max_age=1)
    cache.purge(0.0)
    assert cache.find(key)
    assert not (cache_dir / TAG).exists()
    code, _, err = cli("cache", "clear", "--yes")
    assert code == 3
    assert "held other files" in err
    assert cache.find(key)


def test_a_tag_of_another_program_is_no_tag_of_ours(cache_dir, put):
    cache_dir.mkdir(mode=0o700)
    other = TAG_TEXT.splitlines()[0] + "\n# This is a cache of another program.\n"
    (cache_dir / TAG).write_text(other)
    cache = Cache(cache_dir, fsync=False)
    _, entry = put(cache, 1)
    with pytest.raises(CacheError, match="nothing is removed"):
        cache_tools.remove(cache, [entry.path])
    assert (cache_dir / TAG).read_text() == other


@pytest.mark.parametrize("found", ["", "lost+found", ".DS_Store", "receipts"])
def test_an_empty_directory_becomes_a_cache(cache_dir, put, found):
    (cache_dir / found).mkdir(parents=True)
    cache = Cache(cache_dir, fsync=False)
    _, entry = put(cache, 1)
    assert (cache_dir / TAG).read_text() == TAG_TEXT
    assert cache_tools.remove(cache, [entry.path]) == [entry.path]


@pytest.mark.parametrize(
    "place", ["v1/link-torch1", f"v1/{A_TARGET}/{AN_ENTRY}", "v1/trash", "v1/bad", "v1/tmp",
              "v1/stats", "receipts"],
)  # fmt: skip
def test_links_are_not_followed(place, cache_dir, put, cli, tmp_path):
    documents = tmp_path / "documents"
    cache = Cache(cache_dir, fsync=False)
    put(cache, 1)
    names = (f"{AN_ENTRY}/{NAME}", f"1.{AN_ENTRY}/{NAME}", f"{'0' * 32}/a", "01.jsonl", "02.jsonl",
             "0" * 64)  # fmt: skip
    for name in names:
        (documents / name).parent.mkdir(parents=True, exist_ok=True)
        (documents / name).write_text('{"artifacts":{"my": "thesis"}}')
    link = cache_dir / place
    if link.is_dir():
        for inside in link.iterdir():
            inside.rename(tmp_path / inside.name)
        link.rmdir()
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(documents)
    age(documents)
    before = listing(documents)
    with config.using(fsync=False):
        verbs(cli, put, cache)
        cache.purge(0.0)
        try:
            key, entry = put(cache, 2)
            (entry.path / "out.so").write_bytes(b"damaged")
            cache.find(key)
            cache.remove(put(cache, 3)[1].path)
        except CacheError:
            pass
    assert listing(documents) == before


def test_a_file_in_place_of_the_version_stays_beside_others(cache_dir, put):
    cache_dir.mkdir(mode=0o700)
    (cache_dir / "v1").write_text("my first version")
    (cache_dir / "notes").write_text("mine")
    with pytest.raises(CacheError, match="is a file; remove it"):
        put(Cache(cache_dir, fsync=False), 1)
    assert (cache_dir / "v1").read_text() == "my first version"


@pytest.mark.parametrize("left", [b"", bytes(len(TAG_TEXT))])
def test_a_tag_that_a_power_cut_emptied_is_written_again(cache_dir, put, left):
    put(Cache(cache_dir), 1)
    (cache_dir / TAG).write_bytes(left)
    _, entry = put(Cache(cache_dir), 2)
    assert (cache_dir / TAG).read_text() == TAG_TEXT
    assert cache_tools.remove(Cache(cache_dir), [entry.path]) == [entry.path]


def test_a_directory_that_becomes_a_cache_meanwhile_is_one(cache_dir, put, monkeypatch, caplog):
    asked = layout.has_other_tag

    def late(root):
        (root / TAG).write_text(TAG_TEXT)
        return asked(root)

    monkeypatch.setattr(layout, "has_other_tag", late)
    put(Cache(cache_dir, fsync=False), 1)
    assert "holds other files" not in caplog.text
