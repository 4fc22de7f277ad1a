"""The files that C++ texts and flags of compilers name, followed from file to file.

No preprocessor runs: all branches of an `#if` are read, and comments too. So the files may be more
than a compiler opens. None is missing, except where a macro computes a name: see `included`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern import config
from jitkern.named_tuple import NamedTuple
from jitkern.source.build_environment import NVCC_FLAGS
from jitkern.source.dtypes import DTYPES

if TYPE_CHECKING:
    from jitkern.source.kinds import Source, Variant

# Compiled on first use, like every pattern here: an import compiles none.
_SPACE = rb"(?:[ \t\v\f]|/\*(?:[^*\n]|\*(?!/))*\*/)*"
_DIRECTIVE = (  # at the start of a line, behind a byte order mark or a comment that ends there
    rb"(?m)^(?:\xef\xbb\xbf|[^\n]*\*/)?[ \t\v\f]*(?:#|%:)" + _SPACE
    + rb"(?:include|import|embed)(_next)?\b" + _SPACE
)  # fmt: skip
_INCLUDE = _DIRECTIVE + rb'(?:(["<])([^">\n]+)[">]|([^\s"<]))'  # a name, or a macro's first letter
_PROBE = rb"\b__has_(?:include|include_next|embed)\b"
_PROBED = _PROBE + rb'[ \t]*\([ \t]*()(["<])([^">\n]+)[">]'
_PROBE_OF_A_MACRO = (  # all but `__has_include("name")`, `#ifdef __has_include` and `defined`
    rb"(?<!ifdef )(?<!ifndef )(?<!defined )(?<!defined\()" + _PROBE + rb'(?![ \t]*\([ \t]*["<])'
)
_ABSOLUTE = rb'(?m)^[ \t]*(?:#|%:)[ \t]*(?:define|if|elif)\b.*[ \t(,"<]/[\w.]'
_ASSEMBLED = rb'\.inc(?:bin|lude)(?:[ \t]|\\t)*(\\?)"([^"\\\s][^"\\\n]*)\1"'  # in a literal, or not
_READ = rb'incbin|\.include(?:[ \t]|\\t)*\\?"'  # by the assembler, also where a macro names it
_CONTINUED = rb"\\\r?\n"

SITE = "/usr/local/include"  # compilers search this folder, but its files are not the compiler's
SEARCHING = ("-isystem", "-iquote", "-idirafter", "--include-path", "-I")
_NOT_SEARCHING = ("-D", "-L", "-Wl,")
_FORCED = ("-include", "-imacros", "--pre-include")
_RESPONSES = ("@", "-optf", "--options-file")
_LOADED = (b"\2\0", b"\3\0", b"\0\2", b"\0\3")  # ELF's types of a program and a shared library


class File(NamedTuple):
    """A file under one of its labels."""

    label: str
    path: str


class Name(NamedTuple):
    """A file's name in a text. next_too: whether the first file of the name may be passed over."""

    text: str
    quoted: bool
    next_too: bool = False


class Walked:
    """The files and includes that earlier walks with the same `find` have read."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[str, str]] = {}  # of a path: the file, the folder of its name
        self.texts: dict[str, tuple[bytes, list[Name], bool]] = {}
        self.found: dict[File, list[File]] = {}


def walk(
    queue: list[File], find: Callable[[File, Name], Iterable[File]], known: Walked
) -> Iterator[tuple[str, str, bytes, bool]]:
    """Yield the files in the queue and all that they name, as (label, path, content, computed).

    find: the files that a name in a file means. computed: whether a macro may name more files. A
    file with several labels comes under each. The caller may add files to the queue meanwhile.
    """
    done: set[File] = set()
    followed: set[tuple[str, str]] = set()
    for file in queue:  # it grows
        label, path = file
        if path not in known.places:
            above = os.path.realpath(os.path.dirname(path))  # noqa: PTH120
            known.places[path] = os.path.realpath(path), above
        resolved, above = known.places[path]
        if File(label, resolved) in done:
            continue
        done.add(File(label, resolved))
        if resolved not in known.texts:
            data = Path(path).read_bytes()
            known.texts[resolved] = data, *included(data)
        data, names, computed = known.texts[resolved]
        yield label, resolved, data, computed
        if (above, resolved) not in followed:  # by a link, a name may mean another file
            followed.add((above, resolved))
            if file not in known.found:
                known.found[file] = [f for named in names for f in find(file, named)]
            queue += known.found[file]


@functools.lru_cache(maxsize=256)
def included(text: bytes) -> tuple[list[Name], bool]:
    """The names of files in a text, and whether a macro may name more."""
    if b"\0" in text[:4096]:  # an object, or a file that the assembler pastes
        return [], False
    joined = _joined(text)
    matches = re.findall(_INCLUDE, joined)
    computed = any(macro for *_, macro in matches)
    names = [(following, quote, name) for following, quote, name, _ in matches if name]
    if b"__has_" in joined:
        names += re.findall(_PROBED, joined)
        computed = computed or bool(re.search(_PROBE_OF_A_MACRO, joined))
    if b".inc" in joined:
        names += [(b"", b"", name) for *_, name in re.findall(_ASSEMBLED, joined)]
        computed = computed or pastes_unnamed(joined)
    return [
        Name(name.decode(errors="surrogateescape"), quote == b'"', bool(following))
        for following, quote, name in dict.fromkeys(names)
    ], computed


def headers_in(text: str) -> set[str]:
    """The names in the `#include` directives of a text."""
    data = text.encode(errors="surrogateescape")
    names = [name for _, _, name, _ in re.findall(_INCLUDE, _joined(data))]
    return {name.decode(errors="surrogateescape") for name in names if name}


def probes_anywhere(text: bytes) -> bool:
    """Whether a macro may ask for a header by an absolute path; no tool lists such headers."""
    text = _joined(text) if b"__has_" in text else b""
    return bool(re.search(_PROBE_OF_A_MACRO, text) and re.search(_ABSOLUTE, text))


def pastes_unnamed(text: bytes) -> bool:
    """Whether the text has an `.incbin` or `.include` whose file name is not written out."""
    return len(re.findall(_READ, text)) > len(re.findall(_ASSEMBLED, text))


def _joined(text: bytes) -> bytes:
    """The text with its continued lines joined."""
    return re.sub(_CONTINUED, b"", text) if b"\\" in text else text


def words(flags: Sequence[str]) -> Iterator[str]:
    """The words a shell would split the flags into; each flag may hold several, and `$$` means `$`.

    Spaces in a directory or in a macro's value do not split it.
    """
    for flag in flags:
        try:
            import shlex

            parts = shlex.split(flag)
        except ValueError:  # a lone quote
            parts = [flag.strip()]
        whole = flag.strip()
        spaced = len(parts) > 1 and not any(part.startswith("-") for part in parts[1:])
        if spaced and (
            (whole.startswith("-D") and whole[2:3].strip())
            or (whole[:2] in ("-I", "-L") and Path(whole[2:]).is_dir())
        ):
            parts = [whole]
        yield from (part.replace("$$", "$") for part in parts)


def expanded(flags: Sequence[str], above: frozenset[str] = frozenset()) -> Iterator[str]:
    """The flags, each response file followed by the flags in it."""
    yield from flags
    for path in dict.fromkeys(paths_after(_RESPONSES, flags)):  # the key depends on the order
        if path in above:
            continue
        try:
            text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
        except (OSError, ValueError):
            continue
        yield from expanded(tuple(words([text])), above | {path})


def words_of(source: Source) -> list[str]:
    """All flags of a source's compilers, with those in response files and in variables."""
    told = config.current().environment
    read = [name for name in source.environment if name in NVCC_FLAGS and name in told]
    return list(expanded((*source.every_flag, *words([told[name] for name in read]))))


def searched(flags: Iterable[str], variables: Iterable[str]) -> list[str]:
    """The directories, by absolute paths, that flags and variables add to those of `#include`.

    flags: expanded. variables: names of variables of the environment that hold such directories.
    """
    paths = [p for flag in flags if not flag.startswith(_NOT_SEARCHING) for p in paths_in(flag)]
    environment = config.current().environment
    paths += [path for name in variables for path in environment.get(name, "").split(":")]
    absolute = (p for p in dict.fromkeys(paths) if os.path.isabs(p) and "\0" not in p)  # noqa: PTH117
    return [path for path in absolute if not os.path.isfile(path)]  # noqa: PTH113


def numbered(flags: Iterable[str], roots: Sequence[str]) -> Iterator[str]:
    """The flags with the number of a root in the place of its path."""
    for flag in flags:
        option = next((o for o in SEARCHING if flag.startswith(o)), "")
        path = flag[len(option) :].removeprefix("=") if option else flag
        yield f"{option}<{roots.index(path)}>" if path in roots else flag


def named(flags: Sequence[str]) -> list[str]:
    """The headers that expanded flags include, and the files that flags name by their whole path.

    Shared libraries are left out, except for plugins of the compiler.
    """
    paths = [(flag, path) for flag in flags for path in paths_in(flag) if os.path.isfile(path)]  # noqa: PTH113
    files = (path for flag, path in paths if "plugin" in flag or not is_loaded(path))
    return list(dict.fromkeys((*paths_after(_FORCED, flags), *files)))


def paths_in(word: str) -> Iterator[str]:
    """The absolute paths that a flag may name: `-I/a`, `-Wl,-T,/a`, `-DX="/a"`."""
    for part in dict.fromkeys((word, *word.split(","))):
        _, slash, rest = part.partition("/")
        if slash:
            yield "/" + rest.rstrip("\"'<>\\ \t\n")


def paths_after(options: Sequence[str], flags: Sequence[str]) -> Iterator[str]:
    """The arguments of these options, joined to the option or in the next flag."""
    for number, flag in enumerate(flags):
        option = next((o for o in options if flag.startswith(o)), "")
        if option:
            joined = flag[len(option) :].removeprefix("=")
            following = flags[number + 1] if number + 1 < len(flags) else ""
            yield joined or following


def is_loaded(path: str | Path) -> bool:
    """Whether the file is a program or a shared library: a loader reads it, no compiler."""
    with Path(path).open("rb") as file:
        head = file.read(18)
    return head[:4] == b"\x7fELF" and head[16:] in _LOADED


def including(variant: Variant, column: str, paths: Iterable[Path]) -> Variant:
    """Return the variant with `-include` of the headers of its small floats, such as `T=f16`.

    column: the column of the table of dtypes that names the headers. paths: the files of the
        source; if one of them names a type or its header, its author has seen to the header.
    """
    known = [DTYPES[value] for _, value in variant.template if value in DTYPES]
    wanted = dict.fromkeys(getattr(dtype, column) for dtype in known if getattr(dtype, column))
    if not wanted:
        return variant
    with contextlib.suppress(OSError):  # a missing file is an error of the closure
        text = b"".join(path.read_bytes() for path in paths).decode(errors="replace")
        text += " ".join(variant.source.flags)
        missing = [header for header in wanted if header.removesuffix(".h") not in text]
        flags = [word for header in missing for word in ("-include", header)]
        source = variant.source.replace(flags=(*variant.source.flags, *flags))
        return variant._replace(source=source) if flags else variant
    return variant
