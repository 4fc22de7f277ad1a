"""The files that a call of `load_inline` or `load` depends on, found by reading text.

No search order is followed. What a directive names is looked for in every directory that `#include`
may search, and all that is found is in the key, with where it was found: a header that appears
before another one changes the key, and so does one that `__has_include` asks for. So it is with
libraries. The headers of Torch, CUDA and the system are not read: versions stand for them.
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
    """The units, every file that they may include, and those that flags name."""
    roots = source.roots
    labelled = [(f"<{n}>", root.path) for n, root in enumerate(roots) if not root.version]
    labelled.append((f"<{SITE}>", SITE))
    files: dict[str, str] = {}
    seen = {str(path.resolve()) for path in source.paths}
    queue: list[tuple[str, str, bytes]] = [
        (name, str(unit), unit.read_bytes())
        if isinstance(unit, Path)
        else (name, "", unit.encode())
        for name, unit in source.units
    ]
    told = _told(source)
    queue += [("flags", "", told)] if told else []
    computed = False
    while queue:
        label, path, data = queue.pop(0)
        files[label] = hashlib.sha256(data).hexdigest()
        computed |= included(data)[1]
        for quoted, name in _opened(data):
            beside = (label, path) if quoted and path else None
            if os.path.isabs(name) and not os.path.isfile(name):  # noqa: PTH113, PTH117
                files[name] = ""  # it may come
            for found_label, found in _candidates(labelled, beside, name):
                resolved = os.path.realpath(found)
                if resolved not in seen:
                    seen.add(resolved)
                    queue.append((found_label, found, Path(found).read_bytes()))
                elif found_label not in files:
                    files[found_label] = hashlib.sha256(Path(found).read_bytes()).hexdigest()
    if computed:  # what it opens depends on where it lies
        files["folders"] = place_of(source)
    for linked, data in _linked(source.ldflags):
        files[linked] = hashlib.sha256(data).hexdigest()
        seen.add(os.path.realpath(linked))
    versions = {f"<{number}>": root.version for number, root in enumerate(roots) if root.version}
    return Closure(files, versions, frozenset(map(Path, seen)))


def unread(source: Inline, files: Iterable[str]) -> list[str] | None:
    """Of a source whose closure has these files: paths that its texts ask for and that are none.

    None where it is more than its texts: what else it depends on is to be read each time.
    """
    if source.places or set(files) - {*source.files, "flags"}:
        return None
    asked = {name for text in source.texts for _, name in _opened(text.encode())}
    return sorted(os.path.join(SITE, name) for name in asked)  # noqa: PTH118


def place_of(source: Inline) -> str:
    """A digest of where the units and their headers lie."""
    roots = [root.path for root in source.roots if not root.version]
    folders = [*roots, *(str(path.parent) for path in source.paths)]
    return hashlib.sha256("\n".join(folders).encode(errors="surrogateescape")).hexdigest()


def digest_of(path: Path) -> str:
    """SHA-256, in hex, of what a file holds; "" where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _told(source: Inline) -> bytes:
    """What flags say, as directives: headers, macros, and files that they name."""
    told = source.compiler_words
    named = [path for word in told if not word.startswith("-D") for path in paths_in(word)]
    files = [path for path in named if os.path.isfile(path) and not is_loaded(path)]  # noqa: PTH113
    headers = dict.fromkeys((*paths_after(FORCED, told), *files))
    lines = [f'#include "{name}"\n' for name in headers]
    lines += [f"#define {word}\n" for word in told if set(word) & set('"<')]
    return "".join(lines).encode(errors="surrogateescape")


def _opened(data: bytes) -> Iterator[tuple[bool, str]]:
    """(in quotes, name) of every file that a text may ask for.

    By a macro, too, whose absolute paths may be any files: those that are opened are watched.
    """
    named = [(quote, name) for _, quote, name in included(data)[0]]
    for line in re.findall(_CONDITION, data):
        macro = [(a or b, x or y) for a, x, b, y in re.findall(_NAMED, line)]
        named += [(quote, name) for quote, name in macro if not name.startswith(b"/")]
    for quote, name in dict.fromkeys(named):
        yield quote == b'"', name.decode(errors="surrogateescape")


def _candidates(
    roots: Sequence[tuple[str, str]], beside: tuple[str, str] | None, name: str
) -> Iterator[tuple[str, str]]:
    """(label, path) of every file of this name; none of the toolchain's."""
    if os.path.isabs(name):  # noqa: PTH117
        every = [(name, name)]
    else:
        every = [(f"{label}/{name}", os.path.join(root, name)) for label, root in roots]  # noqa: PTH118
        if beside:
            label, folder = beside[0].rpartition("/")[0], os.path.dirname(beside[1])  # noqa: PTH120
            every.append((f"{label}/{name}".removeprefix("/"), os.path.join(folder, name)))  # noqa: PTH118
    return ((label, path) for label, path in every if os.path.isfile(path))  # noqa: PTH113


def _linked(ldflags: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """(path, content) of what the linker may read: archives, scripts, and what those name.

    Of an archive beside a shared library, nothing, unless a flag asks for archives.
    """
    told = list(expanded(ldflags))
    told += [part for word in told if "," in word for part in word.split(",")]
    every = not _STATIC.isdisjoint(told)
    libraries = config.current().environment.get("LIBRARY_PATH", "").split(":")
    named = (*paths_after(("-L", "--library-path"), told), *libraries)
    folders = [folder for folder in named if folder]
    queue = [(name, folders) for name in _link_names(told)]
    seen: set[Path] = set()
    while queue:
        names, searched = queue.pop(0)
        for path in _hits(names, searched, every=every) - seen:
            seen.add(path)
            data = b"" if is_loaded(path) else path.read_bytes()
            yield str(path), data
            if b"\0" not in data[:4096] and not data.startswith(b"!<arch>"):  # a script
                tokens = [
                    token.decode(errors="surrogateescape") for token in re.findall(_TOKEN, data)
                ]
                queue += [(found, [*folders, str(path.parent)]) for found in _link_names(tokens)]


def _hits(names: Sequence[str], folders: Sequence[str], *, every: bool) -> set[Path]:
    """The files of these names, in each folder the first of them or all."""
    found = set()
    for folder in ("/", *folders):
        there = [path for name in names if os.path.isfile(path := Path(folder, name))]  # noqa: PTH113
        found.update(there if every else there[:1])
    return found


def _link_names(told: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Paths, and names to be searched, that these words of the linker's may mean.

    Several are alternatives, the preferred first.
    """
    for library in paths_after(("-l", "--library"), told):
        plain = library.removeprefix(":")
        yield (plain,) if plain != library else (f"lib{library}.so", f"lib{library}.a")
    for word in told:
        yield from ((path,) for path in paths_in(word))
        if not word.startswith(("-", "/")):
            yield (word.rstrip("/"),)
