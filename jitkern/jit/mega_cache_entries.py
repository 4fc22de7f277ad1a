"""Entries of the cache as Torch's mega-cache carries them: one run of bytes for each."""

from __future__ import annotations

import json
from pathlib import Path

from jitkern import jit
from jitkern.cache.entry import Entry
from jitkern.cache.manifest import NAME, Manifest


def content_at(path: Path) -> bytes:
    """The files of the entry at a path, in one. Raises ValueError or OSError for a broken entry."""
    return content_of(Entry(path, Manifest.decode((path / NAME).read_bytes())))


def content_of(entry: Entry) -> bytes:
    """The files of an entry in one: a line of JSON with names and sizes, then the files.

    Raises ValueError or OSError for a broken entry.
    """
    files = entry.files()
    sizes = {name: len(data) for name, data in files.items()}
    return b"".join((json.dumps(sizes).encode(), b"\n", *files.values()))


def publish(place: str, content: bytes) -> None:
    """Put the bytes of `content_of` into the user's cache, as the entry `target/name`, if new.

    Raises ValueError for other bytes, and CacheError if the cache cannot be written.
    """
    target, _, name = place.partition("/")
    files = _files(content)
    digest = Manifest.decode(files[NAME]).digest
    cache = jit.open_cache()
    if cache.look_up(target, name, digest).entry is None:
        cache.adopt(target, name, files)


def _files(content: bytes) -> dict[str, bytes]:
    line, _, data = content.partition(b"\n")
    files, start = {}, 0
    try:
        for name, size in json.loads(line).items():
            files[name] = data[start : start + size]
            start += size
    except (AttributeError, TypeError, RecursionError) as e:
        raise ValueError("the first line is no table of files") from e
    if start != len(data) or NAME not in files:
        raise ValueError("the length differs from the first line, or the manifest is missing")
    return files
