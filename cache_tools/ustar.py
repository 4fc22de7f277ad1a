"""Write a USTAR archive in exactly one form, and read archives of this form only.

The reader makes each header again and compares it, so that links, devices, extensions, odd names
and odd numbers are refused. It limits the size of data before it holds data in memory.
"""

from __future__ import annotations

import re
import sys
import tarfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import BinaryIO

from jitkern.errors import JitkernError

LEVEL = 10  # of Zstandard: part of the format, since equal entries must give equal bytes
BLOCK = 512
CHUNK = 1 << 20
MAX_BUNDLE = 8 << 30
MAX_MEMBERS = 100_000
MAX_RATIO = 200  # of uncompressed to compressed bytes, after the first `CHUNK`
REMEDY = 'pip install "jitkern[zstd]"'
_ODD = {
    b"\0": "an entry of an old tar", b"1": "a hard link", b"2": "a symbolic link",
    b"3": "a device", b"4": "a device", b"5": "a directory", b"6": "a FIFO",
    b"g": "a pax header", b"x": "a pax header", b"K": "a GNU long name", b"L": "a GNU long name",
}  # fmt: skip


class BundleError(JitkernError, ValueError):
    """A bundle or wheel cannot be made, or a bundle is refused; `path` is the file."""

    path: str = ""


class Stream:
    """The members of an archive, read one after the other within limits of number and size."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")
        self._left = MAX_BUNDLE
        self._members = 0
        self._name = ""  # of the last header

    def header(self, *expected: str) -> tuple[str, int]:
        """Return name and size of the next member. Raises BundleError for a name not expected.

        Without an expected name any will do, and "" is the end of the archive.
        """
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise BundleError(f"it has more than {MAX_MEMBERS} members")
        block = self._take(BLOCK, expected[-1] if expected else "its end")
        parts = (block[345:500].split(b"\0")[0], block[:100].split(b"\0")[0])
        name = str(b"/".join(filter(None, parts)))[2:-1]  # other bytes than ASCII are escaped
        if not any(block):
            if expected:
                raise BundleError(f"it ends before `{expected[-1]}`")
            return "", 0
        if block[156:157] != b"0":
            kind = _ODD.get(block[156:157], "of an unknown type")
            raise BundleError(f"`{name}` is {kind}: only regular files belong in a bundle")
        if expected and name not in expected:
            raise BundleError(f"`{name}` was found where `{expected[-1]}` was expected")
        size = block[124:135]
        if not re.fullmatch(rb"[0-7]{11}", size) or block != header_of(name, int(size, 8)):
            raise BundleError(f"the header of `{name}` is not in jitkern's format")
        self._name = name
        return name, int(size, 8)

    def content(self, size: int, limit: int) -> bytes:
        """Return the content after a header. Raises BundleError for more than `limit` bytes."""
        if size > limit:
            raise BundleError(f"`{self._name}` has {size} bytes, over the limit of {limit}")
        data = self._take(size, f"the end of `{self._name}`")
        if any(self._take(-size % BLOCK, f"the end of `{self._name}`")):
            raise BundleError(f"there is hidden data after `{self._name}`")
        return data

    def finish(self) -> None:
        """Raise BundleError if other than the end follows, which an empty header has begun."""
        if any(self._take(BLOCK, "its end")) or any(self._chunks) or self._rest:
            raise BundleError("there is data after its last file")

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


def header_of(name: str, size: int) -> bytes:
    """Return the header block of a file. Raises BundleError if the name does not fit."""
    info = tarfile.TarInfo(name)
    info.size = size
    try:
        return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")
    except ValueError as e:
        raise BundleError(f"the name `{name}` does not fit a USTAR archive") from e


def write(stream: BinaryIO, name: str, data: bytes) -> None:
    """Append a file to an archive. Raises BundleError if its name does not fit."""
    stream.write(header_of(name, len(data)))
    stream.write(data)
    stream.write(bytes(-len(data) % BLOCK))


def deflating(file: BinaryIO) -> AbstractContextManager[BinaryIO]:
    """Return a stream that writes to `file` as one Zstandard frame."""
    stream: AbstractContextManager[BinaryIO] = _zstd().ZstdFile(file, "w", level=LEVEL)
    return stream


def inflated(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of the one Zstandard frame in `file`, at most `CHUNK` bytes at a time."""
    zstd = _zstd()
    frame = zstd.ZstdDecompressor()
    size_in = size_out = 0
    while not frame.eof:
        data = file.read(CHUNK) if frame.needs_input else b""
        if frame.needs_input and not data:
            raise BundleError("its Zstandard frame is cut off")
        try:
            chunk = frame.decompress(data, max_length=CHUNK)
        except zstd.ZstdError as e:
            raise BundleError(f"its Zstandard frame is corrupt: {e}") from e
        size_in += len(data)
        size_out += len(chunk)
        if size_out > CHUNK + MAX_RATIO * size_in:
            raise BundleError(f"it inflates to more than {MAX_RATIO} times its size")
        if chunk:
            yield chunk
    if frame.unused_data or file.read(1):
        raise BundleError("there is data after its Zstandard frame")


def has_zstd() -> bool:
    """Return whether this Python can read and write a .tar.zst."""
    try:
        _zstd()
    except JitkernError:
        return False
    return True


def _zstd() -> ModuleType:
    """Return the Zstandard module of Python 3.14, or its backport for earlier versions."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError as e:
        raise JitkernError(f"a .tar.zst needs Zstandard: {REMEDY}", remedy=REMEDY) from e
    return zstd
