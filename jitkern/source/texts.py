"""Sources given as text: a file for compilers to read, and the lines where the text was written.

The file lies in the temporary root of the process, below the digest of the text. Keys contain no
folder, so a text has one key wherever it lies.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import re
from collections.abc import Iterable, Mapping

from jitkern.cache.temporary_cache import private_root
from jitkern.errors import shown
from jitkern.files import atomic
from jitkern.named_tuple import NamedTuple


class Span(NamedTuple):
    """Lines of a text, and where they are written.

    first, lines: the first line in the text, and their number; 0 lines if only a line before the
    text is known. file, line: a Python file or a cell, and a line there.
    """

    first: int
    lines: int
    file: str
    line: int


def folder_of(texts: Mapping[str, str]) -> str:
    """Return a folder with files of these texts, written if they do not exist.

    Raises CacheError where no directory can be written.
    """
    folder = private_root() / ".text" / "-".join(map(_digest, texts.values()))
    for file, text in texts.items():
        if not (folder / file).is_file():  # the first call, or somebody cleaned up
            folder.mkdir(parents=True, exist_ok=True)
            atomic.write(folder / file, text.encode(errors="surrogateescape"))
    return str(folder)


@functools.lru_cache(maxsize=1024)
def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def with_places(
    message: str, path: str, text: str, written_at: Iterable[tuple[int, int, str, int]], op: str
) -> str:
    """Return a compiler's message with lines of the cell or file where the text is written.

    path: of the file that the compiler read. written_at: the fields of spans.
    """
    spans = [_located(text, Span(*span)) for span in written_at]

    def moved(match: re.Match[str]) -> str:
        number = int(match[2])
        for first, lines, file, line in spans:
            if first <= number < first + lines:
                name, number = shown(file), number - first + line
                break
        else:
            name = f"the text of {op}"
        return f"{name}:{number}" if match[1] == ":" else f"{name}({number})"

    message = re.sub(rf"{re.escape(path)}([:(])(\d+)\)?", moved, message)
    return message.replace(path, f"the text of {op}")


def _located(text: str, span: Span) -> Span:
    """Return the span with its lines, which are searched from the span's line on."""
    if span.lines or not text.strip():
        return span
    written = "".join(linecache.getlines(span.file))
    start = sum(map(len, written.splitlines(keepends=True)[: max(0, span.line - 1)]))
    found = written.find(text, start)
    found = written.find(text) if found < 0 else found
    if found < 0:
        return span
    return Span(1, text.count("\n") + 1, span.file, written.count("\n", 0, found) + 1)
