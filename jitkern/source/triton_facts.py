"""Evaluate the text of a Triton file with facts: variables, the device, its files.

Where decorators follow from `os.environ`, from `torch.cuda` or from a file of the kernel's package,
the statements are run with these at hand, and what they read is noted. Still no module is imported.
A reading says what an import would give only if nothing else has a part in it: whoever uses one has
compared it with an import that read the same.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

from jitkern.files import trust
from jitkern.named_tuple import NamedTuple
from jitkern.source import triton_globals
from jitkern.source.closure import module_files, states
from jitkern.source.kinds import Source
from jitkern.source.triton_decorators import (
    KNOWN,
    Standin,
    TritonFunction,
    Unknown,
    codes_in,
    is_alike,
    names_in,
    parts_of,
)
from jitkern.source.triton_text import (
    ANY_NAME,
    ASKING_KNOWN,
    READING,
    AskingKnown,
    LaunchText,
    UntoldByText,
    is_kernel,
    known_only,
)

_PLAIN = (str, int, float, type(None))
_PURE = frozenset(("abc", "numbers", "packaging", "re", "string", "textwrap"))
_PARTS = ("torch.cuda", "torch.version")  # modules of which some members are known
_FIXED = ("os.name", "os.sep", "sys.maxsize", "sys.platform", "sys.version_info")  # of this Python
_NOTED = ("torch.__version__", "torch.version.cuda", "torch.version.hip")
_CALLED = tuple(
    f"torch.cuda.{name}"
    for name in (
        "current_device", "device_count", "get_device_capability", "get_device_name",
        "get_device_properties", "is_available",
    )
)  # fmt: skip

_MOST = 20  # files of a reading: an import is not much slower then
_PLACED = "): error: "  # in the message of an error with its place
_OF_A_MODULE = ("__cached__", "__doc__", "__file__", "__loader__", "__package__", "__spec__")
_TAKING_ANY = frozenset(("callable", "id", "issubclass", "repr", "type"))


class Reading(NamedTuple):
    """A function by a reading, and what the reading depends on.

    noted: values, by the expressions that read them. files: the states of the files. packages:
    those that the texts import and that are not followed. taken: the values that one file took from
    another: module, file, name and value.
    """

    function: TritonFunction
    noted: dict[str, Any]
    files: dict[str, tuple[int, ...]]
    packages: frozenset[str]
    taken: Sequence[tuple[str, str, str, Any]]

    def is_current(self) -> bool:
        """Return whether the files are as they were."""
        return states(self.files) == self.files

    def agrees(self) -> bool:
        """Return whether modules of the files that this process has imported have these values."""
        return all(
            is_alike(value, names[name])
            for _, path, name, value in self.taken
            for names in triton_globals.names_of_file(os.path.realpath(path))
            if name in names
        )

    def is_of_modules(self) -> bool:
        """Return whether an import took the values from these files, and not from others."""
        files = ((sys.modules.get(module), path) for module, path, *_ in self.taken)
        return all(
            os.path.realpath(getattr(module, "__file__", None) or "") == os.path.realpath(path)
            for module, path in files
        )


def read(source: Source, function: str) -> Reading:
    """Read a function and its decorators with the facts at hand.

    Raises CompileError, and UntoldByText where these do not tell either.
    """
    notes = _Notes(source)
    path = str(source.paths[0])
    try:
        found = notes.text(path, source.package).function(function)
        notes.check(found)
    except NotTold as e:
        raise UntoldByText(str(e) if _PLACED in str(e) else f"{path}: error: {e}") from e
    packages, taken = frozenset(notes.packages), tuple(notes.taken)
    return Reading(found, notes.noted, notes.files, packages, taken)


class NotTold(BaseException):
    """A text needs an unavailable fact; no `except` in the text may catch this."""


class _Notes:
    """What the texts of one reading are given, and what they have read."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.noted: dict[str, Any] = {}
        self.files: dict[str, tuple[int, ...]] = {}
        self.packages: set[str] = set()
        self.taken: list[tuple[str, str, str, Any]] = []
        self.environment = _Environment(self)
        self.written: dict[CodeType, CodeType] = {}  # of functions, by that which asks for more
        self._texts: dict[str, _NotedText] = {}

    def note(self, expression: str, value: Any) -> Any:
        """Note a plain value that an expression has given, and return it. Raises NotTold."""
        if not _is_plain(value):
            raise NotTold(f"`{expression}` is a {type(value).__name__}")
        self.noted[expression] = value
        return value

    def text(self, path: str, package: str) -> _NotedText:
        """Return the text of a file, whose statements have been run or are running."""
        if path not in self._texts:
            if len(self._texts) == _MOST:
                raise NotTold(f"more than {_MOST} files are read")
            self.files[path] = trust.state(Path(path).stat())
            text = self._texts[path] = _NotedText(path, package, self)
            text.run(text.tree)
        return self._texts[path]

    def has(self, names: dict[str, Any]) -> bool:
        """Return whether these are the names of a text."""
        return any(text.names is names for text in self._texts.values())

    def module(self, name: str, members: Sequence[str]) -> Any:
        """Return what an import of a module of other packages gives; None if unknown."""
        top = name.partition(".")[0]
        if top in _PURE:
            return __import__(name, fromlist=members)
        given = name if members else top
        known = given in ("os", "sys", "torch", *_PARTS) and given in sys.modules
        return _NotedModule(self, given, sys.modules[given]) if known else None

    def check(self, function: TritonFunction) -> None:
        """Raise NotTold if decorators follow from what failed, or have functions that would fail.

        Their functions, and those that files took from others, get the code that is written.
        """
        for text in self._texts.values():
            if text.lost:
                raise text.lost
        later = [f for _, f in function.heuristics] + [*(function.pruning or ())[:3]]
        parts = [*self._reached(later, {*map(id, KNOWN.values())})]
        for value in (*parts, *self._reached([value for *_, value in self.taken], set())):
            if isinstance(value, FunctionType):
                value.__code__ = self.written.get(value.__code__, value.__code__)
        for value in parts:
            if isinstance(value, Unknown) and not isinstance(value, Standin):
                raise value.why
            if isinstance(value, _Environment):
                raise NotTold("a function of a decorator reads `os.environ` at each call")
            names = names_in(value.__code__) if isinstance(value, FunctionType) else set()
            known = {n: value.__globals__[n] for n in names if n in value.__globals__}
            others = names - known.keys() - KNOWN.keys() - vars(builtins).keys()
            if others and any(isinstance(part, Standin) for part in known.values()):
                raise NotTold(f"a function of a decorator may read `{min(others)}` of Triton")

    def _reached(self, value: Any, seen: set[int]) -> Iterator[Any]:
        """Yield a value, what it is made of, and what functions of texts in it read."""
        if id(value) in seen:
            return
        seen.add(id(value))
        yield value
        parts = [] if isinstance(value, (Unknown, _Environment)) else parts_of(value)
        if isinstance(value, FunctionType) and self.has(value.__globals__):
            names = names_in(value.__code__) & value.__globals__.keys()
            parts = [*parts, *(value.__globals__[name] for name in names)]
        for part in parts:
            yield from self._reached(part, seen)


class _NotedText(LaunchText):
    """A file that is evaluated with facts."""

    known_to_triton = not_imported = NotTold
    any_name = ANY_NAME | {"environ", "putenv"}

    def __init__(self, path: str, package: str, notes: _Notes) -> None:
        super().__init__(path)
        self.package = package
        self.tree = ast.parse(Path(path).read_bytes(), path)
        self._notes = notes
        if package:
            self.names["__name__"] = f"{package}.{Path(path).stem}"
        refused = {name: Unknown(NotTold(f"`{name}` is read")) for name in _OF_A_MODULE}
        self.names.update(refused)
        self.names["__builtins__"].update(ASKING_KNOWN)
        self.names["__builtins__"].update({n: Unknown(NotTold(f"`{n}` is read")) for n in READING})

    def _decorated(self, node: ast.FunctionDef) -> Any:
        if is_kernel(node):
            return super()._decorated(node)
        self._exec(node)
        return self.names[node.name]

    def _compiled(self, tree: ast.Module | ast.Expression) -> CodeType:
        """Return the code of a part of the text in which each use of an unknown value fails."""
        written = super()._compiled(tree)
        code = super()._compiled(ast.fix_missing_locations(_AskingEverywhere().visit(tree)))
        self._notes.written.update(zip(codes_in(code), codes_in(written)))
        return code

    def _fail(self, node: ast.stmt, error: BaseException) -> None:
        super()._fail(node, error)
        self._forget(node, error)

    def _reaches_out(self, value: Any) -> bool:
        is_others = isinstance(value, FunctionType) and value.__globals__ is not self.names
        return (
            (is_others and self._notes.has(value.__globals__))
            or isinstance(value, (_Environment, _OwnFile))
            or super()._reaches_out(value)
        )

    def _explained(self, error: BaseException, line: int) -> BaseException:
        if isinstance(error, NotTold) and _PLACED in str(error):
            return error
        what = error if isinstance(error, NotTold) else f"{type(error).__name__}: {error}"
        return NotTold(f"{self.path}({line}): error: an import must tell what this gives: {what}")

    def _beyond(self, name: str, members: Sequence[str], level: int) -> Any:
        if not level and (found := self._notes.module(name, members)) is not None:
            return found
        followed = bool(members) and "*" not in members and bool(self.package or not level)
        values = {m: self._member(name, m, level) for m in members} if followed else {}
        if not values or None in values.values():
            if not level:
                self._notes.packages.add(name.partition(".")[0])
            return None
        return SimpleNamespace(**{member: value[0] for member, value in values.items() if value})

    def _member(self, name: str, member: str, level: int) -> tuple[Any] | None:
        """Return what a name in one of the kernel's own files means; None for other files."""
        full = importlib.util.resolve_name("." * level + name, self.package or None)
        if (home := self._file(level, name)) and home != self.path:
            names = self._notes.text(home, _package_of(full, home)).names
            if member in names:
                self._notes.taken.append((full, home, member, names[member]))
                return (names[member],)
        below = f"{name}.{member}" if name else member
        if file := self._file(level, below):
            full = f"{full}.{member}"
            return (_OwnFile(self._notes, full, self._notes.text(file, _package_of(full, file))),)
        return None

    def _file(self, level: int, name: str) -> str:
        places = module_files(self._notes.source, self.path, (level, name))
        return next((place for place in reversed(places) if Path(place).is_file()), "")


def _package_of(module: str, file: str) -> str:
    return module if Path(file).name == "__init__.py" else module.rpartition(".")[0]


class _OwnFile(Unknown):
    """A module of the kernel's own files."""

    def __init__(self, notes: _Notes, name: str, text: _NotedText) -> None:
        super().__init__(NotTold(f"`{name}` is used as a value"))
        self._notes, self._name, self._text = notes, name, text

    def __getattr__(self, name: str) -> Any:
        if name not in self._text.names:
            raise NotTold(f"`{self._name}` has no `{name}` by its text")
        value = self._text.names[name]
        self._notes.taken.append((self._name, self._text.path, name, value))
        return value


class _NotedModule(Unknown):
    """A module, or facts of a device, that records its reads."""

    def __init__(self, notes: _Notes, name: str, real: Any) -> None:
        super().__init__(NotTold(f"`{name}` is used as a value"))
        self._notes, self._name, self._real = notes, name, real

    def __getattr__(self, name: str) -> Any:
        full = f"{self._name}.{name}"
        environment = self._notes.environment
        if full in ("os.environ", "os.getenv"):
            return environment if name == "environ" else environment.get
        if full.endswith(f").{name}"):  # of what a call returned
            return self._notes.note(full, getattr(self._real, name))
        value = vars(self._real).get(name)  # Torch imports others when it is asked for them
        if full in _NOTED:
            return self._notes.note(full, value)
        if full in _PARTS:
            value = _NotedModule(self._notes, full, value)
        elif full in _CALLED:
            value = functools.partial(self._called, full, value)
        elif full not in _FIXED and type(value).__name__ != "dtype":
            raise NotTold(f"`{full}` is read")
        return value

    def _called(self, full: str, function: Any, *args: Any, **options: Any) -> Any:
        given = [*map(repr, args), *(f"{name}={value!r}" for name, value in options.items())]
        expression = f"{full}({', '.join(given)})"
        if not all(map(_is_plain, (*args, *options.values()))):
            raise NotTold(f"`{expression}` is called")
        try:
            value = function(*args, **options)
        except Exception as e:
            self._notes.note(expression, f"raises {type(e).__name__}")
            raise
        if _is_plain(value):
            return self._notes.note(expression, value)
        return _NotedModule(self._notes, expression, value)


class _Environment(MutableMapping[str, str]):
    """`os.environ` for texts: only they see what they set."""

    def __init__(self, notes: _Notes) -> None:
        self._notes = notes
        self._set: dict[str, str | None] = {}

    def __getitem__(self, name: str) -> str:
        value = self._set[name] if name in self._set else os.environ.get(name)
        if name not in self._set:
            self._notes.note(f"os.environ[{name!r}]", value)
        if value is None:
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: str) -> None:
        self._set[name] = value

    def __delitem__(self, name: str) -> None:
        del self._set[name]

    def __iter__(self) -> Iterator[str]:
        raise NotTold("the whole environment is read")

    def __len__(self) -> int:
        raise NotTold("the whole environment is read")


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else isinstance(value, _PLAIN)


class _AskingEverywhere(AskingKnown, ast.NodeTransformer):
    """Does so in functions, too, and for builtins that take an unknown value as any other."""

    def visit(self, node: ast.AST) -> Any:
        return ast.NodeTransformer.visit(self, node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in _TAKING_ANY:
            node.args = [a if isinstance(a, ast.Starred) else known_only(a) for a in node.args]
        return node

    def visit_Match(self, node: ast.Match) -> ast.stmt:
        self.generic_visit(node)
        node.subject = known_only(node.subject)
        return node

    def visit_Try(self, node: ast.Try) -> ast.stmt:
        self.generic_visit(node)
        leaving = (ast.Return, ast.Break, ast.Continue)
        if any(isinstance(n, leaving) for part in node.finalbody for n in ast.walk(part)):
            raise NotTold("`finally` ends with another statement")
        return node
