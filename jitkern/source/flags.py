"""Files and searched directories that flags of compilers and linkers name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

SEARCHING = ("-isystem", "-iquote", "-idirafter", "--include-path", "-I")
_RESPONSES = ("@", "-optf", "--options-file")
_LOADED = (b"\2\0", b"\3\0", b"\0\2", b"\0\3")  # ELF's types of a program and a shared library


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
    """Whether the file is a program or a shared library, which its loader reads and no compiler."""
    with Path(path).open("rb") as file:
        head = file.read(18)
    return head[:4] == b"\x7fELF" and head[16:] in _LOADED
