"""Read the text of a `@triton.jit` function for all that a launch needs, without Triton.

The statements of the file are run, in their order, with stand-ins for Triton and without any other
module (`PythonText`). A statement that fails leaves the names that it gives unknown.
"""

from __future__ import annotations
import __future__

import abc
import ast
import builtins
import contextlib
import copy
import dis
import functools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from jitkern.errors import CompileError
from jitkern.files import trust
from jitkern.source.triton_decorators import (
    BARE,
    KNOWN,
    Standin,
    TritonFunction,
    Unknown,
    UnsupportedDecorator,
    bare,
    inner,
    is_bare,
    is_standin,
    read,
)

PURE = frozenset((  # modules whose results follow from arguments alone
    "__future__", "cmath", "collections", "copy", "dataclasses", "enum", "fractions", "functools",
    "itertools", "math", "operator", "types", "typing", "typing_extensions",
))  # fmt: skip
READING = frozenset(("breakpoint", "input", "open"))  # builtins that read other data
ANY_NAME = frozenset(  # by these, a statement may give any name another value
    ("__dict__", "eval", "exec", "globals", "locals", "vars")
)
_MODULES = frozenset(("__import__", "import_module", "modules"))  # these give any module,
_STORING = frozenset(("__setattr__", "delattr", "setattr"))  # and these give it values
_KNOWN = "__known__"  # the name of `_known` in texts
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class UntoldByText(CompileError):
    """A function's decorators follow from more than the text of its file."""


class Functions(Mapping[str, TritonFunction]):
    """The jit functions of a file; each is read when first asked for. Raises CompileError.

    `name.fn` is a function without the decorators above `@triton.jit`.
    """

    def __init__(self, path: str, tree: ast.Module) -> None:
        self._path = path
        self._tree = tree
        self.others: dict[str, Any] = {}  # what is known of functions that the text does not tell
        nodes = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        self._listed = list(dict.fromkeys(node.name for node in nodes if is_kernel(node)))
        self._read: dict[str, TritonFunction] = {}

    @functools.cached_property
    def _text(self) -> LaunchText:
        text = LaunchText(self._path)
        text.run(self._tree)
        return text

    def __getitem__(self, name: str) -> TritonFunction:
        if name not in self._read:
            self._read[name] = self._text.function(name)
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        try:
            return bool(self[str(name)])
        except KeyError:
            return False
        except UntoldByText:
            return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)


def functions(path: Path) -> Functions:
    """The jit functions of a file, read once for each state of it. Raises CompileError."""
    return _functions(str(path), trust.state(path.stat()))


@functools.cache
def _functions(path: str, _state: tuple[int, ...]) -> Functions:
    try:
        tree = ast.parse(Path(path).read_bytes(), path)
    except SyntaxError as e:
        raise CompileError(f"{path}({e.lineno}): error: {e.msg}") from e
    return Functions(path, tree)


def of_object(path: str, name: str, function: Any, why: str) -> TritonFunction:
    """Read a function from the object that an import of its file gave its name.

    why: the text does not tell. Raises CompileError, too, for a file edited since its import.
    """
    try:
        found = read(function)
    except (TypeError, UnsupportedDecorator) as e:
        raise CompileError(f"`{name}` of {path}: {e}") from e
    own = _parameters_in(bare(function).src, found.function.__name__)
    with contextlib.suppress(OSError):
        now = _parameters_in(Path(path).read_text(), found.function.__name__)
        if now and now != own:
            raise CompileError(f"{path}: error: `{name}` was edited since its import: reload it")
    return found._replace(unread=why)


def _parameters_in(text: str, name: str) -> str:
    """The parameters of the last function of this name in a text, or ""."""
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    return next((ast.unparse(n.args) for n in reversed(nodes) if n.name == name), "")


class PythonText(abc.ABC):
    """The names that the statements of a file give values, as far as they run.

    triton: Triton's own names. They are given where an import fails: packages import them from
    elsewhere. flags: of compiling a statement.
    """

    flags = __future__.annotations.compiler_flag  # annotations are texts
    any_name = ANY_NAME

    def __init__(self, path: str, names: dict[str, Any], triton: dict[str, Any]) -> None:
        self.path = path
        self.names = names
        self._given = {**KNOWN, **triton}
        self._not_imported: set[str] = set()
        self._began = True  # whether the last statement did more than read names
        self.lost: BaseException | None = None  # why any name may have another value than it has
        names["__builtins__"] = {**vars(builtins), "__import__": self._import}

    def run(self, tree: ast.Module) -> None:
        """Run the statements of the file; no bare `except` is to catch what refuses a value."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                node.type = ast.copy_location(ast.Name("Exception", ast.Load()), node)
        for node in tree.body:
            try:
                if isinstance(node, ast.FunctionDef) and node.decorator_list:
                    self.names[node.name] = self._decorated(node)
                else:
                    self._exec(node)
            except KeyboardInterrupt:
                raise
            except BaseException as e:  # noqa: BLE001
                self._fail(node, e)

    @abc.abstractmethod
    def _import(
        self, name: str, names: Any = None, local: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        """Import for the statements."""

    def _fail(self, node: ast.stmt, error: BaseException) -> None:
        """Make the names unknown that a statement gives, as it failed."""
        given = given_by(node)
        self.names.update(dict.fromkeys(given, Unknown(self._explained(error, node.lineno))))
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._not_imported |= given
            self.names.update((name, self._given[name]) for name in given & self._given.keys())

    def _begin(self, node: ast.stmt) -> None:
        """Note that a statement runs, unless it is a class of what is unknown, which it raises."""
        self._began = False
        if isinstance(node, ast.ClassDef):
            for part in (*node.decorator_list, *node.bases):
                if all(isinstance(n, (ast.Attribute, ast.Name, ast.Load)) for n in ast.walk(part)):
                    code = compile(ast.Expression(part), self.path, "eval")
                    known(eval(code, self.names))  # noqa: S307  the kernel author's own code
        self._began = True

    def _forget(self, node: ast.stmt, error: BaseException) -> None:
        """Make unknown what a statement may have changed before it failed, also by functions."""
        if not self._began:
            return
        ran = [node]
        if isinstance(node, ast.FunctionDef):
            defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            ran = [
                ast.copy_location(ast.Expr(part), part)
                for part in (*node.decorator_list, *defaults)
            ]
        codes = [compile(ast.Module(ran, []), self.path, "exec")]
        changed: set[str] = set()
        stores = modules = False
        for code in codes:  # it grows
            words = {*code.co_names}
            codes += [part for part in code.co_consts if isinstance(part, CodeType)]
            values = [self.names[name] for name in words & self.names.keys()]
            functions = [value for value in values if isinstance(value, FunctionType)]
            codes += [f.__code__ for f in functions if f.__code__ not in codes]
            steps = [*dis.get_instructions(code)]
            changed |= {s.argval for s in steps if s.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}
            changed |= {n for n in words & self.names.keys() if self._may_change(self.names[n])}
            stores |= not words.isdisjoint(_STORING)
            stores |= any(step.opname in ("STORE_ATTR", "DELETE_ATTR") for step in steps)
            modules |= not words.isdisjoint(_MODULES)
            if words & self.any_name or any(map(self._reaches_out, values)):
                self.lost = self.lost or error
        if stores and modules:
            self.lost = self.lost or error
        self.names.update(dict.fromkeys(changed, Unknown(error)))

    def _reaches_out(self, value: Any) -> bool:
        """Whether a statement that is given a value may change any name by it."""
        return value is self.names or (isinstance(value, ModuleType) and vars(value) is self.names)

    def _may_change(self, value: Any) -> bool:
        """Whether a statement that is given a value may change it."""
        if isinstance(value, (FunctionType, ModuleType, Unknown)):
            return False
        if type(value).__module__.partition(".")[0] == "triton" or is_standin(value):
            return False
        return isinstance(value, (dict, list, set)) or hasattr(value, "__dict__")

    @abc.abstractmethod
    def _explained(self, error: BaseException, line: int) -> BaseException:
        """Return the error of a line of the file, to raise where its values are used."""

    def _decorated(self, node: ast.FunctionDef) -> Any:
        """The value of a decorated function.

        A decorator that the file imports from elsewhere is Triton's if it has a name of Triton's,
        and else does nothing: the process that compiles sees whether that is so.
        """
        value = self._undecorated(node)
        for decorator in reversed(node.decorator_list):
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            expression = decorator
            root = next((n.id for n in ast.walk(called) if isinstance(n, ast.Name)), "")
            if root in self._not_imported and isinstance(self.names[root], Unknown):
                if (name := ast.unparse(called).rpartition(".")[2]) not in KNOWN:
                    continue
                expression = ast.Name(name, ast.Load())
                if isinstance(decorator, ast.Call):
                    expression = ast.Call(expression, decorator.args, decorator.keywords)
                expression = ast.copy_location(expression, decorator)
            try:
                value = self._applied(ast.fix_missing_locations(expression), value)
            except Exception as e:
                raise self._explained(e, decorator.lineno) from e
            if is_bare(value):
                self.names[node.name + BARE] = value  # also where the decorators above fail
        return value

    def _undecorated(self, node: ast.FunctionDef) -> Any:
        """The function below its decorators."""
        plain = copy.copy(node)
        plain.decorator_list = []
        self._exec(plain)
        return self.names[node.name]

    def _applied(self, decorator: ast.expr, value: Any) -> Any:
        """Apply a decorator to a value; returns the result."""
        return eval(self._compiled(ast.Expression(decorator)), self.names)(value)  # noqa: S307  the author's own

    def _exec(self, node: ast.stmt) -> None:
        self._begin(node)
        exec(self._compiled(ast.Module([node], [])), self.names)  # noqa: S102  the kernel author's own code

    def _compiled(self, tree: ast.Module | ast.Expression) -> CodeType:
        """Return the code of a part of the text."""
        mode = "exec" if isinstance(tree, ast.Module) else "eval"
        code: CodeType = compile(tree, self.path, mode, self.flags, True)
        return code


class AskingKnown(ast.NodeTransformer):
    """Make `is` on an unknown value fail, like all its other uses.

    Functions are left as they are.
    """

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            node.left, *node.comparators = map(known_only, (node.left, *node.comparators))
        return node

    def visit(self, node: ast.AST) -> Any:
        is_later = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        return node if is_later else super().visit(node)


def known_only(value: ast.expr) -> ast.expr:
    """Return an expression that fails where the value is unknown."""
    call = ast.Call(ast.Name(_KNOWN, ast.Load()), [value], [])
    return ast.fix_missing_locations(ast.copy_location(call, value))


def known(value: Any) -> Any:
    """Return the value; raises why it is unknown if it is."""
    if isinstance(value, Unknown):
        raise value.why
    return value


def _is_instance(value: Any, kinds: Any) -> bool:
    return isinstance(known(value), kinds)


# Builtins of texts whose unknown values raise what no `except` of a text is to catch.
ASKING_KNOWN = {_KNOWN: known, "isinstance": _is_instance, "BaseException": Exception}


class NotImported(Exception):
    """A text that is read imports a module; no `except ImportError` of the text is to catch it."""


class LaunchText(PythonText):
    """A file as a launch reads it: with stand-ins for Triton, and modules that only compute.

    known_to_triton, not_imported: the errors where a statement needs more.
    """

    known_to_triton: type[BaseException] = TypeError
    not_imported: type[BaseException] = NotImported

    def __init__(self, path: str) -> None:
        names = {"math": math, "__name__": Path(path).stem}
        triton = {"triton": self._standin("triton"), "tl": self._standin("triton.language")}
        super().__init__(path, names, triton)
        self.names.update(self._given)
        builtin = self.names["__builtins__"]
        builtin["print"] = lambda *_, **__: None  # an import prints
        for name in READING:
            del builtin[name]

    def _import(
        self, name: str, names: Any = None, local: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        top = name.partition(".")[0]
        if top == "triton" and not level:
            return self._standin(name if fromlist else top)
        if top in PURE and not level:
            return __import__(name, names, local, fromlist)
        if (found := self._beyond(name, fromlist or (), level)) is not None:
            return found
        line = sys._getframe(1).f_lineno
        told = f"line {line} imports a module, {'.' * level}{name}, which a launch does not"
        raise self.not_imported(told)

    def _standin(self, name: str) -> Standin:
        return Standin(name, self.known_to_triton)

    def _beyond(self, name: str, members: Sequence[str], level: int) -> Any:
        """Return what an import of another module gives, if that is known; else None."""

    def run(self, tree: ast.Module) -> None:
        """Run the statements, with kernels, which are never called, as their declarations."""
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and is_kernel(node):
                node.body = [ast.copy_location(ast.Pass(), node)]
                node.args.defaults = [*map(_literal, node.args.defaults)]
                node.args.kw_defaults = [d and _literal(d) for d in node.args.kw_defaults]
        super().run(tree)

    def function(self, name: str) -> TritonFunction:
        """Return a jit function of the file. Raises KeyError and CompileError."""
        stem = name.removesuffix(BARE)
        value = self.names.get(name, self.names[stem])
        value = value if name == stem else bare(value) or value
        if isinstance(value, Standin):
            raise KeyError(name)  # of Triton, imported under this name
        if isinstance(value, Unknown):
            raise value.why
        try:
            return read(value)
        except UnsupportedDecorator as e:
            line = inner(value).__code__.co_firstlineno
            raise CompileError(f"{self.path}({line}): error: {e}") from e
        except TypeError:
            raise KeyError(name) from None

    def _explained(self, error: BaseException, line: int) -> BaseException:
        if isinstance(error, CompileError):
            return error
        if isinstance(error, UnsupportedDecorator):
            return CompileError(f"{self.path}({line}): error: {error}")
        return UntoldByText(
            f"{self.path}({line}): error: a launch must evaluate this without importing Triton, "
            f"and cannot: {type(error).__name__}: {error}"
        )


def is_kernel(node: ast.FunctionDef) -> bool:
    """Whether a function is below a decorator that is spelt as Triton's `jit`."""
    called = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return any(ast.unparse(function).split(".")[-1] == "jit" for function in called)


def given_by(node: ast.stmt) -> set[str]:
    """The names whose values a statement gives."""
    if isinstance(node, _DEFINITIONS):
        return {node.name}
    found = set()
    for part in ast.walk(node):
        if isinstance(part, _DEFINITIONS):
            found.add(part.name)
        elif isinstance(part, ast.alias):
            found.add(part.asname or part.name.partition(".")[0])
        elif isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load):
            found.add(part.id)
    return found


def _literal(default: ast.expr) -> ast.expr:
    """The default, in place of any that is not a literal an ellipsis."""
    try:
        ast.literal_eval(default)
    except (TypeError, ValueError):
        return ast.copy_location(ast.Constant(...), default)
    return default
