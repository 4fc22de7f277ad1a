"""The files that a call of `load_inline` or `load` depends on, found by reading text.

No search order is followed. The file of a directive is looked for in every directory that
`#include` may search, and all files found are in the key, with their places: a header that appears
before another one changes the key, and so does a header that `__has_include` asks for. The same
holds for libraries. The headers of Torch, CUDA and the system are not read: versions stand for
them.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from jitkern import config
from jitkern.compilers.torch_extension.inline_source import Inline
from jitkern.source import includes
from jitkern.source.closure import Closure, digests
from jitkern.source.includes import File, Name, expanded, is_loaded, paths_after, paths_in

_STATIC = frozenset(("-static", "-Bstatic", "-dn", "-non_shared"))
_TOKEN = rb"[^\s\0(),;\"']{2,}"


def closure(source: Inline) -> Closure:
    """The units, every file that they may include, and the files that flags name."""
    roots = [(f"<{n}>", root.path) for n, root in enumerate(source.roots) if not root.version]
    roots.append((f"<{includes.SITE}>", includes.SITE))
    queue = [File(name, str(path)) for name, path in zip(source.files, source.paths)]
    queue += [File(name, "", text.encode()) for name, text in zip(source.files, source.texts)]
    directives = _directives(source)
    queue += [File("flags", "", directives)] if directives else []
    computed = False
    files: list[tuple[str, str, bytes]] = []
    absent: dict[str, str] = {}  # absolute paths where a file may appear later

    def find(includer: File, name: Name) -> list[File]:
        matches = list(_candidates(roots, includer, name))
        if not matches and os.path.isabs(name.text):  # noqa: PTH117
            absent[name.text] = ""
        return matches

    for label, path, data, more in includes.walk(queue, find, macros=True):
        files.append((label, path, data))
        computed |= more
    place = {"folders": place_of(source)} if computed else {}  # a macro's file may depend on it
    searched = config.current().environment.get("LIBRARY_PATH", "").split(":")
    for library in linked(source.ldflags, searched):
        data = b"" if includes.is_loaded(library) else library.read_bytes()  # a shared one is named
        files.append((str(library), os.path.realpath(library), data))
    paths = frozenset(Path(path) for _, path, _ in files if path)
    versions = {f"<{n}>": root.version for n, root in enumerate(source.roots) if root.version}
    return Closure({**absent, **digests(files), **place}, versions, paths)


def unread(source: Inline, files: Iterable[str]) -> list[str] | None:
    """The absent paths that the source's texts ask for, if it depends on its texts alone.

    None if it depends on other files, which must be read each time. files: the labels in its
    closure.
    """
    if source.places or set(files) - {*source.files, "flags"}:
        return None
    texts = [includes.included(text.encode(), macros=True)[0] for text in source.texts]
    names = {name.text for names in texts for name in names}
    return sorted(os.path.join(includes.SITE, name) for name in names)  # noqa: PTH118


def place_of(source: Inline) -> str:
    """A digest of the folders of the units and their headers."""
    roots = [root.path for root in source.roots if not root.version]
    folders = [*roots, *(str(path.parent) for path in source.paths)]
    return hashlib.sha256("\n".join(folders).encode(errors="surrogateescape")).hexdigest()


def digest_of(path: Path) -> str:
    """SHA-256, in hex, of a file's content; "" if the file cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _directives(source: Inline) -> bytes:
    """The flags written as directives: headers, macros, and files that the flags name."""
    words = source.compiler_words
    headers = includes.named([word for word in words if not word.startswith("-D")])
    lines = [f'#include "{name}"\n' for name in headers]
    lines += [f"#define {word}\n" for word in words if set(word) & set('"<')]
    return "".join(lines).encode(errors="surrogateescape")


def _candidates(roots: Sequence[tuple[str, str]], includer: File, name: Name) -> Iterator[File]:
    """Every file of this name, outside of the toolchain."""
    if os.path.isabs(name.text):  # noqa: PTH117
        folders = [("", "")]
    else:
        folders = [(f"{label}/", root) for label, root in roots]
        if name.quoted and includer.path:
            above, slash, _ = includer.label.rpartition("/")
            folders.append((f"{above}{slash}", os.path.dirname(includer.path)))  # noqa: PTH120
    for label, folder in folders:
        path = os.path.join(folder, name.text)  # noqa: PTH118
        if os.path.isfile(path):  # noqa: PTH113
            yield File(f"{label}{name.text}", path)


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
