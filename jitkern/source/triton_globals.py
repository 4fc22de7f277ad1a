"""Values of the global names that a Triton kernel was compiled with.

The process that compiles runs the text of the kernel's file, and does not see what a program or a
package has assigned to a name of it. So the entry lists the values, and a process that has imported
the file compares them with its own.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from jitkern import source as source_room
from jitkern.errors import DeclarationError
from jitkern.source.closure import closure_of
from jitkern.source.constants import ALONE
from jitkern.source.kinds import Source
from jitkern.source.triton_decorators import BARE, bare

_PLAIN = (bool, int, float, str, type(None))


class TextLoader(importlib.machinery.SourceFileLoader):
    """Compiles the text that a file has now, since times tell of no edit within a second."""

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def text_of(value: Any, *, inside: bool = False) -> str:
    """The text of a value that a kernel may read; "" of others. Triton need not be imported.

    inside: whether the value is a variable around a function, which may be that function.
    """
    read = ""  # what Triton has read of a function
    while hasattr(value, "fn") and not hasattr(value, "__code__"):
        read, value = getattr(value, "src", read), value.fn
    if code := getattr(value, "__code__", None):
        cells = () if inside else getattr(value, "__closure__", None) or ()
        around = "".join(f", {text_of(cell.cell_contents, inside=True)}" for cell in cells)
        file = os.path.basename(code.co_filename)  # noqa: PTH119  of each such global
        digest = read and f", text {hashlib.sha256(read.encode()).hexdigest()[:8]}"
        return f"{code.co_name} of line {code.co_firstlineno} of {file}{digest}{around}"
    if type(value).__name__ == "constexpr":
        return text_of(value.value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(text_of, value))})"
    is_dtype = type(value).__name__ == "dtype"
    return str(value) if is_dtype else repr(value) if isinstance(value, _PLAIN) else ""


def check(source: Source, used: Iterable[tuple[str, str, str]]) -> None:
    """Raise DeclarationError if this process has given another value to a name that a kernel uses.

    used: the file relative to the source's folder, the name, and the text of its value.
    """
    by_path: dict[str, list[tuple[str, str]]] = {}
    for file, name, compiled in used:
        path = os.path.normpath(Path(os.path.realpath(source.folder), file))
        by_path.setdefault(path, []).append((name, compiled))
    for path, names in _names_of_files(by_path):
        for name, compiled in by_path[path]:
            if name in names and (present := text_of(names[name])) not in ("", compiled):
                raise DeclarationError(
                    f"`{name}` of {path} is {present} in this process, and {compiled} by the text "
                    "of the file, from which its kernels are compiled: write the value into the "
                    "file, or pass it as a constexpr argument; reload a file that was edited"
                )


def live_function(source: Source, function: str) -> Any:
    """Return a Triton function of a source's file as this process has imported it, or None."""
    if source.text:
        return source_room.declarations.live(source.text)
    found = (_named(names, function) for _, names in _names_of_files([str(source.paths[0])]))
    return next((value for value in found if bare(value) is not None), None)


def imported(source: Source, function: str) -> Any:
    """Return a Triton function of a source's file, which is imported if it was not.

    Raises what the statements of the file raise, and AttributeError.
    """
    if (known := live_function(source, function)) is not None:
        return known
    name = f"{source.package}.{source.paths[0].stem}"
    module = importlib.import_module(name) if source.package else _run_alone(source)
    if (value := _named(vars(module), function)) is None:
        raise AttributeError(f"the import gives no function `{function}`")
    return value


def _run_alone(source: Source) -> ModuleType:
    """Run a file without a package. It and its helpers are forgotten, as they may be edited."""
    path, own = source.paths[0], closure_of(source).paths
    module = ModuleType(f"{ALONE}{abs(hash(str(path)))}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    new = [module.__name__]

    def find_spec(name: str, *where: Any) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, *where)
        if not spec or name in sys.modules or Path(spec.origin or "").resolve() not in own:
            return None
        spec.loader = TextLoader(name, str(spec.origin))
        new.append(name)
        return spec

    finder: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)
    try:
        exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), vars(module))  # noqa: S102
    finally:
        sys.meta_path.remove(finder)
        for name in new:
            sys.modules.pop(name, None)
    return module


def _named(names: dict[str, Any], function: str) -> Any:
    """Return what a module has by a name, also by `name.fn`; None if it has nothing."""
    value = names.get(function.removesuffix(BARE))
    return bare(value) if function.endswith(BARE) else value


def _names_of_files(paths: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the names of each module that this process has imported from files.

    A module that was imported by way of a link is found by the name of the link.
    """
    by_real = {os.path.realpath(path): path for path in paths}
    last = tuple(map(os.path.basename, [*by_real, *by_real.values()]))
    for module in [*sys.modules.values()]:
        names = vars(module) if isinstance(module, ModuleType) else {}
        file = names.get("__file__")
        if isinstance(file, str) and file.endswith(last):
            path = by_real.get(os.path.realpath(file))
            if path is not None:
                yield path, names
