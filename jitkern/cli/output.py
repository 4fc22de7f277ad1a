"""Print data on stdout, as text or JSON, and progress and errors on stderr.

The progress line is drawn by hand: it is one line, and a package for it would cost more time to
import than most commands take.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO, TypeVar

from jitkern import config

if TYPE_CHECKING:
    from jitkern.prewarming.tasks import Step

RED, GREEN, YELLOW, BOLD, DIM = "31", "32", "33", "1", "2"
_HEARTBEAT = 30.0  # seconds between lines of progress where no line can be redrawn
_NARROWEST = 6
_AROUND = 4  # lines of a terminal that a header, a total and two prompts take
T = TypeVar("T")
_color = "auto"


def use_color(when: str) -> None:
    """Color text always, never, or `auto`: on a terminal, if the settings allow it."""
    global _color  # noqa: PLW0603  set once for each command line
    _color = when


def print_json(**fields: object) -> None:
    """Print one JSON object, the last line of stdout under `--json`."""
    print(json.dumps({"schema": 1, **fields}))


def print_table(
    header: Sequence[str], rows: Iterable[Sequence[object]], *, whole: bool = False
) -> None:
    """Print a table of left-aligned columns, cut to the terminal unless `whole`."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    room = columns(sys.stdout) - 2 * (len(widths) - 1)
    while not whole and sys.stdout.isatty() and sum(widths) > room and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    for number, row in enumerate(cells):
        line = "  ".join(cut(cell, width).ljust(width) for cell, width in zip(row, widths)).rstrip()
        print(styled(line, DIM) if number == 0 else line)


def on_screen(rows: list[T], *, whole: bool, lines: int = 1) -> tuple[list[T], str]:
    """Return the rows that fit on the terminal, and what a total says of the others, or "".

    whole: all rows fit, as where no terminal is. lines: of a row.
    """
    if whole or not sys.stdout.isatty():
        return rows, ""
    most = max(1, (shutil.get_terminal_size().lines - _AROUND) // lines)
    rest = len(rows) - most
    return rows[:most], f"; {rest} are not shown: add -v" if rest > 0 else ""


def cut(text: str, width: int) -> str:
    """Return the text, its end replaced by `…` if it is wider."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def fitted(line: str, *, whole: bool, mark: str = "", color: str = "") -> str:
    """Return a line behind a mark, cut to the terminal unless `whole`, or where no terminal is."""
    if not whole and sys.stdout.isatty():
        line = cut(line, columns(sys.stdout) - len(mark))
    return styled(mark, color) + line


def styled(text: str, code: str, stream: TextIO | None = None) -> str:
    """Return `text` in an ANSI style if the stream, by default stdout, is to have color."""
    on = (stream or sys.stdout).isatty() and config.current().color
    if not text or _color == "never" or (_color == "auto" and not on):
        return text
    return f"\033[{code}m{text}\033[0m"


def agreed(what: str) -> int:
    """Ask whether to do something. Return 0 for yes, or the exit code of a command that does not.

    what: begins with a verb, as in `remove 2 entries`.
    """
    if not sys.stdin.isatty():
        say(f"cannot ask whether to {what}: add --yes")
        return 2
    print(f"{what[0].upper()}{what[1:]}? [y/N] ", end="", file=sys.stderr, flush=True)
    return 0 if sys.stdin.readline().strip().lower() in ("y", "yes") else 1


def say(message: str, *, code: str = RED) -> None:
    """Print an error or a warning to stderr."""
    print(f"{styled('jitkern:', code, sys.stderr)} {message}", file=sys.stderr, flush=True)


def columns(stream: TextIO) -> int:
    """Return the width of the terminal of a stream."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


class Progress:
    """A redrawn line on a terminal, and now and then a line elsewhere; all on stderr.

    every: print a line for each step instead. quiet: print nothing of steps and remarks.
    """

    def __init__(self, *, every: bool = False, quiet: bool = False) -> None:
        self.live = sys.stderr.isatty() and not quiet and not every
        self.every = every
        self.quiet = quiet
        self._started = self._told = time.monotonic()

    def __enter__(self) -> Progress:  # noqa: PYI034  Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def __call__(self, step: Step) -> None:
        """Show a step."""
        if self.quiet:
            return
        if not step.finished:  # a remark, which stays
            self.clear()
            say(step.text, code=YELLOW)
            return
        self.show(f"[{step.done}/{step.total}] {step.text}")

    def show(self, text: str) -> None:
        """Show what is going on."""
        now = time.monotonic()
        if self.live:
            text = cut(f"{now - self._started:.0f} s {text}", columns(sys.stderr) - 1)
            sys.stderr.write(f"\r\033[K{text}")  # a line that wraps would stay
            sys.stderr.flush()
        elif self.every or now - self._told > _HEARTBEAT:
            self._told = now
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the redrawn line away."""
        if self.live:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
