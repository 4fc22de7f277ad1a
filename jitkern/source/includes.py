"""The files that C++ texts name, followed from file to file.

No preprocessor runs: all branches of an `#if` are read, and comments too. So the files may be more
than a compiler opens. None is missing, except where a macro names one: see `included`. A directive
that reads what the key cannot cover is refused.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern.errors import DeclarationError
from jitkern.named_tuple import NamedTuple
from jitkern.source.dtypes import DTYPES

if TYPE_CHECKING:
    from jitkern.source.kinds import Variant

# Compiled on first use, like every pattern here: an import compiles none.
_SPACE = rb"(?:[ \t\v\f]|/\*(?:[^*\n]|\*(?!/))*\*/)*"
_DIRECTIVE = (  # at the start of a line, behind a byte order mark or a comment that ends there
    rb"(?m)^(?:\xef\xbb\xbf|[^\n]*\*/)?[ \t\v\f]*(?:#|%:)" + _SPACE
    + rb"(?:include|import)(_next)?\b" + _SPACE
)  # fmt: skip
_INCLUDE = _DIRECTIVE + rb'(?:(["<])([^">\n]+)[">]|([^\s"<]))'  # a name, or a macro's first letter
_PROBED = rb'\b__has_include(?:_next)?[ \t]*\([ \t]*()(["<])([^">\n]+)[">]'
_NO_PROBE = rb"\b(?:ifn?def|defined?)[ \t(]+__has_include(?:_next)?\b"
_REFUSED = {  # directives that read what no key covers
    "`.incbin`": rb"\.incbin\b",
    "`.include` of the assembler": rb'\.include(?:[ \t]|\\t)*\\?"',
    "`#embed`": rb"(?m)^[ \t]*(?:#|%:)[ \t]*embed\b",
    "`__has_embed`": rb"\b__has_embed\b",
    "`__has_include` of a macro": rb'\b__has_include(?:_next)?\b(?![ \t]*\([ \t]*["<])',
}
_WORDS = (b".inc", b"embed", b"__has_")  # one is in each text that has such a directive
_COMMENT = rb'(?s)("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/'
_CONTINUED = rb"\\\r?\n"

SITE = "/usr/local/include"  # compilers search this folder, but its files are not the compiler's


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
        self.texts: dict[str, tuple[bytes, list[Name], bool, str]] = {}
        self.found: dict[File, list[File]] = {}


def walk(
    queue: list[File], find: Callable[[File, Name], Iterable[File]], known: Walked
) -> Iterator[tuple[str, str, bytes, bool]]:
    """Yield the files in the queue and all that they name, as (label, path, content, computed).

    find: the files that a name in a file means. computed: whether a macro may name more files. A
    file with several labels comes under each. The caller may add files to the queue meanwhile.
    Raises DeclarationError for a directive that reads what the key cannot cover.
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
        data, names, computed, refused = known.texts[resolved]
        if refused:
            raise DeclarationError(
                f"{path} has {refused}, which reads what the cache key does not cover: write out "
                "what it reads, or give the root of its library a version: Include(root, version=…)"
            )
        yield label, resolved, data, computed
        if (above, resolved) not in followed:  # by a link, a name may mean another file
            followed.add((above, resolved))
            if file not in known.found:
                known.found[file] = [f for named in names for f in find(file, named)]
            queue += known.found[file]


@functools.lru_cache(maxsize=256)
def included(text: bytes) -> tuple[list[Name], bool, str]:
    """The names of files in a text, whether a macro names one, and a refused directive."""
    if b"\0" in text[:4096]:  # an object
        return [], False, ""
    joined, refused = re.sub(_CONTINUED, b"", text), ""
    matches = re.findall(_INCLUDE, joined)
    computed = any(macro for *_, macro in matches)
    found = [(following, quote, name) for following, quote, name, _ in matches if name]
    if any(word in joined for word in _WORDS):
        code = re.sub(_COMMENT, lambda match: match[1] or b" ", joined)
        found += re.findall(_PROBED, code)
        code = re.sub(_NO_PROBE, b"", code)
        refused = next((what for what, read in _REFUSED.items() if re.search(read, code)), "")
    names = [
        Name(name.decode(errors="surrogateescape"), quote == b'"', bool(following))
        for following, quote, name in dict.fromkeys(found)
    ]
    return names, computed, refused


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
