"""Bundles of a remote: which entries share one, and how a received one is checked."""

from __future__ import annotations

import hashlib
import io
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from jitkern.cache.entry import Entry
from jitkern.cache.store import Cache
from jitkern.cache_tools import bundle as packing
from jitkern.cache_tools.bundle import Packed, Unpacked
from jitkern.cache_tools.listing import OF_ALL_OPS
from jitkern.cache_tools.ustar import BLOCK, BundleError, has_zstd
from jitkern.remote import layout
from jitkern.remote.index import Bundle
from jitkern.remote.store import Object

MOST_ADOPTED = 2 << 30  # bytes of the artifacts of one bundle
_ZSTD = b"\x28\xb5\x2f\xfd"
_HEADERS = 8 * BLOCK  # bytes of an entry's headers and padding in a bundle, about


def digest_of(entry: Entry) -> str:
    """Return the digest in the name of an entry."""
    return entry.path.name.rpartition("-")[2]


def grouped(entries: Iterable[Entry]) -> dict[str, dict[str, list[Entry]]]:
    """Return entries by machine and package, sorted.

    The package of an entry is the namespace of its op, which tells the same on every machine.
    """
    groups: dict[str, dict[str, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in sorted(entries, key=lambda entry: (entry.op, entry.path)):
        package = layout.RUNTIME_PACKAGE if entry.op in OF_ALL_OPS else entry.op.partition("::")[0]
        groups[layout.machine_of(entry.path.parent.name)][package].append(entry)
    return groups


def packed(
    cache: Cache, package: str, entries: Sequence[Entry], folder: Path, push: str = ""
) -> list[tuple[Bundle, Path]]:
    """Pack the entries of a package; return the index record and the file of each bundle.

    folder: where the files are written, with the names that they have in the remote. push: what
    several packs of a package have in common that count as one push; by default the content.
    Raises BundleError.
    """
    made = [_packed(cache, package, part, folder) for part in _split(entries)]
    names = push or "".join(sorted(bundle.file for bundle, _ in made))
    push = hashlib.sha256(names.encode()).hexdigest()[:16]
    return [(bundle._replace(push=push), path) for bundle, path in made]


def _split(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Divide the entries of a package into bundles; each large entry has its own."""
    part: list[Entry] = []
    left = layout.FULL_BUNDLE
    for entry in entries:
        if entry.size > layout.LARGE_ENTRY:
            yield [entry]
            continue
        size = entry.size + len(entry.manifest.encode()) + _HEADERS
        if part and size > left:
            yield part
            part, left = [], layout.FULL_BUNDLE
        part.append(entry)
        left -= size
    if part:
        yield part


def _packed(
    cache: Cache, package: str, entries: Sequence[Entry], folder: Path
) -> tuple[Bundle, Path]:
    suffix = ".tar.zst" if has_zstd() else ".tar"
    data = packing.packed(cache, entries, compressed=has_zstd())
    path = folder / f"{hashlib.sha256(data).hexdigest()}{suffix}"
    with packing.written(path) as file:
        file.write(data)
    there = list(read(data))  # less than was chosen, if some was removed meanwhile
    digests = sorted({packed.name.rpartition("-")[2] for packed in there})
    version = _newest(package, (packed.manifest.package for packed in there))
    return Bundle(path.name, len(data), package, version, tuple(digests)), path


def _newest(package: str, made_by: Iterable[Mapping[str, str]]) -> str:
    """Return the newest version that the entries of a package name, or ""."""
    own = package.startswith("jitkern")  # jitkern makes the launch records of every package
    texts = {m.get("version", "") for m in made_by if own or m.get("name") != "jitkern"}
    return max(texts, key=lambda text: [*map(int, re.findall(r"\d+", text))], default="")


def read(data: bytes, keys: tuple[str, ...] = ()) -> Iterator[Packed]:
    """Yield the entries in the bytes of a bundle, as `cache_tools.bundle.read` does."""
    yield from packing.read(io.BytesIO(data), compressed=data.startswith(_ZSTD), keys=keys)


def checked(found: Object | None, bundle: Bundle) -> bytes:
    """Return the content of a bundle as it came. Raises BundleError if it is not that bundle."""
    if found is None:
        raise BundleError("the index names it, and it is gone")
    sha256 = bundle.file.partition(".")[0]
    if len(found.data) != bundle.bytes or hashlib.sha256(found.data).hexdigest() != sha256:
        raise BundleError("its content is not what its name says")
    return found.data


def adopt(cache: Cache, data: bytes, keys: tuple[str, ...]) -> Unpacked:
    """Publish the entries in the bytes of a bundle that the cache lacks: all, or none.

    keys: as of `cache_tools.bundle.adopt`. What each reader verifies is not waited for until
    it is on the disk, since it can be had again. Raises BundleError and CacheError.
    """
    try:
        return packing.adopt(
            cache, io.BytesIO(data), compressed=data.startswith(_ZSTD), keys=keys,
            limit=MOST_ADOPTED, fsync=cache.verify != "always",
        )  # fmt: skip
    except (OSError, MemoryError) as e:
        raise BundleError(getattr(e, "strerror", "") or "not enough memory") from e
