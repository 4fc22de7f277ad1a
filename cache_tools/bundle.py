"""Bundles: entries of a cache in one file that any machine can check and take in.

    bundle.json                              [target, folder, SHA-256 of the manifest] of each
    <target>/<folder>/manifest.sig           where the entry is signed
    <target>/<folder>/manifest.json
    <target>/<folder>/<artifact>             as the manifest lists them, by name

It is a USTAR archive, or that in one Zstandard frame. Equal entries give equal bytes, and a reader
takes nothing but the bytes that `pack` writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

from jitkern.cache.entry import Entry
from jitkern.cache.layout import is_entry_name, is_target
from jitkern.cache.manifest import MAX_BYTES, NAME, Artifact, Manifest
from jitkern.cache.store import Cache
from jitkern.cache_tools import signing
from jitkern.cache_tools.listing import Row
from jitkern.cache_tools.ustar import BLOCK, CHUNK, BundleError, Stream, deflating, inflated, write
from jitkern.files import signature

INDEX = "bundle.json"
SCHEMA = 1
MAX_INDEX = 16 << 20  # of what lists as many entries as a bundle may have members
MAX_FILE = 512 << 20
MAX_ENTRY = 1 << 30  # all files of one, which are in memory together
_TEXT = rb'"((?:[^"\\]|\\.){0,999})"'
_ROW = re.compile(rb"\[%s,%s,%s\]" % (_TEXT, _TEXT, _TEXT))
_SHA = re.compile("[0-9a-f]{64}")
_SCHEMA = re.compile(rb',"schema":([^"\]}]{1,40})\}$')


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
    return written_without_gone(
        cache, chosen, lambda entries: _pack(entries, output, compressed=compressed)
    )


Entries = dict[tuple[str, str], Entry]  # by target and folder name
T = TypeVar("T")


def written_without_gone(
    cache: Cache, chosen: Iterable[tuple[Row, Entry]], write_all: Callable[[Entries], T]
) -> T:
    """Call `write_all` with the chosen entries, again without those that were removed meanwhile.

    Raises BundleError, also where there are none.
    """
    entries = {(row.target, entry.path.name): entry for row, entry in chosen}
    while entries:
        try:
            return write_all(entries)
        except BundleError:
            left = {place: entry for place, entry in entries.items() if entry.path.exists()}
            if len(left) == len(entries):
                raise
            entries = left
    raise BundleError(f"nothing to pack: no entry of {cache.root} is chosen")


def _pack(entries: Entries, output: Path, *, compressed: bool) -> int:
    index = [
        (*place, hashlib.sha256(entry.manifest.encode()).hexdigest())
        for place, entry in sorted(entries.items())
    ]
    with written(output) as file:
        with deflating(file) if compressed else contextlib.nullcontext(file) as stream:
            write(stream, INDEX, _index_bytes(index))
            for target, name, _ in index:
                for part, data in shipped(entries[target, name]).items():
                    write(stream, f"{target}/{name}/{part}", data)
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
    stream = Stream(inflated(file) if compressed else iter(lambda: file.read(CHUNK), b""))
    _, size = stream.header(INDEX)
    for target, name, sha256 in _index_of(stream.content(size, MAX_INDEX)):
        yield _packed(stream, target, name, sha256, keys)
    stream.finish()


def shipped(entry: Entry) -> dict[str, bytes]:
    """The files of an entry, in the order of a bundle. Raises BundleError."""
    try:
        signing.manifest_bytes(entry)  # the signatures are of what lies there
        return entry.files()
    except (OSError, ValueError) as e:
        raise BundleError(f"{entry.path} cannot be shipped: {e}; see `jitkern cache verify`") from e


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


def _packed(stream: Stream, target: str, name: str, sha256: str, keys: tuple[str, ...]) -> Packed:
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


def _index_of(data: bytes) -> list[Place]:
    """The entries that `bundle.json` lists, each name safe, and in the order of `pack`.

    It is read row by row, and only as `pack` writes it: a general parser would make gigabytes of
    some megabytes of brackets.
    """
    schema = _SCHEMA.search(data[-60:])
    if schema and schema[1] != b"%d" % SCHEMA:
        found = schema[1].decode("ascii", "replace")
        raise BundleError(f"it has schema {found}, and this jitkern reads schema {SCHEMA}")
    entries: list[Place] = []
    at = len(b'{"entries":[')
    while row := _ROW.match(data, at):
        target, name, sha256 = (part.decode("ascii", "replace") for part in row.groups())
        if not (is_target(target) and is_entry_name(name) and _SHA.fullmatch(sha256)):
            raise BundleError(f"{INDEX} lists {target!r:.99}, {name!r:.99}, which is no entry")
        if entries and entries[-1][:2] >= (target, name):
            raise BundleError(f"{INDEX} lists `{target}/{name}` twice, or not in order")
        entries.append((target, name, sha256))
        at = row.end() + 1
    if not entries:
        raise BundleError(f"{INDEX} lists no entry, or is not as jitkern writes it")
    if data != _index_bytes(entries):
        raise BundleError(f"{INDEX} is not as jitkern writes it")
    return entries


def _is_compressed(path: Path) -> bool:
    """Whether a bundle of this name is. Raises BundleError for any other name."""
    if not path.name.endswith((".tar", ".tar.zst")):
        raise BundleError(f"`{path}` is no name of a bundle: expected NAME.tar or NAME.tar.zst")
    return path.suffix == ".zst"
