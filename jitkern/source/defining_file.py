"""Which of a source's files a function is compiled from, and which other one it wants."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern import source as room
from jitkern.errors import DeclarationError
from jitkern.source.kinds import Source

if TYPE_CHECKING:
    from jitkern.source.cpp_text import Function


def unit_of(source: Source, function: str) -> Source:
    """The source with the one of its files that defines `function`.

    A file that the text of none says to define it may still do so by a macro or a header: then it
    is the one that names it. Raises DeclarationError where that leaves none, or several.
    """
    if len(source.files) == 1:
        return source
    texts = {
        file: room.cpp_text.read(path)
        for file, path in zip(source.files, source.paths)
        if path.is_file()
    }
    missing = [file for file in source.files if file not in texts]
    if missing:
        raise DeclarationError(f"the kernel source {missing[0]} in {source.folder} does not exist")
    declared = {file: room.cpp_text.functions_in(text) for file, text in texts.items()}
    found = [
        file for file, functions in declared.items()
        if any(f.defined for f in room.cpp_text.named(functions, function))
    ]  # fmt: skip
    if not found:
        name = re.escape(room.cpp_text.plain_name(function).rpartition("::")[2])
        found = [file for file, text in texts.items() if re.search(rf"\b{name}\b", text)]
    if len(found) == 1:
        return source.unit(found[0])
    if found:
        raise DeclarationError(
            f"`{function}` is in several files, {', '.join(found)}: "
            "define it in one, and declare it in no other"
        )
    listed = (
        f"{file}: {', '.join(_names(functions)) or 'none'}" for file, functions in declared.items()
    )
    raise DeclarationError(f"no file has a function `{function}`; there are: {'; '.join(listed)}")


def _names(functions: list[Function]) -> list[str]:
    kernels = [f for f in functions if "__global__" in f.words]
    return list(dict.fromkeys(f.spelled for f in kernels or functions if f.defined))


def defining(source: Source, name: str) -> str:
    """The other unit, beside this one, that has a name in it; else ""."""
    word = re.compile(rf"\b{re.escape(name.rpartition('::')[2])}\b")
    paths = {other: Path(source.folder, other) for other in source.others}
    return next(
        (file for file, path in paths.items()
         if path.is_file() and word.search(room.cpp_text.read(path))),
        "",
    )  # fmt: skip


def elsewhere(source: Source, function: str) -> str:
    """What to do about a function that a unit declares and does not define."""
    name = re.split(r"[<(]", function, maxsplit=1)[0].strip()
    if place := defining(source, name):
        return (
            f"`{name}` is defined in {place}, and each unit is compiled by itself: "
            "put it in a header that both include"
        )
    return f"`{name}` is declared, and defined nowhere in {source.paths[0]}"
