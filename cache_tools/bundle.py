"""Bundles: entries of a cache in one file that any machine can check and take in.

    bundle.json                              [target, folder, SHA-256 of the manifest] of each
    <target>/<folder>/manifest.sig           where the entry is signed
    <target>/<folder>/manifest.json
    <target>/<folder>/<artifact>             as the manifest lists them, by name

It is a USTAR archive, or that in one Zstandard frame. Equal entries give equal bytes, and a reader
takes nothing but the bytes that `pack` writes: each header is made again and compared, so that no
link, device, extension, odd name or odd number gets anywhere. What is read is bounded before it is
held in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import uuid
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, NamedTuple

from jitkern.cache_tools import signing
from jitkern.cache_tools.listing import Row

from jitkern import signature
from jitkern.cache import Cache
from jitkern.entry import Entry
from jitkern.errors import JitkernError
from jitkern.manifest import LOG, MAX_BYTES, NAME, Artifact, Manifest

INDEX = "bundle.json"
SCHEMA = 1
LEVEL = 10  # of Zstandard: part of the format, since equal entries are to give equal bytes
BLOCK = 512
CHUNK = 1 << 20
MAX_INDEX = 64 << 20
MAX_FILE = 512 << 20
MAX_ENTRY = 1 << 30  # all files of one, which are in memory together
MAX_BUNDLE = 8 << 30
MAX_MEMBERS = 100_000
MAX_RATIO = 200  # of uncompressed to compressed bytes, after the first `CHUNK`
REMEDY = 'pip install "jitkern[zstd]"'
_TARGET = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9._+!-]*-torch[A-Za-z0-9._+!-]+")
_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9._+!-]*-[0-9a-f]{16}")
_SHA = re.compile("[0-9a-f]{64}")
_ODD = {
    b"\0": "an entry of an old tar", b"1": "a hard link", b"2": "a symbolic link",
    b"3": "a device", b"4": "a device", b"5": "a directory", b"6": "a FIFO",
    b"g": "a pax header", b"x": "a pax header", b"K": "a GNU long name", b"L": "a GNU long name",
}  # fmt: skip


class BundleError(JitkernError, ValueError):
    """A bundle or wheel cannot be made, or what is in one is not taken; `path` is its file."""

    path: str = ""


Place = tuple[str, str, str]  # target, folder name, and SHA-256 of the manifest


class Packed(NamedTuple):
    """An entry in a bundle."""

    place: Place
    manifest: Manifest
    files: dict[str, bytes]

    @property
    def target(self) -> str:
        """What it is built for."""
        return self.place[0]

    @property
    def name(self) -> str:
        """Its folder's."""
        return self.place[1]


class Unpacked(NamedTuple):
    """How many entries were new to the cache and how many not, and bytes of the new artifacts."""

    new: int
    present: int
    bytes: int


def pack(cache: Cache, chosen: Iterable[tuple[Row, Entry]], output: Path) -> int:
    """Write entries to `output`, a `.tar` or `.tar.zst`; how many they are.

    Raises BundleError, and then leaves nothing.
    """
    compressed = _is_compressed(output)
    entries = {(row.target, entry.path.name): entry for row, entry in chosen}
    if not entries:
        raise BundleError(f"nothing to pack: no entry of {cache.root} is chosen")
    index = [
        (*place, hashlib.sha256(entry.manifest.encode()).hexdigest())
        for place, entry in sorted(entries.items())
    ]
    with written(output) as file:
        with _deflating(file) if compressed else contextlib.nullcontext(file) as stream:
            _write(stream, INDEX, _index_bytes(index))
            for target, name, _ in index:
                for part, data in shipped(entries[target, name]).items():
                    _write(stream, f"{target}/{name}/{part}", data)
            stream.write(bytes(2 * BLOCK))
        file.seek(0)
        try:
            for _ in read(file, compressed=compressed):
                pass  # every limit of the reader holds, so whoever gets it can unpack it
        except BundleError as e:
            raise BundleError(f"these entries make no bundle: {e}; choose fewer") from e
    return len(index)


def unpack(
    cache: Cache, path: Path, *, keys: tuple[str, ...] = (), dry_run: bool = False
) -> Unpacked:
    """Publish the entries of a bundle that the cache has not yet, once all of it proved good.

    keys: one of these must have signed every entry; none where no signature is needed. dry_run:
    only check. Raises BundleError, and CacheError where the cache cannot be written.
    """
    compressed = _is_compressed(path)
    try:
        with path.open("rb") as file:
            new, present = _looked_through(cache, read(file, compressed=compressed, keys=keys))
            if new and not dry_run:
                file.seek(0)
                _publish(cache, read(file, compressed=compressed, keys=keys), new, present)
    except BundleError as e:
        raise BundleError(f"the bundle {path} is refused: {e}", path=str(path)) from e
    except (OSError, MemoryError) as e:
        reason = getattr(e, "strerror", "") or "not enough memory"
        raise BundleError(f"the bundle {path} cannot be read: {reason}", path=str(path)) from e
    return Unpacked(len(new), len(present), sum(new.values()))


def read(file: BinaryIO, *, compressed: bool, keys: tuple[str, ...] = ()) -> Iterator[Packed]:
    """The entries of a bundle, each checked; all of it is good once the last was taken.

    keys: one of these must have signed a manifest before anything in it is looked at. Raises
    BundleError for whatever `pack` would not have written, and OSError.
    """
    stream = _Stream(_inflated(file) if compressed else iter(lambda: file.read(CHUNK), b""))
    _, size = stream.header(INDEX)
    for target, name, sha256 in _index_of(stream.content(size, MAX_INDEX)):
        yield _packed(stream, target, name, sha256, keys)
    stream.finish()


def shipped(entry: Entry) -> dict[str, bytes]:
    """The files of an entry that another machine gets, in the order of a bundle.

    Not the log: no hash covers it, and it holds paths of this machine. Raises BundleError.
    """
    try:
        data = signing.manifest_bytes(entry)
        signatures = signing.signatures(entry)
        artifacts = {name: entry.read(name) for name in sorted(entry.manifest.artifacts)}
    except (OSError, ValueError) as e:
        raise BundleError(f"{entry.path} cannot be shipped: {e}; see `jitkern cache verify`") from e
    return {**({signature.NAME: signatures} if signatures else {}), NAME: data, **artifacts}


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name once it is whole, or never. Raises BundleError."""
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("x+b") as file:
            yield file
        temporary.replace(path)
    except OSError as e:
        raise BundleError(
            f"{path} cannot be written: {e.strerror or e}; name a file in a directory that can be",
            path=str(path),
        ) from e
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _looked_through(
    cache: Cache, bundle: Iterator[Packed]
) -> tuple[dict[Place, int], dict[Place, int]]:
    """The entries that the cache has not yet and those that it has, with bytes of artifacts."""
    found = {packed.place: (packed.manifest.digest, _bytes(packed.manifest)) for packed in bundle}
    new: dict[Place, int] = {}
    present: dict[Place, int] = {}
    for place, (digest, size) in found.items():  # all of it was good: now the cache is asked
        missing = cache.look_up(place[0], place[1], digest).entry is None
        (new if missing else present)[place] = size
    return new, present


def _publish(
    cache: Cache,
    bundle: Iterator[Packed],
    new: Collection[Place],
    present: Collection[Place],
) -> None:
    """Publish what is new; everything was read and checked again, and is to be what it was."""
    left = {*new, *present}
    for packed in bundle:
        if packed.place not in left:
            break
        left.remove(packed.place)
        if packed.place in new:
            cache.adopt(packed.target, packed.name, packed.files)
    else:
        if not left:
            return
    raise BundleError("it was changed while it was read")


class _Stream:
    """The members of an archive, one after the other, and never more than is bounded."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")
        self._left = MAX_BUNDLE
        self._members = 0
        self._name = ""  # of the member in hand

    def header(self, *expected: str) -> tuple[str, int]:
        """Name and size of the next member, which must be one of those."""
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise BundleError(f"it has more than {MAX_MEMBERS} members")
        block = self._take(BLOCK, expected[-1])
        parts = (block[345:500].split(b"\0")[0], block[:100].split(b"\0")[0])
        name = str(b"/".join(filter(None, parts)))[2:-1]  # what is not plain ASCII is escaped
        if not any(block):
            raise BundleError(f"it ends before `{expected[-1]}`")
        if block[156:157] != b"0":
            kind = _ODD.get(block[156:157], "of an unknown type")
            raise BundleError(f"`{name}` is {kind}: only regular files belong in a bundle")
        if name not in expected:
            raise BundleError(f"`{name}` stands where `{expected[-1]}` belongs")
        size = block[124:135]
        if not re.fullmatch(rb"[0-7]{11}", size) or block != _header(name, int(size, 8)):
            raise BundleError(f"the header of `{name}` is not as jitkern writes it")
        self._name = name
        return name, int(size, 8)

    def content(self, size: int, limit: int) -> bytes:
        """What follows a header."""
        if size > limit:
            raise BundleError(f"`{self._name}` has {size} bytes, and at most {limit} are taken")
        data = self._take(size, f"the end of `{self._name}`")
        if any(self._take(-size % BLOCK, f"the end of `{self._name}`")):
            raise BundleError(f"something is hidden after `{self._name}`")
        return data

    def finish(self) -> None:
        """Nothing but the end may follow."""
        if any(self._take(2 * BLOCK, "its end")) or any(self._chunks) or self._rest:
            raise BundleError("something follows its last file")

    def _take(self, size: int, what: str) -> bytes:
        self._left -= size
        if self._left < 0:
            raise BundleError(f"it has more than {MAX_BUNDLE} bytes")
        parts = []
        while size:
            self._rest = self._rest or memoryview(next(self._chunks, b""))
            if not self._rest:
                raise BundleError(f"it is cut off before {what}")
            parts.append(self._rest[:size])
            self._rest = self._rest[size:]
            size -= len(parts[-1])
        return b"".join(parts)


def _header(name: str, size: int) -> bytes:
    """The block before a file. Raises BundleError where the name does not fit."""
    prefix, base = "", name
    for _ in range(2 if len(name) > 100 else 0):
        if len(base) > 100:
            head, _, base = base.partition("/")
            prefix = f"{prefix}/{head}".lstrip("/")
    if len(base) > 100 or len(prefix) > 155 or not name.isascii():
        raise BundleError(f"the name `{name}` does not fit a USTAR archive: choose other entries")
    block = b"".join((
        base.encode().ljust(100, b"\0"), b"0000644\0", b"0000000\0" * 2,  # mode, uid, gid
        b"%011o\0" % size, b"%011o\0" % 0, b" " * 8, b"0", bytes(100),  # mtime, checksum, type
        b"ustar\00000", bytes(80), prefix.encode().ljust(155, b"\0"), bytes(12),
    ))  # fmt: skip
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _write(stream: BinaryIO, name: str, data: bytes) -> None:
    stream.write(_header(name, len(data)))
    stream.write(data)
    stream.write(bytes(-len(data) % BLOCK))


def _packed(stream: _Stream, target: str, name: str, sha256: str, keys: tuple[str, ...]) -> Packed:
    """The next entry, which must be this one."""
    place = f"{target}/{name}"
    signed, plain = f"{place}/{signature.NAME}", f"{place}/{NAME}"
    files = {}
    found, size = stream.header(signed, plain)
    if found == signed:
        files[signature.NAME] = stream.content(size, signature.MAX_BYTES)
        found, size = stream.header(plain)
    data = files[NAME] = stream.content(size, MAX_BYTES)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise BundleError(f"`{plain}` is not what {INDEX} lists")
    reason = signature.distrust(data, files.get(signature.NAME, b""), keys) if keys else ""
    if reason:
        raise BundleError(f"`{place}` is not trusted: {reason}")
    manifest = _manifest_of(target, name, data)
    for file, artifact in sorted(manifest.artifacts.items()):
        _, size = stream.header(f"{place}/{file}")
        files[file] = stream.content(size, min(MAX_FILE, artifact.size))
        if Artifact.of(files[file]) != artifact:
            raise BundleError(f"`{place}/{file}` is not what its manifest lists")
    return Packed((target, name, sha256), manifest, files)


def _manifest_of(target: str, name: str, data: bytes) -> Manifest:
    """The manifest in `data`, if an entry of this name may have it."""
    try:
        manifest = Manifest.decode(data)
        problem = _problem(manifest, target, name, data)
    except (ValueError, RecursionError) as e:
        problem = str(e)
    if problem:
        raise BundleError(f"the manifest of `{target}/{name}` is not usable: {problem:.200}")
    return manifest


def _problem(manifest: Manifest, target: str, name: str, data: bytes) -> str:
    """Why this entry may not have that manifest, or ""."""
    if manifest.encode() != data:
        return "it is not canonical"
    if (manifest.inputs["target"], manifest.digest[:16]) != (target, name.rpartition("-")[2]):
        return "it belongs to another entry"
    if manifest.artifacts.keys() & {NAME, signature.NAME, LOG}:
        return "it lists a file that is no artifact"
    if _bytes(manifest) > MAX_ENTRY:
        return f"it lists more than {MAX_ENTRY} bytes"
    return ""


def _bytes(manifest: Manifest) -> int:
    return sum(artifact.size for artifact in manifest.artifacts.values())


def _index_bytes(entries: Iterable[tuple[str, ...]]) -> bytes:
    return json.dumps(
        {"entries": [[*entry] for entry in entries], "schema": SCHEMA},
        separators=(",", ":"),
    ).encode()


def _index_of(data: bytes) -> list[tuple[str, str, str]]:
    """What `bundle.json` lists, each name of it safe, and in the order of `pack`."""
    try:
        found = json.loads(data)
        schema = found["schema"]
        listed = found["entries"] if schema == SCHEMA else ()
        entries = [(str(target), str(name), str(sha)) for target, name, sha in listed]
        canonical = _index_bytes(entries)
    except (KeyError, TypeError, ValueError, RecursionError) as e:
        raise BundleError(f"{INDEX} does not parse: {e}") from e
    if schema != SCHEMA:
        raise BundleError(f"it has schema {schema!r:.40}, and this jitkern reads schema {SCHEMA}")
    if canonical != data:
        raise BundleError(f"{INDEX} is not as jitkern writes it")
    for before, (target, name, sha256) in zip([("", "", ""), *entries], entries):
        if not (_TARGET.fullmatch(target) and _NAME.fullmatch(name) and _SHA.fullmatch(sha256)):
            raise BundleError(f"{INDEX} lists {target!r:.99}, {name!r:.99}, which is no entry")
        if before[:2] >= (target, name):
            raise BundleError(f"{INDEX} lists `{target}/{name}` twice, or not in order")
    return entries


def _is_compressed(path: Path) -> bool:
    """Whether a bundle of this name is. Raises BundleError for any other name."""
    if not path.name.endswith((".tar", ".tar.zst")):
        raise BundleError(f"`{path}` is no name of a bundle: expected NAME.tar or NAME.tar.zst")
    return path.suffix == ".zst"


@contextlib.contextmanager
def _deflating(file: BinaryIO) -> Iterator[BinaryIO]:
    """A file that is written to `file` as one Zstandard frame."""
    with _zstd().ZstdFile(file, "w", level=LEVEL) as stream:
        yield stream


def _inflated(file: BinaryIO) -> Iterator[bytes]:
    """The content of the one Zstandard frame that `file` is to be, by at most `CHUNK` bytes."""
    zstd = _zstd()
    frame = zstd.ZstdDecompressor()
    read = given = 0
    while not frame.eof:
        data = file.read(CHUNK) if frame.needs_input else b""
        if frame.needs_input and not data:
            raise BundleError("its Zstandard frame is cut off")
        try:
            chunk = frame.decompress(data, max_length=CHUNK)
        except zstd.ZstdError as e:
            raise BundleError(f"its Zstandard frame is corrupt: {e}") from e
        read += len(data)
        given += len(chunk)
        if given > CHUNK + MAX_RATIO * read:
            raise BundleError(f"it inflates to more than {MAX_RATIO} times its size")
        if chunk:
            yield chunk
    if frame.unused_data or file.read(1):
        raise BundleError("something follows its Zstandard frame")


def _zstd() -> ModuleType:
    """The module of Python 3.14, or the package that brings it to earlier ones."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError as e:
        raise JitkernError(f"a .tar.zst needs Zstandard: {REMEDY}", remedy=REMEDY) from e
    return zstd
