"""Bundles that were changed at random: an error, or what was packed."""

import os
import random
import re
import shutil
import sys

import pytest
from bundling import SUFFIXES, fixed, listing, packed, shipped

from jitkern.cache.store import Cache
from jitkern.cache_tools import bundle
from jitkern.cache_tools.bundle import BLOCK, BundleError

pytest.importorskip("cryptography")
zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


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
         random.randbytes(3), bytes([random.randrange(256)]), b"00000000001", b"manifest.json")
    )  # fmt: skip
    where = field + random.choice((0, random.randrange(end - field)))
    header[where : min(end, where + len(value))] = value[: end - where]
    data[at : at + BLOCK] = fixed(bytes(header[:BLOCK]))


MUTATIONS = (flip, overwrite, truncate, swap, duplicate, insert, delete, edit_header, edit_header)


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


@pytest.mark.long
@pytest.mark.parametrize(("count", "seed"), [(300, 0), (10_000, 1_000_000)])
def test_mutated_bundles_are_refused_or_whole(signed, public, tmp_path, count, seed):
    fuzz(count, seed, signed, public, tmp_path)
