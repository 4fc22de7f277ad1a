"""The values of global names that a Triton function uses, and whether they follow from the key.

Triton puts the values of global names into its output. The key covers the texts of the kernel's own
modules, and so every value that they compute without other data. To see which values those are, the
statements of these modules are run again without other data (`_CoveredText`). A value of another
module, a data file or the machine is unknown then, and is refused by its name.
"""

from __future__ import annotations

import ast
import builtins
import dis
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from jitkern.source.global_names import code_names
from jitkern.source.triton_decorators import KNOWN, Unknown, inner, parts_of
from jitkern.source.triton_globals import text_of
from jitkern.source.triton_text import PURE, READING, PythonText, is_kernel

# The results of these follow from their arguments, or from a version that the key has.
_FOLLOWED = PURE | {"packaging", "sys", "torch", "triton"}
_OF_THE_MACHINE = (  # or of files
    "torch.backends", "torch.cuda", "torch.from_file", "torch.hub", "torch.jit", "torch.load",
    "triton.runtime",
)  # fmt: skip
_OF_THE_KEY = ("os.environ", "os.getenv")  # only variables that a source names are there
_ANY_NAME = frozenset(  # by these, a statement may give any name another value
    ("__dict__", "eval", "exec", "globals", "import_module", "locals", "modules", "vars")
)
_INSTEAD = "write the value out in the kernel's own file, or pass it as a constexpr argument"


class NotCovered(BaseException):
    """A text uses data that the key does not cover; no `except Exception` of it is to catch this.

    what: what reads the data, if the data is no other module. path: the file of that module.
    """

    def __init__(self, what: str, path: str = "") -> None:
        super().__init__(what, path)
        self._what, self._path = what, path

    def told_of(self, name: str) -> str:
        """Return the message for a name whose value follows from the data."""
        if self._path:
            return (
                f"`{name}` comes from {self._path}, which the cache key does not cover: define it "
                f"in the kernel's own file or package, or {_INSTEAD}"
            )
        return (
            f"the kernel uses a value made by `{self._what}`, and the cache key does not cover the "
            f"data that `{self._what}` reads: {_INSTEAD}"
        )


class Origins:
    """The files that the key covers, and the values that their statements give.

    used: the values of names that functions use, by file and name.
    """

    def __init__(self, covered: Iterable[str]) -> None:
        self._covered = {os.path.realpath(path) for path in covered}
        self.texts: dict[str, _CoveredText] = {}
        self.used: dict[tuple[str, str], Any] = {}

    def follow(self, names: dict[str, Any], name: str) -> None:
        """Check a name of a module, and if it is a function, the names that it uses.

        Raises TypeError for a value that follows from data outside of the key.
        """
        value, path = names[name], _path_of(names)
        if name.startswith("__") or _is_tritons(value) or (path, name) in self.used:
            return
        try:
            if path not in self._covered:
                _check_member(names, name)
                return
            self.used[path, name] = value
            self._check(self.text(path, names), name, value)
        except NotCovered as e:
            raise TypeError(e.told_of(name)) from None
        function = inner(value)
        if isinstance(function, FunctionType):
            for read in code_names(function.__code__).reads:
                self._follow_chain(function.__globals__, (read.name, *read.attributes))

    def _follow_chain(self, names: dict[str, Any], chain: tuple[str, ...]) -> None:
        """Check a name, and of a module the attribute that is taken off it."""
        for name in chain:
            if name not in names:
                if name in READING | _ANY_NAME and hasattr(builtins, name):
                    raise TypeError(NotCovered(name).told_of(name))
                return  # a builtin
            self.follow(names, name)
            if not isinstance(names[name], ModuleType):
                return
            names = vars(names[name])

    def _check(self, text: _CoveredText, name: str, value: Any) -> None:
        """Check that the statements of a file give a name this value."""
        known = text.names.get(name)
        lost = None if isinstance(inner(value), (FunctionType, ModuleType)) else text.lost
        for error in (lost, *_errors_in(known, set())):
            if isinstance(error, NotCovered):
                raise error
            if error:
                raise TypeError(
                    f"the statements that give `{name}` of {text.path} its value cannot be run "
                    f"again: {type(error).__name__}: {error}: {_INSTEAD}"
                )
        given, real = _shown(known), _shown(value)
        if name not in text.names or given != real:
            raise TypeError(
                f"`{name}` of {text.path} is {real or value!r}, and the statements of the file "
                f"give it {given or 'no such value'}: {_INSTEAD}"
            )

    def text(self, path: str, names: dict[str, Any]) -> _CoveredText:
        """Return the covered file of a module with these names; its statements have been run."""
        if path not in self.texts:
            text = self.texts[path] = _CoveredText(self, path, names)
            text.run(ast.parse(Path(path).read_bytes()))
        return self.texts[path]

    def imported(self, name: str, package: str | None = None) -> Any:
        """Return the module of this name as the statements of a covered file see it."""
        full = importlib.util.resolve_name(name, package)
        if full not in sys.modules:
            raise ModuleNotFoundError(f"`{full}` was not imported", name=full)
        return self.seen(sys.modules[full])

    def seen(self, module: ModuleType) -> Any:
        """Return a module as the statements of a covered file see it."""
        path = _path_of(vars(module))
        if path in self._covered:
            return self.text(path, vars(module)).module
        pure = module.__name__.partition(".")[0] in PURE | {"packaging"}
        return module if pure else _Part(self, module)


class _Part:
    """A module whose members are refused if they follow from data outside of the key."""

    def __init__(self, origins: Origins, module: ModuleType) -> None:
        self._origins, self._module = origins, module
        self.__name__ = module.__name__

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if value is sys.modules:
            texts = self._origins.texts.values()
            return {text.names["__name__"]: text.module for text in texts}
        if value is importlib.import_module:
            return self._origins.imported
        if isinstance(value, ModuleType):
            return self._origins.seen(value)
        if self.__name__.partition(".")[0] == "triton" and name in KNOWN:
            return KNOWN[name]
        _check_member(vars(self._module), name)
        return value

    def public(self) -> dict[str, Any]:
        """Return what `from module import *` gives."""
        names = [name for name in vars(self._module) if name[0] != "_"]
        found = {}
        for name in getattr(self._module, "__all__", names):
            try:
                found[name] = getattr(self, name)
            except NotCovered as e:
                found[name] = Unknown(e)
        return found


class _CoveredText(PythonText):
    """A file that the key covers, whose statements see no data that the key does not cover.

    lost: why any name but those of functions may have another value than it was seen to be given.
    """

    def __init__(self, origins: Origins, path: str, names: dict[str, Any]) -> None:
        import triton.language

        self._origins = origins
        self.lost: BaseException | None = None
        self.module = ModuleType(names["__name__"])
        own = vars(self.module)
        own.update((name, names[name]) for name in ("__file__", "__package__") if name in names)
        parts = {"triton": origins.seen(triton), "tl": origins.seen(triton.language)}
        super().__init__(path, own, parts)
        own["__builtins__"].update({name: Unknown(NotCovered(name)) for name in READING})

    def _import(
        self, name: str, names: Any = None, local: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        relative = f"{'.' * level}{name}"
        found = self._origins.imported(relative, self.names.get("__package__"))
        if not fromlist:
            return self._origins.imported(name.partition(".")[0])
        if "*" in fromlist and isinstance(found, _Part):
            self.names.update(found.public())
            return ModuleType(name)
        for member in fromlist:
            module = sys.modules.get(f"{found.__name__}.{member}")
            if module and isinstance(found, ModuleType):
                setattr(found, member, self._origins.seen(module))
        return found

    def _explained(self, error: BaseException, line: int) -> BaseException:
        return error

    def _decorated(self, node: ast.FunctionDef) -> Any:
        if is_kernel(node):  # its decorators are compared with those that a launch reads
            return KNOWN["jit"](self._undecorated(node))
        return super()._decorated(node)

    def _fail(self, node: ast.stmt, error: BaseException) -> None:
        """Make unknown what the statement gives and what it may change, also by functions."""
        super()._fail(node, error)
        codes = [compile(ast.Module([node], []), self.path, "exec")]
        changed: set[str] = set()
        for code in codes:  # it grows
            words = {*code.co_names}
            codes += [part for part in code.co_consts if isinstance(part, CodeType)]
            values = [self.names[name] for name in words & self.names.keys()]
            functions = [v.__code__ for v in values if isinstance(v, FunctionType)]
            codes += [function for function in functions if function not in codes]
            steps = dis.get_instructions(code)
            changed |= {s.argval for s in steps if s.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}
            changed |= {n for n in words & self.names.keys() if _may_change(self.names[n])}
            if words & _ANY_NAME or any(v is self.module or v is self.names for v in values):
                self.lost = self.lost or error
        self.names.update(dict.fromkeys(changed, Unknown(error)))


def _check_member(names: dict[str, Any], name: str) -> None:
    """Raise NotCovered for a member of a module that is not covered, if its value is not, too."""
    full = f"{names['__name__']}.{name}"
    top = full.partition(".")[0]
    if f"{full}.".startswith(tuple(f"{place}." for place in _OF_THE_MACHINE)):
        raise NotCovered(full)
    if top in _FOLLOWED or full in _OF_THE_KEY:
        return
    if top in sys.stdlib_module_names:
        raise NotCovered(full)
    raise NotCovered(full, str(names.get("__file__") or names["__name__"]))


def _path_of(names: dict[str, Any]) -> str:
    """The file of a module with these names."""
    return os.path.realpath(names.get("__file__") or "")


def _may_change(value: Any) -> bool:
    """Whether a statement that is given a value may change it."""
    if isinstance(value, (FunctionType, ModuleType, _Part, Unknown)) or _is_of_triton(value):
        return False
    return isinstance(value, (dict, list, set)) or hasattr(value, "__dict__")


def _is_of_triton(value: Any) -> bool:
    """Whether a value is Triton's, or stands for one of Triton's."""
    return type(value).__module__.partition(".")[0] in ("triton", "jitkern")


def _errors_in(value: Any, seen: set[int]) -> Iterator[BaseException]:
    """Why parts of a value are unknown."""
    if isinstance(value, Unknown):
        yield value.why
    elif id(value) not in seen and not isinstance(value, (_Part, ModuleType)):
        seen.add(id(value))
        for part in parts_of(value):
            yield from _errors_in(part, seen)


def _shown(value: Any) -> str:
    """The text of a value, or the name of a function; "" of others."""
    name = getattr(inner(value), "__name__", None)
    return name if isinstance(name, str) else text_of(value)


def _is_tritons(value: Any) -> bool:
    """Whether a value is a function of Triton's own; its text depends on Triton's version."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] == "triton"
    function = getattr(value, "fn", value)
    package = str(getattr(function, "__module__", "")).partition(".")[0]
    return package == "triton" and hasattr(function, "__qualname__")
