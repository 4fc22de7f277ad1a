"""A check of a machine for `jitkern doctor`, its result, and figures in words."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from jitkern.errors import JitkernError
from jitkern.named_tuple import NamedTuple

ELSEWHERE = "point JITKERN_CACHE_DIR at a directory of your own"
_ERROR = r"(?P<before>.*?)(?P<error>[^\s:]+(?::\d+(?::\d+)?|\(\d+\)): .*)"
_OF_A_COMPILER = _ERROR.replace(": .*)", r": (?:\w+ )?error: .*)")  # rather than of a launch


@dataclass(frozen=True)
class Check:
    """A line of `jitkern doctor`: the thing checked, its state and origin, and a remedy.

    A check with `ok` and a remedy is a warning.
    """

    name: str
    ok: bool
    value: str
    origin: str = ""
    remedy: str = ""


class Problem(Exception):
    """What is wrong with a thing.

    remedy: "" for that of the row. ok: whether the thing works all the same.
    """

    def __init__(self, value: str, remedy: str = "", *, ok: bool = False) -> None:
        super().__init__(value)
        self.remedy = remedy
        self.ok = ok


class Look(NamedTuple):
    """A row of the table of checks.

    ask: the state of the thing, or what returns it, or "" for a missing one, and raises Problem.
    remedy: of each problem that names none; "" if the messages of errors have it. use: what alone
    needs the thing, as in `for signatures`; "" if everybody needs it.
    """

    name: str
    ask: str | Callable[[], str]
    remedy: str = ""
    use: str = ""
    origin: str = ""

    def check(self) -> Check:
        """Return the outcome. Raises nothing: on a broken machine any check may fail."""
        ok, remedy = False, self.remedy
        try:
            value = self.ask if isinstance(self.ask, str) else self.ask() or refuse("missing")
            ok, remedy = True, ""
        except Problem as e:
            value, ok, remedy = str(e), e.ok, e.remedy or remedy
        except ModuleNotFoundError:
            value = "missing"
        except JitkernError as e:
            value, _, rest = str(e).partition(": ")
            remedy = remedy or rest
        except Exception as e:  # noqa: BLE001  whatever a broken machine raises
            value, remedy = f"cannot be examined: {e}", remedy or "report this line"
        if not ok and self.use:
            value, ok, remedy = f"{value}: needed only {self.use}: {remedy}", True, ""
        return Check(self.name, ok, value, self.origin, remedy)


def refuse(value: str) -> NoReturn:
    """Raise Problem, as the `ask` of a row that is known to be one."""
    raise Problem(value)


def existing(path: Path) -> Path:
    """Return `path`, or its nearest parent that exists."""
    return next(p for p in (path, *path.parents) if os.path.lexists(p) or p == p.parent)


def counted(number: int, what: str) -> str:
    """Return a count as text, e.g. `1 kernel`, `2 kernels`."""
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


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


def headline(text: str) -> tuple[str, str]:
    """Return the line of an error that names a line of a file, first in it, and the other lines."""
    first, _, more = text.strip().partition("\n")
    found = re.match(_OF_A_COMPILER, first) or re.match(_ERROR, first)
    if not found:
        return first, more
    rest = (more, found["before"].rstrip(": "))
    return found["error"], "\n".join(part for part in rest if part)
