"""Bundles: entries of a cache in one file that any machine can check and unpack.

    <target>/<folder>/manifest.sig           where the entry is signed
    <target>/<folder>/manifest.json
    <target>/<folder>/<artifact>             as the manifest lists them, by name

A bundle is a USTAR archive, plain or in one Zstandard frame, with its entries in order. Equal
entries give equal bytes, and the reader accepts only the bytes that `pack` writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import logging
import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jitkern.cache.entry import Entry
from jitkern.cache.layout import is_entry_name, is_target
from jitkern.cache.manifest import MAX_BYTES, NAME, Artifact, Manifest
from jitkern.cache.store import Cache
from jitkern.cache_tools import signing
from jitkern.cache_tools.check import existing, human_bytes
from jitkern.cache_tools.ustar import (
    BLOCK,
    CHUNK,
    MAX_BUNDLE,
    BundleError,
    Stream,
    deflating,
    header_of,
    inflated,
    write,
)
from jitkern.files import signature

SUFFIXES = (".tar", ".tar.zst")  # of the names of bundles
MAX_FILE = 512 << 20
MAX_ENTRY = 1 << 30  # bytes of all files of an entry, which are in memory together
_BESIDE = 16 << 10  # bytes on the disk for the manifest of an entry, and what blocks waste
_log = logging.getLogger(__name__)


Place = tuple[str, str, str]  # target, folder name, and SHA-256 of the manifest


class Packed(NamedTuple):
    """An entry in a bundle: its target and folder name, the SHA-256 of its manifest, its files."""

    target: str
    name: str
    sha256: str
    manifest: Manifest
    files: dict[str, bytes]

    @property
    def place(self) -> Place:
        """The target, the folder name and the SHA-256 of the manifest."""
        return self[:3]

    @property
    def signers(self) -> list[str]:
        """The public keys that have signed the entry."""
        return signing.signers(self.files[NAME], self.files.get(signature.NAME, b""))


class Unpacked(NamedTuple):
    """The counts of new entries and of entries already present, and bytes of the new artifacts."""

    new: int
    present: int
    bytes: int


def pack(cache: Cache, chosen: Iterable[Entry], output: Path) -> int:
    """Write entries to `output`, a `.tar` or `.tar.zst`, and return their number.

    Those that are not `fitting` are left out. Raises BundleError, and then leaves no file.
    """
    compressed = _is_compressed(output)
    with written(output) as file:
        return _write(cache, fitting(chosen), file, compressed=compressed)


def packed(cache: Cache, entries: Iterable[Entry], *, compressed: bool = False) -> bytes:
    """Return the bytes of a bundle of entries, all of them `fitting`. Raises BundleError."""
    file = io.BytesIO()
    _write(cache, entries, file, compressed=compressed)
    return file.getvalue()


def fitting(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries whose files have names that fit into a bundle; warn about the others.

    Caches may hold longer names: those of an early jitkern, which no lookup asks for any more, and
    those for a target with a very long version of Torch, which serve in their own cache alone.
    """
    fit = []
    for entry in entries:
        place = f"{entry.path.parent.name}/{entry.path.name}"
        try:
            for file in (signature.NAME, NAME, *entry.manifest.artifacts):
                header_of(f"{place}/{file}", 0)
            fit.append(entry)
        except BundleError as e:
            _log.warning("%s is left out: %s", entry.path, e)
    return fit


def _write(cache: Cache, chosen: Iterable[Entry], file: BinaryIO, *, compressed: bool) -> int:
    """Write entries to an open file, read them back, and return their number."""
    count = 0
    with deflating(file) if compressed else contextlib.nullcontext(file) as stream:
        for place, files in shipped(cache, chosen):
            count += 1
            for part, data in files.items():
                write(stream, f"{place}/{part}", data)
        stream.write(bytes(2 * BLOCK))
    file.seek(0)
    try:
        for _ in read(file, compressed=compressed):
            pass  # the reader checks its limits, so that every machine can unpack the bundle
    except BundleError as e:
        raise BundleError(
            f"these entries do not fit into a bundle: {e}; choose fewer entries"
        ) from e
    return count


def unpack(
    cache: Cache, path: Path, *, keys: tuple[str, ...] = (), dry_run: bool = False
) -> Unpacked:
    """Check a whole bundle, then publish the entries that the cache does not have.

    keys: public keys, one of which must have signed each entry; empty if no signature is needed.
    dry_run: only check. Raises BundleError, and CacheError where the cache cannot be written.
    """
    compressed = _is_compressed(path)
    try:
        with path.open("rb") as file:
            return adopt(cache, file, compressed=compressed, keys=keys, dry_run=dry_run)
    except BundleError as e:
        raise BundleError(f"the bundle {path} is refused: {e}", path=str(path)) from e
    except (OSError, MemoryError) as e:
        reason = getattr(e, "strerror", "") or "not enough memory"
        raise BundleError(f"the bundle {path} cannot be read: {reason}", path=str(path)) from e


def adopt(
    cache: Cache,
    file: BinaryIO,
    *,
    compressed: bool,
    keys: tuple[str, ...] = (),
    limit: int = MAX_BUNDLE,
    only: tuple[str, str] | None = None,
    dry_run: bool = False,
    fsync: bool = True,
) -> Unpacked:
    """Check a whole bundle in an open file, then publish the entries that the cache does not have.

    limit: bytes that the artifacts may have. only: target and folder name of the entry that must be
    the only one. keys, dry_run: see `unpack`. fsync: see `Cache.adopt`. Raises BundleError,
    CacheError, OSError and MemoryError.
    """
    bundle = _within(read(file, compressed=compressed, keys=keys), limit, only)
    there = {packed.place: (packed.manifest.digest, _bytes(packed.manifest)) for packed in bundle}
    new = {  # the whole bundle is checked by now
        (target, name, sha256): size
        for (target, name, sha256), (digest, size) in there.items()
        if cache.look_up(target, name, digest).entry is None
    }
    if new and not dry_run:
        _check_space(cache, new)
        file.seek(0)
        again = read(file, compressed=compressed, keys=keys)
        _publish(cache, again, new, there, fsync=fsync)
    return Unpacked(len(new), len(there) - len(new), sum(new.values()))


def _within(bundle: Iterator[Packed], limit: int, only: tuple[str, str] | None) -> Iterator[Packed]:
    """Yield the entries of a bundle. Raises BundleError for more bytes, or for other entries."""
    for packed in bundle:
        limit -= _bytes(packed.manifest)
        if limit < 0:
            raise BundleError("it holds more bytes than the limit")
        if only and packed.place[:2] != only:
            raise BundleError(f"it holds `{packed.target}/{packed.name}`, another entry")
        yield packed


def read(file: BinaryIO, *, compressed: bool, keys: tuple[str, ...] = ()) -> Iterator[Packed]:
    """Yield the entries of a bundle, each checked; the whole bundle is good after the last entry.

    keys: public keys, one of which must have signed each manifest, which is else not parsed. Raises
    BundleError for bytes that `pack` would not have written, and OSError.
    """
    stream = Stream(inflated(file) if compressed else iter(lambda: file.read(CHUNK), b""))
    before: tuple[str, ...] = ()
    while (member := stream.header())[0]:
        packed = _packed(stream, *member, keys)
        if packed.place[:2] <= before:
            raise BundleError(f"`{packed.target}/{packed.name}` occurs twice, or out of order")
        before = packed.place[:2]
        yield packed
    stream.finish()
    if not before:
        raise BundleError("it holds no entry")


def shipped(cache: Cache, chosen: Iterable[Entry]) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield `target/name` and the files of each entry of a cache, in the order of a bundle.

    Entries that were removed meanwhile are left out. Raises BundleError, also if none is left.
    """
    entries = {entry.path.parts[-2:]: entry for entry in chosen}
    found = False
    for (target, name), entry in sorted(entries.items()):
        try:
            signing.manifest_bytes(entry)  # the signatures must match the manifest on the disk
            files = entry.files()
        except (OSError, ValueError) as e:
            if not entry.path.exists():
                continue
            reason = f"{entry.path} cannot be shipped: {e}; see `jitkern cache verify`"
            raise BundleError(reason) from e
        found = True
        yield f"{target}/{name}", files
    if not found:
        raise BundleError(f"nothing to pack: no entry of {cache.root} is chosen")


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write, which gets the name `path` only when whole. Raises BundleError."""
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("x+b") as file:
            yield file
        temporary.replace(path)
    except OSError as e:
        raise BundleError(
            f"{path} cannot be written: {e.strerror or e}; name a file in a writable directory",
            path=str(path),
        ) from e
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _check_space(cache: Cache, new: Mapping[Place, int]) -> None:
    """Raise BundleError if new entries do not fit: half of them would take all that is left."""
    root = existing(cache.root)
    needed = sum(new.values()) + _BESIDE * len(new)
    usage = shutil.disk_usage(root)
    if usage.total and usage.free < needed:  # some file systems count nothing
        raise BundleError(
            f"its {len(new)} new entries need {human_bytes(needed)}, and {human_bytes(usage.free)} "
            f"are left in {root}: free some, or point JITKERN_CACHE_DIR elsewhere"
        )


def _publish(
    cache: Cache,
    bundle: Iterator[Packed],
    new: Collection[Place],
    places: Iterable[Place],
    *,
    fsync: bool,
) -> None:
    """Publish the new entries of a bundle that is read and checked again; it must be unchanged."""
    for place, packed in itertools.zip_longest(places, bundle):
        if packed is None or packed.place != place:
            raise BundleError("it was changed while it was read")
        if place in new:
            cache.adopt(packed.target, packed.name, packed.files, fsync=fsync)


def _packed(stream: Stream, member: str, size: int, keys: tuple[str, ...]) -> Packed:
    """Read the next entry, after the header of its first member."""
    place, _, file = member.rpartition("/")
    target, _, name = place.partition("/")
    named = is_target(target) and is_entry_name(name)
    if not named or file not in (signature.NAME, NAME):
        raise BundleError(f"`{member}` is not a file of an entry, and an entry must begin here")
    files = {}
    if file == signature.NAME:
        files[file] = stream.content(size, signature.MAX_BYTES)
        _, size = stream.header(f"{place}/{NAME}")
    data = files[NAME] = stream.content(size, MAX_BYTES)
    reason = signature.distrust(data, files.get(signature.NAME, b""), keys) if keys else ""
    if reason:
        raise BundleError(f"`{place}` is not trusted: {reason}")
    try:
        manifest = Manifest.decode(data)
        if manifest.encode() != data:
            raise ValueError("it is not canonical")  # noqa: TRY301
        if (manifest.inputs["target"], manifest.digest[:16]) != (target, name.rpartition("-")[2]):
            raise ValueError("it belongs to another entry")  # noqa: TRY301
        if _bytes(manifest) > MAX_ENTRY:
            raise ValueError(f"it lists more than {MAX_ENTRY} bytes")  # noqa: TRY301
    except (ValueError, RecursionError) as e:
        reason = f"the manifest of `{place}` is not usable: {e!s:.200}"
        raise BundleError(reason) from e
    for file, artifact in sorted(manifest.artifacts.items()):
        _, size = stream.header(f"{place}/{file}")
        files[file] = stream.content(size, min(MAX_FILE, artifact.size))
        if Artifact.of(files[file]) != artifact:
            raise BundleError(f"`{place}/{file}` is not what its manifest lists")
    return Packed(target, name, hashlib.sha256(data).hexdigest(), manifest, files)


def _bytes(manifest: Manifest) -> int:
    return sum(artifact.size for artifact in manifest.artifacts.values())


def _is_compressed(path: Path) -> bool:
    """Return whether a bundle of this name is compressed. Raises BundleError for invalid names."""
    if not path.name.endswith(SUFFIXES):
        raise BundleError(f"`{path}` is not a bundle name: expected NAME.tar or NAME.tar.zst")
    return path.suffix == ".zst"
