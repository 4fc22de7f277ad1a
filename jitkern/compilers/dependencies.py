"""Compare the files that the tools of a build opened, by their own lists, with the key.

The compiler lists its headers, GNU's assembler its files, and the linker the objects, archives and
scripts that it read.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from jitkern.errors import CompileError
from jitkern.source import includes
from jitkern.source.closure import Closure
from jitkern.source.flags import is_loaded
from jitkern.source.kinds import Source

_LINKED = "linked.d"
LINKERS_LIST = f"-Wl,--dependency-file={_LINKED}"
READ_BY_LINKERS = ("-l", "-L", "-Wl,", "-Xlinker", "-T", "-z")


class UncoveredError(CompileError):
    """A tool opened a file that the key does not cover."""


def listing(unit: str, *, gcc: bool, nvcc: bool = False) -> list[str]:
    """Flags that make the tools list the headers of a unit, and the files of its assembler."""
    headers = ["-MD", "-MF", f"{unit}.d"]
    if not gcc:
        return headers
    return [*headers, f"-Xcompiler=-Wa\\,--MD\\,{unit}.s.d" if nvcc else f"-Wa,--MD,{unit}.s.d"]


def run_listed(
    run: Callable[[list[str]], tuple[int, str]], command: list[str]
) -> tuple[list[str], int, str]:
    """Run a command, again without each list that a tool refuses: (command, status, output)."""
    status, output = run(command)
    simpler = without_refused(command, output) if status else command
    return run_listed(run, simpler) if simpler != command else (command, status, output)


def without_refused(command: list[str], output: str) -> list[str]:
    """A failed command without the option for a list that a tool refused in its output.

    GNU's linker can write a list from 2.35 on, LLVM's from 12 on; an assembler may not be GNU's.
    """
    refused = LINKERS_LIST if "dependency-file" in output else "--MD" if "--MD" in output else ""
    return [word for word in command if not refused or refused not in word]


def in_folder(folder: Path, units: Iterable[str]) -> list[Path]:
    """The files that the tools in `folder` opened, except for the files that they made there.

    Shared libraries are left out: an artifact holds only their names.
    """
    units = [*units]
    files = {path for unit in units for path in _listed(folder, f"{unit}.d")}
    later = {path for unit in units for path in _listed(folder, f"{unit}.s.d")}
    later |= {*_listed(folder, _LINKED)}  # the compiler's temporary files are gone by now
    files |= {path for path in later if path.is_file() and not is_loaded(path)}
    own = folder.resolve()
    inside = {above: above.resolve().is_relative_to(own) for above in {p.parent for p in files}}
    return sorted(path for path in files if not inside[path.parent])


def check_linker(folder: Path, flags: Sequence[str], op: str) -> None:
    """Raise CompileError if a linker may have read files that it did not list."""
    reads = [flag for flag in flags if flag.startswith(READ_BY_LINKERS) or flag[:1] != "-"]
    if reads and not (folder / _LINKED).is_file():
        raise CompileError(
            f"{op}: the flag `{reads[0]}` may have the linker read files, and this linker does not "
            "list them, so the cache key cannot cover them: leave the flag out, or link with GNU "
            "ld 2.35 or newer, lld, or mold",
            op=op,
        )


def check(
    source: Source,
    closure: Closure,
    opened: Iterable[str | Path],
    toolchain: Iterable[str | Path],
    op: str,
) -> None:
    """Raise UncoveredError for a file that a tool opened and that the key does not cover."""
    for path in uncovered(source, closure, opened, toolchain):
        raise UncoveredError(
            f"{op}: the compiler opened {path}, which the cache key does not cover. "
            f"{_remedy(path)}",
            op=op,
        )


def _remedy(path: Path) -> str:
    if path.suffix == ".gch":
        return "It is a precompiled header, and compilers do not list those: delete it"
    folder = repr(str(path.parent))
    return (
        "Name it by its whole path in flags, or where it is a header, by an `#include` and its "
        f"directory: include=[{folder}], or Include({folder}, version=...)"
    )


def uncovered(
    source: Source, closure: Closure, opened: Iterable[str | Path], toolchain: Iterable[str | Path]
) -> Iterator[Path]:
    """The files of `opened` in neither the closure, nor the toolchain, nor a versioned root.

    Precompiled headers are added: g++ opens them in place of headers without listing them. Where a
    root of the source and a folder of `toolchain` contain one another, the inner folder decides.
    """
    versioned = (root.path for root in source.roots if root.version)
    known = {Path(folder).resolve() for folder in (*versioned, *toolchain)}
    own = (root.path for root in source.roots if not root.version)
    others = {Path(folder).resolve() for folder in (*own, includes.SITE)} - known
    precompiled = (path.with_name(f"{path.name}.gch") for path in closure.paths)

    @functools.cache
    def is_known(folder: Path) -> bool:
        home = next((f for f in (folder, *folder.parents) if f in known or f in others), None)
        return home in known

    @functools.cache
    def leads_to_known(folder: Path) -> bool:  # many files have one folder
        return is_known(folder.resolve())

    for name in (*map(Path, opened), *filter(Path.exists, precompiled)):
        if leads_to_known(name.parent):  # also where the toolchain has a link out of it
            continue
        path = name.resolve()
        if path not in closure.paths and not is_known(path.parent):
            yield path


def read_list(path: Path) -> list[str]:
    """The files that a make-style dependency file lists; an empty rule for each file may follow."""
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    _, _, rule = text.partition("\n\n")[0].partition(": ")
    if path.name == _LINKED and "\\\n" in rule:  # GNU ld has a line for each, and escapes nothing
        names = re.split(r"\s*\\\n\s*", rule.rstrip())
    else:
        names = re.split(r"(?<!\\)\s+", rule.replace("\\\n", " ").strip())
    return [re.sub(r"\\([ \t#])|\$(\$)", r"\1\2", name) for name in names if name]


def _listed(folder: Path, name: str) -> list[Path]:
    path = folder / name
    return [folder / file for file in read_list(path)] if path.is_file() else []
