"""The import of a kernel's file and its helpers, of which nothing but what the key covers counts.

The text that is compiled names no folder of this machine: compilers write the names of files into
their results, for debuggers.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.metadata
import importlib.util
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jitkern
from jitkern.source.closure import module_files
from jitkern.source.kinds import ImportedSource

_PACKAGE = "jitkern_kernels"  # of files that belong to none
_IMPORTERS = ("importlib", "pkgutil", "runpy", "zipimport")  # that import by a text
_ELSEWHERE = ("os.exec", "os.posix_spawn", "os.system", "socket.connect", "subprocess.Popen")
_INSTALLED = ("site-packages", "dist-packages")  # folders of pip


class KernelModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The finder and loader of the files of one source.

    files: its closure. staging: the folder that the compiler writes to. programs: what the compiler
    starts. A package around the files is empty, unless the closure has its `__init__`.
    """

    def __init__(
        self, source: ImportedSource, files: Sequence[str], staging: str, programs: Sequence[str]
    ) -> None:
        self._source = source
        self._files = {*files}
        self._programs = programs
        python = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")
        installed = (path for path in sys.path if Path(path).name in _INSTALLED)
        own = str(Path(jitkern.__file__).parent)
        folders = (own, staging, *python, *installed, "/proc", "/dev")
        self._readable = (*files, *(f"{folder}{os.sep}" for folder in folders))
        self._main = f"{source.package or _PACKAGE}.{source.paths[0].stem}"
        self._parents = {self._main[:i] for i, c in enumerate(self._main) if c == "."}
        self._builtins = {**vars(builtins), "__import__": self._import}

    def module(self) -> ModuleType:
        """Import the kernel's file. Raises whatever its statements raise."""
        sys.meta_path.insert(0, self)
        sys.addaudithook(self._audit)
        return importlib.import_module(self._main)

    def real(self, text: str) -> str:
        """Return a text with the paths of the files on this machine."""
        paths = {self._name(path): path for path in self._files}
        return re.sub("|".join(map(re.escape, paths)), lambda match: paths[match[0]], text)

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        file = str(self._source.paths[0]) if name == self._main else self._file_of(name)
        if not file and name not in self._parents:
            return None
        package = name in self._parents or file.endswith("__init__.py")
        spec = importlib.machinery.ModuleSpec(name, self, is_package=package)
        spec.loader_state = file
        return spec

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__
        path = module.__spec__.loader_state
        vars(module)["__builtins__"] = self._builtins
        if path:
            name = module.__file__ = self._name(path)
            text = importlib.util.decode_source(Path(path).read_bytes())
            linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
            exec(compile(text, name, "exec", dont_inherit=True), vars(module))  # noqa: S102  as an import does

    def _file_of(self, name: str) -> str:
        paths = module_files(self._source, "", (0, name.removeprefix(f"{_PACKAGE}.")))
        return next((path for path in paths if path in self._files), "")

    def _name(self, path: str) -> str:
        """The path of a file as code names it: relative to the kernel's folder."""
        return f"/jitkern/{os.path.relpath(path, self._source.folder)}"

    def _import(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0  # noqa: A002
    ) -> Any:  # fmt: skip
        """Do what an import statement of the files does, for what the key covers."""
        inside = tuple(f"{module}." for module in self._source.language)
        imported = [f"{name}.{item}." for item in fromlist or ()]
        of_language = f"{name}.".startswith(inside) or (
            imported and all(one.startswith(inside) for one in imported)
        )
        top = name.partition(".")[0]
        ours = level or self._file_of(name) or {name, top} & {self._main, *self._parents}
        known = top in sys.stdlib_module_names and top not in _IMPORTERS
        if not (ours or known or of_language):
            self._check_declared(name, top)
        return builtins.__import__(name, globals, locals, fromlist, level)

    def _check_declared(self, name: str, top: str) -> None:
        """Raise ImportError for another package than those of the declared versions."""
        same = [one.name for one in importlib.metadata.distributions(name=top)]
        owners = importlib.metadata.packages_distributions().get(top, same)  # 3.10 lacks many
        installed = {owner: importlib.metadata.version(owner) for owner in owners}
        if installed.items() & self._source.packages:
            return
        declared = [f"{n}=={v}" for n, v in self._source.packages if n in installed]
        why = "is imported, which the cache key does not cover"
        remedy = f"{type(self._source).__name__}(..., packages={installed})"
        if declared:
            why, remedy = f"is not installed as {declared[0]}", f"install that, or declare {remedy}"
        elif installed:
            remedy = f"declare the version, {remedy}"
        else:
            remedy = "it is no module of the kernel's package, nor of an installed one"
        raise ImportError(f"`{name}` {why}: {remedy}")

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str):
            path = os.path.abspath(args[0])  # noqa: PTH100
            metadata = os.path.dirname(path).endswith(("dist-info", "egg-info"))  # noqa: PTH120
            if not (path.startswith(self._readable) or metadata) and os.path.isfile(path):  # noqa: PTH113
                raise ImportError(
                    f"a kernel opens {path}, which the cache key does not cover: pass what it has "
                    "as arguments or as constants"
                )
        if event == "subprocess.Popen" and Path(args[1][0]).name in self._programs:
            return
        if event in _ELSEWHERE:
            raise ImportError(f"a kernel calls {event}, whose answer the cache key does not cover")
