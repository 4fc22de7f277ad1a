"""The flags of compilers and linkers, and the variables with flags: what they have a tool read.

All flags are keyed by their text. One table says what else a flag means: one of `_HARMLESS` reads
no file, those of `_SEARCHING` and `_FILES` name directories and files whose content is keyed, and
those of `_REFUSED` read what no key covers. Any other flag is refused if it names a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern import config
from jitkern.errors import DeclarationError

if TYPE_CHECKING:
    from jitkern.source.kinds import Source

NVCC_FLAGS = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
ENVIRONMENT = (  # passed on to compilers; their values are a part of the key
    *config.SEARCHED, *NVCC_FLAGS, "LIBRARY_PATH", "CUDA_INC_PATH", "CUDNN_HOME", "CUDNN_PATH",
)  # fmt: skip

_HARMLESS = ("-O", "-W", "-D", "-U", "-f", "-m", "-std=", "-g", "-arch=sm_")
_SEARCHING = ("-isystem", "-iquote", "-idirafter", "--include-path", "-I")
_NOT_SEARCHING = ("-D", "-L", "-Wl,")
_FORCED = ("-include", "-imacros", "--pre-include")  # headers
_FILES = (  # of these, files that are named by their whole paths
    *_FORCED, "/", "-D", "-Wl,", "-T", "-ccbin", "--compiler-bindir",
)  # fmt: skip
_REFUSED = {  # as they begin, with one `-`; and what they have a tool read
    ("@", "-optf", "-options-file", "-config", "-specs"): "flags in a file: write them out",
    ("-include-pch", "-pch", "-use-pch", "-create-pch"): "a precompiled header: include the header",
    ("-fprofile-use", "-fprofile-instr-use", "-fbranch-probabilities", "-fauto-profile",
     "-fprofile-sample-use"): "a profile of an earlier run: leave it out",
    ("-flto", "-fplugin", "-fpass-plugin", "-plugin", "-load"): "files of a plugin: leave it out",
}  # fmt: skip
_PASSING = ("-W", "-X", "--compiler-options", "--linker-options")  # flags to another tool
_LOADED = (b"\2\0", b"\3\0", b"\0\2", b"\0\3")  # ELF's types of a program and a shared library


class NotSupported(Exception):
    """A build that `load` and `load_inline` leave to Torch: they catch this."""


def names_no_file(flag: str) -> bool:
    """Return whether a flag names no file; the value of a macro may name one in quotes."""
    quotes = '"<' if "/" in flag else ""
    odd = quotes if flag.startswith("-D") else ",/"
    return flag.startswith(_HARMLESS) and not set(flag) & set(f" \t\n@{odd}")


def files(flags: Sequence[str]) -> list[str]:
    """The files that a compiler or linker reads because flags name them, for the key.

    Headers are named as `#include` does, all others by whole paths. Shared libraries are left out.
    Raises DeclarationError for a flag that reads what the key does not cover.
    """
    named = [*paths_after(_FORCED, flags)]
    for flag in flags:
        parts = re.split("[,=]", flag) if flag.startswith(_PASSING) else [flag]
        plain = [re.sub("^--", "-", part) for part in parts]
        what = next((w for p in plain for b, w in _REFUSED.items() if p.startswith(b)), "")
        for path in paths_in(flag):
            if os.path.isfile(path) and not is_loaded(path):  # noqa: PTH113
                named.append(path)
                what = what or ("" if flag.startswith(_FILES) else f"{path}: leave it out")
        if what:
            raise DeclarationError(
                f"the flag `{flag}` reads what the cache key does not cover, {what}"
            )
    return list(dict.fromkeys(named))


def linked(flags: Sequence[str], folders: Iterable[str]) -> list[str]:
    """The files that a linker may read: those that flags name, and the libraries in directories.

    All libraries of a name count, so one that appears before another changes the key. folders: to
    search after those of the flags. Raises DeclarationError, as `files` does.
    """
    parts = [*flags, *(part for flag in flags if "," in flag for part in flag.split(","))]
    names = [
        file for name in paths_after(("-l", "--library"), parts)
        for file in ((name[1:],) if name[:1] == ":" else (f"lib{name}.so", f"lib{name}.a"))
    ]  # fmt: skip
    searched_ = [*paths_after(("-L", "--library-path"), parts), *filter(None, folders)]
    paths = (os.path.join(folder, name) for folder in searched_ for name in names)  # noqa: PTH118
    shared = (path for flag in flags for path in paths_in(flag) if flag[:1] == "/")
    found = (path for path in (*paths, *shared) if os.path.isfile(path))  # noqa: PTH113
    return list(dict.fromkeys((*files(flags), *found)))


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


def words_of(source: Source) -> list[str]:
    """All flags of a source's compilers, with those in variables."""
    told = config.current().environment
    read = [name for name in source.environment if name in NVCC_FLAGS and name in told]
    return [*source.every_flag, *words([told[name] for name in read])]


def searched(flags: Iterable[str], variables: Iterable[str]) -> list[str]:
    """The directories, by absolute paths, that flags and variables add to those of `#include`.

    variables: names of variables of the environment that hold such directories.
    """
    paths = [p for flag in flags if not flag.startswith(_NOT_SEARCHING) for p in paths_in(flag)]
    environment = config.current().environment
    paths += [path for name in variables for path in environment.get(name, "").split(":")]
    absolute = (p for p in dict.fromkeys(paths) if os.path.isabs(p) and "\0" not in p)  # noqa: PTH117
    return [path for path in absolute if not os.path.isfile(path)]  # noqa: PTH113


def numbered(flags: Iterable[str], roots: Sequence[str]) -> Iterator[str]:
    """The flags with the number of a root in the place of its path."""
    for flag in flags:
        option = next((o for o in _SEARCHING if flag.startswith(o)), "")
        path = flag[len(option) :].removeprefix("=") if option else flag
        yield f"{option}<{roots.index(path)}>" if path in roots else flag


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
