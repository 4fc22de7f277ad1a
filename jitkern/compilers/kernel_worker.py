"""What the child processes of compilers in Python share: see `kernel_process`."""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from jitkern.compilers.kernel_modules import KernelModules
from jitkern.compilers.kernel_process import RESULT
from jitkern.source.kinds import SOURCES, ImportedSource


class NotBuilt(Exception):
    """Raised for what jitkern does not compile; the text is for the author of the kernel."""


def main(
    compiled: Callable[[dict[str, Any], KernelModules, Path], dict[str, Any]],
    programs: Sequence[str] = (),
) -> None:
    """Read a request, and write the result: what `compiled` returns, or an error.

    compiled: takes the request, the modules of the kernel and the folder for artifacts. programs:
    what the compiler starts.
    """
    request = json.loads(sys.stdin.read())
    staging = Path(request["staging"])
    source = SOURCES[request["kind"]](**request["source"])
    assert isinstance(source, ImportedSource)
    modules = KernelModules(source, request["files"], str(staging), programs)
    try:
        result = compiled(request, modules, staging)
    except BaseException as e:  # noqa: BLE001  whatever a kernel's file raises
        result = {"error": modules.real(_explain(e, str(source.paths[0])))}
        traceback.print_exc()
    (staging / RESULT).write_text(json.dumps(result))


def passed(
    request: dict[str, Any], names: Sequence[str], constants: Collection[str]
) -> tuple[str, list[str]]:
    """Return the function as messages name it, and the parameters that take the arguments.

    names: all parameters. constants: those that must be template arguments. Raises NotBuilt for
    another number of arguments, and other template arguments.
    """
    function, template = request["function"], dict(request["template"])
    what = f"`{function}({', '.join(names)})`"
    for name in template.keys() - {*names}:
        raise NotBuilt(f"{what} has no parameter `{name}`")
    for name in constants:
        if name not in template:
            at = f"k.{function}[{{'{name}': …}}](…)"
            raise NotBuilt(f"{what} needs the constant `{name}`, so pass it in brackets: {at}")
    others = [name for name in names if name not in template]
    count = len(request["signature"])
    if len(others) != count:
        listed = ", ".join(others)
        raise NotBuilt(f"{what} takes {len(others)} arguments ({listed}), got {count}")
    return what, others


def _explain(e: BaseException, file: str) -> str:
    """Return the error as `file(line): error: message`, the form of the other compilers."""
    frames = traceback.extract_tb(e.__traceback__)
    place: Any = next((f for f in reversed(frames) if f.filename.startswith("/jitkern/")), None)
    path, line = (place.filename, place.lineno) if place else (file, None)
    if isinstance(e, SyntaxError):
        path, line = e.filename or path, e.lineno
    if (loc := getattr(e, "loc", None)) and loc.filename:  # of cuTile's errors
        path, line = loc.filename, loc.line
    message = getattr(e, "message", None) or getattr(e, "msg", None) or str(e)
    message = re.sub(r"\x1b\[\d*m", "", str(message))  # colours of a terminal
    name = "" if isinstance(e, (NotBuilt, ImportError)) else f"{type(e).__name__}: "
    return f"{path}{f'({line})' if line else ''}: error: {name}{message}"
