"""A power cut after entries were adopted without fsync: nothing torn is read; they are fetched again."""

import pytest
from publishing import publish
from test_power_cut import content_of, disk  # noqa: F401  a fixture
from web_servers import fill, trusting

from jitkern import testing
from jitkern.cache.key import Key, digest_of
from jitkern.cache.store import Cache
from jitkern.files import atomic
from jitkern.remote import fetch

TARGET = "cpu-x86_64-torch2.13.0-linux_x86_64"


def key_of(n):
    inputs = {"op": f"test::op{n}", "target": TARGET}
    return Key(inputs, digest_of(inputs), f"op{n}")


KEYS = [key_of(n) for n in range(16)]


@pytest.fixture
def url(tmp_path):
    """A remote with all entries."""
    builder = Cache(tmp_path / "builder", fsync=False)
    for key in KEYS:
        publish(builder, key, content_of(key))
    fill(builder, tmp_path / "remote")
    return f"file://{tmp_path / 'remote'}"


def fetched(cache, key, url):
    with trusting(url):
        return fetch.fetch(fetch.Miss(cache, key, 1.0)) == ""


@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_power_cut_takes_is_fetched_again(disk, url, restarted, monkeypatch):  # noqa: F811
    root = disk.path / "cache"
    assert fetched(Cache(root), KEYS[0], url)
    assert all(Cache(root).find(key) for key in KEYS)
    disk.cut()
    if restarted:
        testing.forget_remotes(monkeypatch)
    cache = Cache(root)
    found = {key.label: cache.look_up(TARGET, key.name, key.digest) for key in KEYS}
    lost = [key for key in KEYS if not found[key.label].entry]
    assert lost  # else nothing was cut
    for key in KEYS:
        if key not in lost:
            assert found[key.label].entry.read("out.so") == content_of(key)
    assert fetched(cache, lost[0], url)
    for key in KEYS:
        assert cache.find(key).read("out.so") == content_of(key)


@pytest.mark.parametrize(("verify", "synced"), [("always", False), ("size", True)])
def test_entries_are_synced_where_hashes_are_not_compared(
    tmp_path, url, verify, synced, monkeypatch
):
    """Sizes alone would not tell a file whose blocks were lost."""
    files = []
    monkeypatch.setattr(atomic, "sync", lambda path: files.append(path.name))
    assert fetched(Cache(tmp_path / "cache", verify=verify), KEYS[0], url)
    assert files.count("out.so") == (16 if synced else 0)
