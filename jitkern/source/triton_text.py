"""Read the text of a `@triton.jit` function for all that a launch needs, without Triton."""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
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
    UnsupportedDecorator,
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
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


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
        self._module = _Module(path, tree)
        self._read: dict[str, TritonFunction] = {}

    def __getitem__(self, name: str) -> TritonFunction:
        if name not in self._read:
            self._read[name] = self._module.function(name)
        return self._read[name]

    def decorators(self, name: str) -> Decorators:
        """Return the decorators of a function, as data. Raises KeyError and CompileError."""
        return self._module.decorators(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._module.listed)

    def __len__(self) -> int:
        return len(self._module.listed)


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


class _Names(dict[str, Any]):
    """The names that statements of a file gave a value; for a name that they failed to, why.

    Triton's own names are given to begin with: packages import them from elsewhere, too.
    """

    def __init__(self, path: str) -> None:
        given = {**KNOWN, "triton": Standin("triton"), "tl": Standin("triton.language")}
        builtin = {**vars(builtins), "__import__": _imported}
        super().__init__(given, math=math, __name__=Path(path).stem, __builtins__=builtin)
        self._path = path
        self._known = given.keys()
        self._failures: dict[str, Exception] = {}
        self._not_imported: set[str] = set()

    def run(self, statement: _Statement) -> None:
        """Run a statement; a failure counts where the names that it gives are read."""
        node = statement.node
        try:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                self[node.name] = self._decorated(node)
            else:
                self._exec(node)
        except Exception as e:  # noqa: BLE001
            imports = isinstance(node, (ast.Import, ast.ImportFrom))
            for name in statement.gives - (self._known if imports else set()):
                self.pop(name, None)
                self._failures[name] = e
            self._not_imported |= statement.gives if imports else set()

    def _decorated(self, node: ast.FunctionDef) -> Any:
        """The value of a decorated function.

        A decorator that the file imports from elsewhere is Triton's if it has a name of Triton's,
        and else does nothing: the process that compiles sees whether that is so.
        """
        plain = copy.copy(node)
        plain.decorator_list = []
        if _is_kernel(node):  # it is never called
            plain.body, plain.args = [ast.Pass()], copy.deepcopy(node.args)
            none = ast.Constant(None)
            plain.args.defaults = [none for _ in node.args.defaults]
            plain.args.kw_defaults = [default and none for default in node.args.kw_defaults]
        self._exec(ast.fix_missing_locations(plain))
        value = self[node.name]
        for decorator in reversed(node.decorator_list):
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            expression = decorator
            if root_of(called) in self._not_imported - self.keys():
                if (name := ast.unparse(called).rpartition(".")[2]) not in KNOWN:
                    continue
                expression = ast.Name(name, ast.Load())
                if isinstance(decorator, ast.Call):
                    expression = ast.Call(expression, decorator.args, decorator.keywords)
                expression = ast.copy_location(expression, decorator)
            with _explained(self._path, decorator.lineno):
                body = ast.fix_missing_locations(ast.Expression(expression))
                value = eval(compile(body, self._path, "eval"), self)(value)  # noqa: S307  the kernel author's own code
        return value

    def _exec(self, node: ast.stmt) -> None:
        exec(compile(ast.Module([node], []), self._path, "exec"), self)  # noqa: S102  the kernel author's own code

    def __missing__(self, name: str) -> Any:
        raise self._failures.get(name) or KeyError(name)


def _imported(
    name: str, names: Any = None, local: Any = None, fromlist: Any = (), level: int = 0
) -> Any:
    """Import for a text that is read: modules whose results follow from arguments alone."""
    top = name.partition(".")[0]
    if top == "triton" and not level:
        return Standin(name if fromlist else top)
    if top in PURE and not level:
        return __import__(name, names, local, fromlist)
    line = sys._getframe(1).f_lineno
    raise NotImported(f"line {line} imports a module, {'.' * level}{name}, which a launch does not")


class NotImported(Exception):
    """A text that is read imports a module; no `except ImportError` of the text is to catch it."""


@contextlib.contextmanager
def _explained(path: str, line: int) -> Iterator[None]:
    """Give an error of a text that is run its place. Raises CompileError."""
    try:
        yield
    except CompileError:
        raise
    except UnsupportedDecorator as e:
        raise CompileError(f"{path}({line}): error: {e}") from e
    except Exception as e:
        raise CompileError(
            f"{path}({line}): error: a launch must evaluate this without importing Triton, and "
            f"cannot: {type(e).__name__}: {e}"
        ) from e


class _Statement(NamedTuple):
    """A statement of a file: the names whose values it gives, changes or may change, and reads."""

    node: ast.stmt
    gives: set[str]
    touches: set[str]
    reads: set[str]


class _Module:
    """A file, of whose statements those are run, without Triton, that its decorators depend on."""

    def __init__(self, path: str, tree: ast.Module) -> None:
        self.path = path
        self._tree = tree
        nodes = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        self.listed = list(dict.fromkeys(node.name for node in nodes if _is_kernel(node)))

    @functools.cached_property
    def _statements(self) -> list[_Statement]:
        """The statements of the file."""
        changes = by_function(self._tree, _changed_by)
        found = []
        for node in self._tree.body:
            read = names_in(node)
            gives = _given_by(node)
            if not isinstance(node, DEFINITIONS):
                gives = gives.union(*(changes[name] for name in read if name in changes))
            elif isinstance(node, ast.FunctionDef):
                called = set().union(*map(names_in, node.decorator_list))
                gives = gives.union(*(changes[name] for name in called if name in changes))
            found.append(_Statement(node, gives, _passed_in(node), read))
        return found

    def decorators(self, name: str) -> Decorators:
        """Return the decorators of a function, as data. Raises KeyError and CompileError."""
        givers = [s.node.lineno for s in self._statements if name in s.gives]
        if not givers:
            raise KeyError(name)
        names = _Names(self.path)
        for statement in self._leading_to(name):
            names.run(statement)
        with _explained(self.path, givers[-1]):
            value = names[name]
        try:
            return read(value)
        except UnsupportedDecorator as e:
            raise CompileError(f"{self.path}({givers[-1]}): error: {e}") from e
        except TypeError:
            raise KeyError(name) from None

    def function(self, name: str) -> TritonFunction:
        """A function, as its text declares it. Raises KeyError and CompileError."""
        found = self.decorators(name)
        code = unwrapped(found.function).__code__
        for node in ast.walk(self._tree):
            if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
                lines = {node.lineno, *(decorator.lineno for decorator in node.decorator_list)}
                if code.co_firstlineno in lines:
                    return _function(node, found, self.path)
        raise CompileError(f"{self.path}: error: `{name}` is no function of this file")

    def _leading_to(self, name: str) -> list[_Statement]:
        """The statements, in order, that the value of a name follows from."""
        wanted = {name}
        needed: set[ast.stmt] = set()
        while more := [
            s for s in self._statements if s.node not in needed and (s.gives | s.touches) & wanted
        ]:
            needed |= {s.node for s in more}
            wanted = wanted.union(*(s.reads for s in more))
        return [s for s in self._statements if s.node in needed]


def _is_kernel(node: ast.FunctionDef) -> bool:
    """Whether a function is below a decorator that is spelt as Triton's `jit`."""
    called = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return any(ast.unparse(function).split(".")[-1] == "jit" for function in called)


def names_in(node: ast.AST) -> set[str]:
    """The names that a statement reads; of a kernel, those that its decorators read."""
    parts = [node]
    if isinstance(node, ast.FunctionDef) and _is_kernel(node):
        parts = [*node.decorator_list]
    return {p.id for part in parts for p in ast.walk(part) if isinstance(p, ast.Name)}


def by_function(
    tree: ast.Module, direct: Callable[[ast.FunctionDef], set[str]]
) -> dict[str, set[str]]:
    """Return for each function of a file what `direct` gives for it and the functions it calls."""
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    changes = {name: direct(node) for name, node in defined.items()}
    calls = {name: names_in(node) & defined.keys() for name, node in defined.items()}
    while True:
        more = {n: changes[n].union(*(changes[called] for called in calls[n])) for n in defined}
        if more == changes:
            return changes
        changes = more


def _changed_by(node: ast.FunctionDef) -> set[str]:
    """The global names that a function's own statements change."""
    parts = [*ast.walk(node)]
    stated = {name for part in parts if isinstance(part, ast.Global) for name in part.names}
    local = {part.arg for part in parts if isinstance(part, ast.arg)} | {
        part.id
        for part in parts
        if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load)
    }
    changed = set().union(*map(_given_by, node.body)) | {
        r for s in node.body for r in _passed_in(s)
    }
    return stated | (changed - local)


def _passed_in(node: ast.stmt) -> set[str]:
    """The names whose values a statement passes to a call of which it takes no result."""
    if isinstance(node, DEFINITIONS):
        return set()
    calls = [p.value for p in ast.walk(node) if isinstance(p, ast.Expr)]
    passed = [a for c in calls if isinstance(c, ast.Call) for a in (*c.args, *c.keywords)]
    return {root_of(a.value if isinstance(a, ast.keyword) else a) for a in passed} - {""}


def _given_by(node: ast.stmt) -> set[str]:
    """The names whose values a statement gives or changes: `a = 1`, `a[0] = 1`, `a.append(1)`."""
    if isinstance(node, DEFINITIONS):
        return {node.name}
    found = set()
    for part in ast.walk(node):
        if isinstance(part, DEFINITIONS):
            found.add(part.name)
        elif isinstance(part, ast.alias):
            found.add(part.asname or part.name.partition(".")[0])
        elif isinstance(getattr(part, "ctx", None), (ast.Store, ast.Del)):
            found.add(root_of(part))
        elif isinstance(part, ast.Expr) and isinstance(call := part.value, ast.Call):
            found.update({root_of(call.func)} if isinstance(call.func, ast.Attribute) else ())
    return found - {""}


def root_of(place: ast.AST) -> str:
    """The name that `a`, `a.b` and `a[0].b` begin with; "" where a place begins with none."""
    while isinstance(place, (ast.Attribute, ast.Subscript)):
        place = place.value
    return place.id if isinstance(place, ast.Name) else ""


def _literal(expression: ast.expr) -> list[Constant | None]:
    """The number or None that an expression spells, in a list; [] for any other expression."""
    with contextlib.suppress(ValueError):
        value = ast.literal_eval(expression)
        if value is None or isinstance(value, (bool, int, float)):
            return [value]
    return []
