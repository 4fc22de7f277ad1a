"""What happens in the processes of a run: lines of JSON in one file; and which commands compile.

Programs read this file by itself, also in environments without jitkern.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False  # as in `typing`, whose import would delay the start of each process
if TYPE_CHECKING:
    from typing import Any

FOLDER = "JITKERN_RUN"  # the variable with the folder of the run
MODE = "JITKERN_RUN_MODE"  # "", "warn" or "frozen"
COMMAND = "JITKERN_RUN_COMMAND"  # the words of what prepares the cache, with SEPARATOR
ASKED = "JITKERN_RUN_ASKED"  # the tool that a Python process starts, and the line that asked
CACHES = "JITKERN_RUN_CACHES"  # the folder with those of the JITs
FILE = "events.jsonl"
TOOLS = "jitkern-tools-"  # how the folder of the shims begins
SEPARATOR = "\x1f"
COMPILERS = (  # a pattern of names, such as `x86_64-linux-gnu-g++-12`
    r"(?:[\w.-]+-)?(?:nvcc|ptxas|cicc|nvlink|hipcc|cc|c\+\+|gcc|g\+\+|clang(?:\+\+)?)(?:-?[\d.]+)?"
)
_ASKS = (  # what only asks a compiler about itself or a text; `ctypes.util` asks for a library
    "--version", "-v", "-V", "--help", "-dumpversion", "-dumpmachine", "-dumpfullversion",
    "-Wl,-t", "-E", "-M", "-MM",
)  # fmt: skip
_SOURCES = (".cu", ".cpp", ".cc", ".c", ".cxx", ".ptx", ".ll", ".hpp")


def note(**event: object) -> None:
    """Append an event to the file of the run; lines of several processes do not mix."""
    import json  # when something happens, and not at the start of each process

    try:
        with open(f"{os.environ[FOLDER]}/{FILE}", "ab", buffering=0) as file:
            file.write(json.dumps(event).encode() + b"\n")
    except (KeyError, OSError):
        pass  # the run is over, and this process is not


def begins(tool: str, what: str, where: str, remark: str = "") -> str:
    """Return why a compile that begins is refused, or told of, and what prepares it; "" if neither.

    A refusal is noted. remark: what of the tool is never kept.
    """
    mode = os.environ.get(MODE)
    if not mode:
        return ""
    import shlex

    if mode == "frozen":
        note(tool=tool, what=what, where=where, refused=True)
    command = shlex.join(os.environ.get(COMMAND, "").split(SEPARATOR))
    return (
        f"jitkern run --{mode}: {tool} compiles {what}, asked for at {where}, and the cache has "
        f"nothing for it. Prepare it where compilers may run, with `{command}`, and carry it here "
        "with --push, `jitkern cache pack` or `jitkern remote push`" + (remark and f"; {remark}")
    )


def ended(tool: str, what: str, where: str, started: float) -> None:
    """Note a compile that has ended. started: by `time.monotonic`."""
    seconds = round(time.monotonic() - started, 3)
    note(tool=tool, what=what, where=where, seconds=seconds)


def compile_in(words: Any) -> tuple[str, str]:
    """Return the compiler that a command starts to compile, and the source; "" for other ones.

    Of texts for a shell, one command is read: the shims see what the others start.
    """
    import re  # where something is started, and not at the start of each process
    import shlex

    if isinstance(words, (str, bytes, os.PathLike)):
        text = re.sub(r"(^|\s)\d*(>>?|<)&?\s*[\w./-]+", " ", os.fsdecode(words)).strip()
        unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", text)
        try:
            words = () if re.search(r"[|&;<>()`\n]", unquoted) else shlex.split(text)
        except ValueError:
            words = ()  # the shell finds the quote without an end
    words = [os.fsdecode(word) for word in words or ()]
    name = os.path.basename(words[0]) if words else ""
    if name in ("sh", "bash", "dash") and words[1:2] == ["-c"] and len(words) > 2:
        return compile_in(words[2])
    asks = len(words) < 2 or any(word in _ASKS or word.startswith("-print") for word in words)
    if asks or not re.fullmatch(COMPILERS, name):
        return "", ""
    return name, next((word for word in words if word.endswith(_SOURCES)), words[-1])
