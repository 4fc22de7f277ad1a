"""What the tools of a build opened, as they list it themselves.

The compiler lists its headers, GNU's assembler what `.incbin` and `.include` name, and the linker
the objects, archives and scripts that it read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from jitkern.errors import CompileError
from jitkern.source.closure import pastes_unnamed
from jitkern.source.flags import expanded, is_loaded, paths_after

UNTOLD = (
    "it uses .incbin, and this compiler does not tell which files that reads, so the cache key "
    "cannot cover them: write out their names in the text, or compile with g++ and without -flto"
)
_LINKED = "linked.d"
LINKERS_LIST = f"-Wl,--dependency-file={_LINKED}"
_READING_PROFILES = ("-fprofile-use", "-fprofile-instr-use", "-fbranch-probabilities")
_PROFILES = ("-fprofile-use=", "-fprofile-instr-use=", "-fprofile-dir=")
_READ_BY_LINKERS = ("-l", "-L", "-Wl,", "-Xlinker", "-T", "@")


def listing(unit: str, *, gcc: bool, nvcc: bool = False) -> list[str]:
    """Flags that have the headers of a unit listed, and what the assembler opens for it."""
    headers = ["-MD", "-MF", f"{unit}.d"]
    if not gcc:
        return headers
    return [*headers, f"-Xcompiler=-Wa\\,--MD\\,{unit}.s.d" if nvcc else f"-Wa,--MD,{unit}.s.d"]


def run_listed(
    run: Callable[[list[str]], tuple[int, str]], command: list[str]
) -> tuple[list[str], int, str]:
    """(command, status, output) of a command, run again without the lists that a tool refuses.

    GNU's linker can write one from 2.35 on, LLVM's from 12 on; an assembler may not be GNU's.
    """
    status, said = run(command)
    refused = LINKERS_LIST if "dependency-file" in said else "--MD" if "--MD" in said else ""
    if status and refused and any(refused in word for word in command):
        return run_listed(run, [word for word in command if refused not in word])
    return command, status, said


def in_folder(folder: Path, units: Iterable[str]) -> list[Path]:
    """What the tools opened that ran in `folder`, but for what they made there.

    Not the shared libraries: of these the artifact holds no more than the name.
    """
    units = [*units]
    found = {path for unit in units for path in _listed(folder, f"{unit}.d")}
    later = {path for unit in units for path in _listed(folder, f"{unit}.s.d")}
    later |= {*_listed(folder, _LINKED)}  # temporary files of the compiler's are gone by now
    found |= {path for path in later if path.is_file() and not is_loaded(path)}
    own = folder.resolve()
    return sorted(path for path in found if not path.resolve().is_relative_to(own))


def refuse_untold(
    folder: Path, unit: str, flags: Sequence[str], texts: Collection[bytes], op: str
) -> None:
    """Raise CompileError where a tool read files of its own and did not list them."""
    if any(map(pastes_unnamed, texts)) and not lists_binaries(folder, [unit], flags):
        raise CompileError(f"{op}: {UNTOLD}", op=op)
    reads = [flag for flag in flags if flag.startswith(_READ_BY_LINKERS) or flag[:1] != "-"]
    if reads and not (folder / _LINKED).is_file():
        raise CompileError(
            f"{op}: the flag `{reads[0]}` may have the linker read files, and this linker does not "
            "tell which, so the cache key cannot cover them: leave it out, or link with GNU ld "
            "2.35 or newer, lld, or mold",
            op=op,
        )


def refuse_profiles(flags: Sequence[str], op: str) -> None:
    """Raise CompileError for profiles in a directory: no compiler lists what it reads there."""
    told = list(expanded(flags))
    if not any(flag.startswith(_READING_PROFILES) for flag in told):
        return
    for path in paths_after(_PROFILES, told):
        if not Path(path).is_file():
            raise CompileError(
                f"{op}: its flags have the compiler read profiles from {path}, which is no file, "
                "and it does not tell which it reads there, so the cache key cannot cover them: "
                "name the file, as in -fprofile-use=/path/of/kernel.gcda",
                op=op,
            )


def lists_binaries(folder: Path, units: Iterable[str], flags: Sequence[str]) -> bool:
    """Whether the assembler listed all that it read; link-time optimization runs it later."""
    late = any(flag.startswith("-flto") for flag in flags)
    return not late and all((folder / f"{unit}.s.d").is_file() for unit in units)


def read_list(path: Path) -> list[str]:
    """The files that a make-style dependency file lists; for each an empty rule may follow."""
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
