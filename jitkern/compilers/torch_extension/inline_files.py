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
from jitkern.source.closure import FORCED, SITE, Closure, included
from jitkern.source.flags import expanded, is_loaded, paths_after, paths_in

_CONDITION = rb"(?m)^[ \t]*(?:#|%:)[ \t]*(?:define|if|elif)\b(?:\\\r?\n|[^\n])*"
_NAMED = rb'(")([^"\n]{1,200})"|(<)([^<>\n]{1,200})>'
_STATIC = frozenset(("-static", "-Bstatic", "-dn", "-non_shared"))
_TOKEN = rb"[^\s\0(),;\"']{2,}"


def closure(source: Inline) -> Closure:
    """The units, every file that they may include, and the files that flags name."""
    roots = source.roots
    labelled = [(f"<{n}>", root.path) for n, root in enumerate(roots) if not root.version]
    labelled.append((f"<{SITE}>", SITE))
    files: dict[str, str] = {}
    known = {str(path.resolve()) for path in source.paths}
    queue: list[tuple[str, str, bytes]] = [
        (name, str(unit), unit.read_bytes())
        if isinstance(unit, Path)
        else (name, "", unit.encode())
        for name, unit in source.units
    ]
    directives = _directives(source)
    queue += [("flags", "", directives)] if directives else []
    computed = False
    while queue:
        label, path, data = queue.pop(0)
        files[label] = hashlib.sha256(data).hexdigest()
        computed |= included(data)[1]
        for quoted, name in _names_in(data):
            beside = (label, path) if quoted and path else None
            if os.path.isabs(name) and not os.path.isfile(name):  # noqa: PTH113, PTH117
                files[name] = ""  # the file may appear later
            for file_label, file in _candidates(labelled, beside, name):
                resolved = os.path.realpath(file)
                if resolved not in known:
                    known.add(resolved)
                    queue.append((file_label, file, Path(file).read_bytes()))
                elif file_label not in files:
                    files[file_label] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    if computed:  # a macro's file may depend on the place of the unit
        files["folders"] = place_of(source)
    for linked, data in _linked(source.ldflags):
        files[linked] = hashlib.sha256(data).hexdigest()
        known.add(os.path.realpath(linked))
    versions = {f"<{number}>": root.version for number, root in enumerate(roots) if root.version}
    return Closure(files, versions, frozenset(map(Path, known)))


def unread(source: Inline, files: Iterable[str]) -> list[str] | None:
    """The absent paths that the source's texts ask for, if it depends on its texts alone.

    None if it depends on other files, which must be read each time. files: the labels in its
    closure.
    """
    if source.places or set(files) - {*source.files, "flags"}:
        return None
    names = {name for text in source.texts for _, name in _names_in(text.encode())}
    return sorted(os.path.join(SITE, name) for name in names)  # noqa: PTH118


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
    paths = [path for word in words if not word.startswith("-D") for path in paths_in(word)]
    files = [path for path in paths if os.path.isfile(path) and not is_loaded(path)]  # noqa: PTH113
    headers = dict.fromkeys((*paths_after(FORCED, words), *files))
    lines = [f'#include "{name}"\n' for name in headers]
    lines += [f"#define {word}\n" for word in words if set(word) & set('"<')]
    return "".join(lines).encode(errors="surrogateescape")


def _names_in(data: bytes) -> Iterator[tuple[bool, str]]:
    """(in quotes, name) of every file that a text may ask for, also by a macro.

    Absolute paths in macros may be any files, so they are left out: opened files are watched.
    """
    names = [(quote, name) for _, quote, name in included(data)[0]]
    for line in re.findall(_CONDITION, data):
        macro = [(a or b, x or y) for a, x, b, y in re.findall(_NAMED, line)]
        names += [(quote, name) for quote, name in macro if not name.startswith(b"/")]
    for quote, name in dict.fromkeys(names):
        yield quote == b'"', name.decode(errors="surrogateescape")


def _candidates(
    roots: Sequence[tuple[str, str]], beside: tuple[str, str] | None, name: str
) -> Iterator[tuple[str, str]]:
    """(label, path) of every file of this name, outside of the toolchain."""
    if os.path.isabs(name):  # noqa: PTH117
        places = [(name, name)]
    else:
        places = [(f"{label}/{name}", os.path.join(root, name)) for label, root in roots]  # noqa: PTH118
        if beside:
            label, folder = beside[0].rpartition("/")[0], os.path.dirname(beside[1])  # noqa: PTH120
            places.append((f"{label}/{name}".removeprefix("/"), os.path.join(folder, name)))  # noqa: PTH118
    return ((label, path) for label, path in places if os.path.isfile(path))  # noqa: PTH113


def _linked(ldflags: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """(path, content) of the files that the linker may read: archives, scripts, and their files.

    An archive beside a shared library is left out, unless a flag asks for archives.
    """
    words = list(expanded(ldflags))
    words += [part for word in words if "," in word for part in word.split(",")]
    archives_too = not _STATIC.isdisjoint(words)
    libraries = config.current().environment.get("LIBRARY_PATH", "").split(":")
    paths = (*paths_after(("-L", "--library-path"), words), *libraries)
    folders = [folder for folder in paths if folder]
    queue = [(name, folders) for name in _link_names(words)]
    visited: set[Path] = set()
    while queue:
        names, searched = queue.pop(0)
        for path in _matches(names, searched, every=archives_too) - visited:
            visited.add(path)
            data = b"" if is_loaded(path) else path.read_bytes()
            yield str(path), data
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
