"""The files that a linker may read, found by reading its flags and scripts.

No search order is followed: all files of a name are in the key, so one that appears before another
changes the key. The libraries of the system are not read: versions stand for them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from jitkern.source.includes import expanded, is_loaded, paths_after, paths_in

_STATIC = frozenset(("-static", "-Bstatic", "-dn", "-non_shared"))
_TOKEN = rb"[^\s\0(),;\"']{2,}"


def linked(ldflags: Sequence[str], searched: Sequence[str]) -> Iterator[Path]:
    """The files that the linker may read: libraries, archives, scripts, and their files.

    An archive beside a shared library is left out, unless a flag asks for archives.

    searched: the directories to search after those of the flags.
    """
    words = list(expanded(ldflags))
    words += [part for word in words if "," in word for part in word.split(",")]
    archives_too = not _STATIC.isdisjoint(words)
    paths = (*paths_after(("-L", "--library-path"), words), *searched)
    folders = [folder for folder in paths if folder]
    queue = [(name, folders) for name in _link_names(words)]
    visited: set[Path] = set()
    while queue:
        names, searched = queue.pop(0)
        for path in _matches(names, searched, every=archives_too) - visited:
            visited.add(path)
            yield path
            data = b"\0" if is_loaded(path) else path.read_bytes()
            if b"\0" not in data[:4096] and not data.startswith(b"!<arch>"):  # a script
                tokens = [
                    token.decode(errors="surrogateescape") for token in re.findall(_TOKEN, data)
                ]
                queue += [(group, [*folders, str(path.parent)]) for group in _link_names(tokens)]


def _matches(names: Sequence[str], folders: Sequence[str], *, every: bool) -> set[Path]:
    """The files of these names; in each folder the first name that exists, or all."""
    matches = set()
    for folder in ("/", *folders):
        there = [path for name in names if os.path.isfile(path := Path(folder, name))]  # noqa: PTH113
        matches.update(there if every else there[:1])
    return matches


def _link_names(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The paths, and names to search for, that these words of the linker may mean.

    Several names in one tuple are alternatives, the preferred first.
    """
    for library in paths_after(("-l", "--library"), words):
        plain = library.removeprefix(":")
        yield (plain,) if plain != library else (f"lib{library}.so", f"lib{library}.a")
    for word in words:
        yield from ((path,) for path in paths_in(word))
        if not word.startswith(("-", "/")):
            yield (word.rstrip("/"),)
