"""Read the text of a `@triton.jit` function for all that a launch needs, without Triton.

The statements of the file are run, in their order, with stand-ins for Triton and without any other
module (`PythonText`). A statement that fails leaves the names that it gives unknown.
"""

from __future__ import annotations

import abc
import ast
import builtins
import contextlib
import copy
import functools
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jitkern.errors import CompileError
from jitkern.files import trust
from jitkern.named_tuple import NamedTuple
from jitkern.source.dtypes import DTYPES, Constant
from jitkern.source.triton_decorators import (
    KNOWN,
    Decorators,
    Heuristic,
    Standin,
    TritonConfig,
    Unknown,
    UnsupportedDecorator,
    inner,
    read,
    unwrapped,
)

_TYPES = {  # the names of types in annotations, without `tl.`
    "int": "i32", "float": "f32", "double": "f64", "half": "f16", "u1": "bool", "uint1": "bool",
    **{name: code for code, d in DTYPES.items() for name in (d.torch, d.triton, d.language)},
}  # fmt: skip
_NARROW = {  # floats that a launch passes only in a tensor
    name for code, dtype in DTYPES.items() if not dtype.ctype for name in (code, dtype.triton)
}
PURE = frozenset((  # modules whose results follow from arguments alone
    "__future__", "cmath", "collections", "copy", "dataclasses", "enum", "fractions", "functools",
    "itertools", "math", "operator", "types", "typing", "typing_extensions",
))  # fmt: skip
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class TritonFunction(NamedTuple):
    """A `@triton.jit` function as its text declares it: all that a launch needs without Triton.

    configs, key: of `@triton.autotune`: the configurations, and the arguments for each value of
    which one configuration is chosen. zeroed, restored: its `reset_to_zero` and `restore_value`:
    the arguments that each measured run finds as zeros, or as they were. heuristics: of
    `@triton.heuristics`: constexprs computed from the rest; the first `before` of them before a
    configuration is chosen.
    """

    parameters: tuple[str, ...]
    constexprs: frozenset[str]
    defaults: tuple[tuple[str, Constant], ...]  # of constexprs, where they are literals
    passed: tuple[tuple[str, Constant | None], ...]  # of the other parameters, likewise
    plain: frozenset[str]  # do_not_specialize: neither ==1 nor %16
    unaligned: frozenset[str]  # do_not_specialize_on_alignment: ==1 but not %16
    annotated: tuple[tuple[str, str], ...] = ()  # `n: tl.int64`: the type, whatever the argument
    configs: tuple[TritonConfig, ...] = ()
    key: tuple[str, ...] = ()
    zeroed: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    heuristics: tuple[Heuristic, ...] = ()
    before: int = 0

    def of_config(self, config: TritonConfig) -> dict[str, Constant]:
        """The constexprs of a configuration; an option is one, too, if a parameter has its name."""
        options = {name: value for name, value in config.options if name in self.parameters}
        return {**options, **dict(config.constexprs)}


class Functions(Mapping[str, TritonFunction]):
    """The jit functions of a file; each is read when first asked for. Raises CompileError."""

    def __init__(self, path: str, tree: ast.Module) -> None:
        self._path = path
        self._tree = tree
        nodes = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        self._listed = list(dict.fromkeys(node.name for node in nodes if is_kernel(node)))
        self._read: dict[str, TritonFunction] = {}

    @functools.cached_property
    def _names(self) -> dict[str, Any]:
        text = _LaunchText(self._path)
        text.run(self._tree)
        return text.names

    def __getitem__(self, name: str) -> TritonFunction:
        if name not in self._read:
            self._read[name] = self._function(name)
        return self._read[name]

    def decorators(self, name: str) -> Decorators:
        """Return the decorators of a function, as data. Raises KeyError and CompileError."""
        value = self._names[name]
        if isinstance(value, Unknown):
            raise value.why
        try:
            return read(value)
        except UnsupportedDecorator as e:
            line = inner(value).__code__.co_firstlineno
            raise CompileError(f"{self._path}({line}): error: {e}") from e
        except TypeError:
            raise KeyError(name) from None

    def _function(self, name: str) -> TritonFunction:
        found = self.decorators(name)
        code = unwrapped(found.function).__code__
        for node in ast.walk(self._tree):
            if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
                lines = {node.lineno, *(decorator.lineno for decorator in node.decorator_list)}
                if code.co_firstlineno in lines:
                    return _function(node, found, self._path)
        raise CompileError(f"{self._path}: error: `{name}` is no function of this file")

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


def _function(node: ast.FunctionDef, found: Decorators, path: str) -> TritonFunction:
    positional = [*node.args.posonlyargs, *node.args.args]
    parameters = [*positional, *node.args.kwonlyargs]
    names = [parameter.arg for parameter in parameters]
    constexprs = frozenset(
        p.arg for p in parameters if p.annotation and "constexpr" in ast.unparse(p.annotation)
    )
    annotated = tuple((p.arg, kind) for p in parameters if (kind := _annotated(p.annotation)))
    for name, kind in annotated:
        if fault := scalar_fault(name, kind):
            raise CompileError(f"{path}({node.lineno}): error: {fault}")
    values = [None] * (len(positional) - len(node.args.defaults)) + node.args.defaults
    literals = {
        name: value
        for name, expression in zip(names, [*values, *node.args.kw_defaults])
        if expression
        for value in _literal(expression)
    }
    return TritonFunction(
        tuple(names),
        constexprs,
        tuple((n, v) for n, v in literals.items() if n in constexprs and v is not None),
        tuple((n, v) for n, v in literals.items() if n not in constexprs),
        found.plain,
        found.unaligned,
        annotated,
        found.configs,
        found.key,
        found.zeroed,
        found.restored,
        found.heuristics,
        found.before,
    )


def scalar_fault(parameter: str, kind: str) -> str:
    """Why a scalar annotated as `kind` (our name or Triton's) cannot be passed; else ""."""
    if kind not in _NARROW:
        return ""
    return (
        f"`{parameter}` is annotated as {kind}, and scalars that are floats of 16 bits or fewer "
        "cannot be passed: annotate it as tl.float32, and convert it in the function"
    )


def _annotated(annotation: ast.expr | None) -> str:
    """The type that an annotation names as Triton reads it: `i64`, `*f32`; else ""."""
    if isinstance(annotation, ast.Call) and ast.unparse(annotation.func).endswith("pointer_type"):
        kind = _annotated(annotation.args[0]) if annotation.args else ""
        return kind and f"*{kind}"
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        text = annotation.value.strip()
    else:
        text = ast.unparse(annotation) if annotation else ""
    text = text.removeprefix("const ").strip()
    pointer = text.startswith("*") or text.endswith("*")
    kind = _TYPES.get(text.strip("* ").rpartition(".")[2].removesuffix("_t"), "")
    return kind and f"{'*' if pointer else ''}{kind}"


class PythonText(abc.ABC):
    """The names that the statements of a file give values, as far as they run.

    triton: Triton's own names. They are given to begin with: packages import them from elsewhere.
    """

    def __init__(self, path: str, names: dict[str, Any], triton: dict[str, Any]) -> None:
        self.path = path
        self.names = names
        self._given = {**KNOWN, **triton}
        self._not_imported: set[str] = set()
        builtin = {**vars(builtins), "__import__": self._import}
        names.update(self._given, __builtins__=builtin)

    def run(self, tree: ast.Module) -> None:
        """Run the statements of the file."""
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
        given = _given_by(node)
        self.names.update(dict.fromkeys(given, Unknown(self._explained(error, node.lineno))))
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._not_imported |= given
            self.names.update((name, self._given[name]) for name in given & self._given.keys())

    @abc.abstractmethod
    def _explained(self, error: BaseException, line: int) -> BaseException:
        """Return an error of a line of the file as it is raised where its values are used."""

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
                body = ast.fix_missing_locations(ast.Expression(expression))
                value = eval(compile(body, self.path, "eval"), self.names)(value)  # noqa: S307  the kernel author's own code
            except Exception as e:
                raise self._explained(e, decorator.lineno) from e
        return value

    def _undecorated(self, node: ast.FunctionDef) -> Any:
        """The function below its decorators."""
        plain = copy.copy(node)
        plain.decorator_list = []
        self._exec(plain)
        return self.names[node.name]

    def _exec(self, node: ast.stmt) -> None:
        exec(compile(ast.Module([node], []), self.path, "exec"), self.names)  # noqa: S102  the kernel author's own code


class _LaunchText(PythonText):
    """A file as a launch reads it: with stand-ins for Triton, and modules that only compute."""

    def __init__(self, path: str) -> None:
        names = {"math": math, "__name__": Path(path).stem}
        triton = {"triton": Standin("triton"), "tl": Standin("triton.language")}
        super().__init__(path, names, triton)
        self.names["__builtins__"]["print"] = lambda *_, **__: None  # an import prints

    def _import(
        self, name: str, names: Any = None, local: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        top = name.partition(".")[0]
        if top == "triton" and not level:
            return Standin(name if fromlist else top)
        if top in PURE and not level:
            return __import__(name, names, local, fromlist)
        line = sys._getframe(1).f_lineno
        told = f"line {line} imports a module, {'.' * level}{name}, which a launch does not"
        raise NotImported(told)

    def _undecorated(self, node: ast.FunctionDef) -> Any:
        """The function below its decorators; a kernel, which is never called, with its names."""
        if is_kernel(node):
            node = copy.copy(node)
            node.body, node.args = [ast.Pass()], copy.deepcopy(node.args)
            none = ast.Constant(None)
            node.args.defaults = [none for _ in node.args.defaults]
            node.args.kw_defaults = [default and none for default in node.args.kw_defaults]
            ast.fix_missing_locations(node)
        return super()._undecorated(node)

    def _explained(self, error: BaseException, line: int) -> BaseException:
        if isinstance(error, CompileError):
            return error
        told = str(error)
        if not isinstance(error, UnsupportedDecorator):
            told = (
                "a launch must evaluate this without importing Triton, and cannot: "
                f"{type(error).__name__}: {error}"
            )
        return CompileError(f"{self.path}({line}): error: {told}")


class NotImported(Exception):
    """A text that is read imports a module; no `except ImportError` of the text is to catch it."""


def is_kernel(node: ast.FunctionDef) -> bool:
    """Whether a function is below a decorator that is spelt as Triton's `jit`."""
    called = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return any(ast.unparse(function).split(".")[-1] == "jit" for function in called)


def _given_by(node: ast.stmt) -> set[str]:
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


def _literal(expression: ast.expr) -> list[Constant | None]:
    """The number or None that an expression spells, in a list; [] for any other expression."""
    with contextlib.suppress(ValueError):
        value = ast.literal_eval(expression)
        if value is None or isinstance(value, (bool, int, float)):
            return [value]
    return []
