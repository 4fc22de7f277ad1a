"""Find the file of a source that defines a function, among several."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern import source as source_room
from jitkern.errors import DeclarationError
from jitkern.source.dtypes import Constant
from jitkern.source.kinds import Source

if TYPE_CHECKING:
    from jitkern.source.cpp_text import CppFunction


def unit_of(source: Source, function: str, template: Iterable[tuple[str, Constant]] = ()) -> Source:
    """The source with only the file that defines `function`; `others` names the rest.

    If no file visibly defines the function (a macro or header may), take the only file that
    mentions it. Raises DeclarationError if no file or several files are left. For a Triton kernel,
    `others` names the files of functions among its constexprs.
    """
    if source.declares and any(isinstance(value, str) for _, value in template):
        files = source_room.constants.files_of(value for _, value in template)
        return source.replace(others=tuple(files)) if files else source
    if len(source.files) == 1:
        return source
    texts = {
        file: source_room.cpp_text.read(path)
        for file, path in zip(source.files, source.paths)
        if path.is_file()
    }
    missing = [file for file in source.files if file not in texts]
    if missing:
        raise DeclarationError(source_room.closure.missing(Path(source.folder, missing[0])))
    declared = {file: source_room.cpp_text.functions_in(text) for file, text in texts.items()}
    matches = [
        file for file, functions in declared.items()
        if any(f.defined for f in source_room.cpp_text.named(functions, function))
    ]  # fmt: skip
    if not matches:
        name = re.escape(source_room.cpp_text.last_name(function))
        matches = [file for file, text in texts.items() if re.search(rf"\b{name}\b", text)]
    if len(matches) == 1:
        return source.unit(matches[0])
    if matches:
        raise DeclarationError(
            f"`{function}` is in several files, {', '.join(matches)}: "
            "define it in one, and declare it in no other"
        )
    listed = (
        f"{file}: {', '.join(_names(functions)) or 'none'}" for file, functions in declared.items()
    )
    raise DeclarationError(f"no file has a function `{function}`; there are: {'; '.join(listed)}")


def _names(functions: list[CppFunction]) -> list[str]:
    kernels = [f for f in functions if "__global__" in f.words]
    return list(dict.fromkeys(f.display_name for f in kernels or functions if f.defined))


def defining(source: Source, name: str) -> str:
    """The file among the source's `others` that mentions a name, or ""."""
    word = re.compile(rf"\b{re.escape(source_room.cpp_text.last_name(name))}\b")
    paths = {other: Path(source.folder, other) for other in source.others}
    return next(
        (file for file, path in paths.items()
         if path.is_file() and word.search(source_room.cpp_text.read(path))),
        "",
    )  # fmt: skip


def elsewhere(source: Source, function: str) -> str:
    """A hint for a function that a unit declares and does not define."""
    name = source_room.cpp_text.plain_name(function)
    if file := defining(source, name):
        return (
            f"`{name}` is defined in {file}, and each unit is compiled by itself: "
            "put it in a header that both include"
        )
    return f"`{name}` is declared but not defined in {source.paths[0]}"
