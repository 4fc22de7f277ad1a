"""Fixtures of bundles."""

import pytest
from bundling import listing
from helpers import published

from jitkern.cache.store import Cache
from jitkern.cache_tools import bundle, chosen, signing
from jitkern.cache_tools.bundle import BLOCK, BundleError
from jitkern.cache_tools.listing import EntryFilter


@pytest.fixture
def publish(variant, target):
    """Publish an entry of its own for each number, with these artifacts."""

    def publish(cache, number, **files):
        files = files or {"out_so": b"code %d" % number, "a_json": b"{}"}
        return published(cache, variant, target, f"-D{number}", **files)[1]

    return publish


@pytest.fixture
def cache(tmp_path, publish):
    """Three entries, of which one has an artifact that is not a multiple of a block long."""
    cache = Cache(tmp_path / "from", fsync=False)
    publish(cache, 1)
    publish(cache, 2, out_so=bytes(range(256)) * 5, meta_json=b"")
    publish(cache, 3, out_cubin=b"x" * BLOCK, b_json=b"[]")
    return cache


@pytest.fixture
def key(tmp_path, signing_package):
    signing.keygen(tmp_path / "key")
    return tmp_path / "key"


@pytest.fixture
def public(key):
    return (key.parent / "key.pub").read_text().split()[1]


@pytest.fixture
def signed(cache, key):
    signing.sign(cache, chosen(cache, EntryFilter()), key)
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
