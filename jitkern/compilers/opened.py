"""The files that the tools of a build opened, as the tools list them themselves.

The compiler lists its headers, GNU's assembler the files of `.incbin` and `.include`, and the
linker the objects, archives and scripts that it read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from jitkern.errors import CompileError
from jitkern.source.closure import pastes_unnamed
from jitkern.source.flags import expanded, is_loaded, paths_after

UNTOLD = (
    "it uses .incbin, and this compiler does not list the files that .incbin reads, so the cache "
    "key cannot cover them: write out their names in the text, or compile with g++ and no -flto"
)
_LINKED = "linked.d"
LINKERS_LIST = f"-Wl,--dependency-file={_LINKED}"
_READING_PROFILES = ("-fprofile-use", "-fprofile-instr-use", "-fbranch-probabilities")
_PROFILES = ("-fprofile-use=", "-fprofile-instr-use=", "-fprofile-dir=")
_READ_BY_LINKERS = ("-l", "-L", "-Wl,", "-Xlinker", "-T", "@")


def listing(unit: str, *, gcc: bool, nvcc: bool = False) -> list[str]:
    """Flags that make the tools list the headers of a unit, and the files of its assembler."""
    headers = ["-MD", "-MF", f"{unit}.d"]
    if not gcc:
        return headers
    return [*headers, f"-Xcompiler=-Wa\\,--MD\\,{unit}.s.d" if nvcc else f"-Wa,--MD,{unit}.s.d"]


def run_listed(
    run: Callable[[list[str]], tuple[int, str]], command: list[str]
) -> tuple[list[str], int, str]:
    """(command, status, output) of a command, run again without the lists that a tool refuses.

    GNU's linker can write a list from 2.35 on, LLVM's from 12 on; an assembler may not be GNU's.
    """
    status, output = run(command)
    refused = LINKERS_LIST if "dependency-file" in output else "--MD" if "--MD" in output else ""
    if status and refused and any(refused in word for word in command):
        return run_listed(run, [word for word in command if refused not in word])
    return command, status, output


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
    return sorted(path for path in files if not path.resolve().is_relative_to(own))


def refuse_untold(
    folder: Path, unit: str, flags: Sequence[str], texts: Collection[bytes], op: str
) -> None:
    """Raise CompileError if a tool read files of its own and did not list them."""
    if any(map(pastes_unnamed, texts)) and not lists_binaries(folder, [unit], flags):
        raise CompileError(f"{op}: {UNTOLD}", op=op)
    reads = [flag for flag in flags if flag.startswith(_READ_BY_LINKERS) or flag[:1] != "-"]
    if reads and not (folder / _LINKED).is_file():
        raise CompileError(
            f"{op}: the flag `{reads[0]}` may have the linker read files, and this linker does not "
            "list them, so the cache key cannot cover them: leave the flag out, or link with GNU "
            "ld 2.35 or newer, lld, or mold",
            op=op,
        )


def refuse_profiles(flags: Sequence[str], op: str) -> None:
    """Raise CompileError for profiles in a directory: compilers do not list their files."""
    words = list(expanded(flags))
    if not any(flag.startswith(_READING_PROFILES) for flag in words):
        return
    for path in paths_after(_PROFILES, words):
        if not Path(path).is_file():
            raise CompileError(
                f"{op}: its flags have the compiler read profiles from {path}, which is no file, "
                "and the compiler does not list its profiles, so the cache key cannot cover them: "
                "name the file, as in -fprofile-use=/path/of/kernel.gcda",
                op=op,
            )


def lists_binaries(folder: Path, units: Iterable[str], flags: Sequence[str]) -> bool:
    """Whether the assembler listed all files it read; link-time optimization runs it later."""
    late = any(flag.startswith("-flto") for flag in flags)
    return not late and all((folder / f"{unit}.s.d").is_file() for unit in units)


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
