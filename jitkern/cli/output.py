"""Print data on stdout, as text or JSON, and progress on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jitkern import config

if TYPE_CHECKING:
    from jitkern.prewarming.builder import Step


def print_json(**fields: object) -> None:
    """Print one JSON object, the last line of stdout under `--json`."""
    print(json.dumps({"schema": 1, **fields}))


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table of left-aligned columns."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def human_bytes(size: float) -> str:
    """Return a size in bytes as text, e.g. `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def human_age(seconds: float) -> str:
    """Return an age in seconds as text, e.g. `3 h`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def styled(text: str, code: str) -> str:
    """Return `text` in an ANSI style if stdout is a terminal and the settings allow color."""
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() and config.current().color else text


def _columns() -> int:
    """Return the width of the terminal of stderr."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


class Progress:
    """A live bar on a terminal, a line per item elsewhere; all on stderr."""

    WIDTH = 24

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()

    def __enter__(self) -> Progress:  # noqa: PYI034  Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def __call__(self, step: Step) -> None:
        """Show a step."""
        if not step.finished:  # a remark, which stays
            self._clear()
            print(step.text, file=sys.stderr, flush=True)
        elif not self.live:
            print(f"[{step.done}/{step.total}] {step.text}", file=sys.stderr, flush=True)
        else:
            filled = self.WIDTH * step.done // max(1, step.total)
            bar = "#" * filled + "." * (self.WIDTH - filled)
            text = f"[{bar}] {step.done}/{step.total} {step.text}"
            sys.stderr.write(f"\r\033[K{text[: _columns() - 1]}")  # a line that wraps would stay
            sys.stderr.flush()

    def _clear(self) -> None:
        if self.live:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
