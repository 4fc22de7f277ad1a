"""Read the text of a `@triton.jit` function for all that a launch needs, without Triton."""

from __future__ import annotations

import ast
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jitkern.errors import CompileError
from jitkern.files import owned
from jitkern.named_tuple import NamedTuple
from jitkern.source.dtypes import DTYPES
from jitkern.source.kinds import Constant

_TYPES = {  # the names of types in annotations, without `tl.`
    "int": "i32", "float": "f32", "double": "f64", "half": "f16", "u1": "bool", "uint1": "bool",
    **{name: code for code, d in DTYPES.items() for name in (d.torch, d.triton, d.language)},
}  # fmt: skip
_NARROW = {  # floats that a launch passes only in a tensor
    name for code, dtype in DTYPES.items() if not dtype.ctype for name in (code, dtype.triton)
}
_LISTS = ("key", "reset_to_zero", "restore_value")  # of @triton.autotune
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Config(NamedTuple):
    """A `triton.Config`: constexprs, and compile options such as num_warps."""

    constexprs: tuple[tuple[str, Constant], ...]
    options: tuple[tuple[str, int], ...]


class Function(NamedTuple):
    """A `@triton.jit` function as its text declares it: all that a launch needs without Triton.

    configs, key: of `@triton.autotune`: the configurations, and the arguments for each value of
    which one configuration is chosen. zeroed, restored: its `reset_to_zero` and `restore_value`:
    the arguments that each measured run finds as zeros, or as they were. heuristics: of
    `@triton.heuristics`: constexprs computed from the rest.
    """

    parameters: tuple[str, ...]
    constexprs: frozenset[str]
    defaults: tuple[tuple[str, Constant], ...]  # of constexprs, where they are literals
    passed: tuple[tuple[str, Constant | None], ...]  # of the other parameters, likewise
    plain: frozenset[str]  # do_not_specialize: neither ==1 nor %16
    unaligned: frozenset[str]  # do_not_specialize_on_alignment: ==1 but not %16
    annotated: tuple[tuple[str, str], ...] = ()  # `n: tl.int64`: the type, whatever the argument
    configs: tuple[Config, ...] = ()
    key: tuple[str, ...] = ()
    zeroed: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    heuristics: tuple[tuple[str, Callable[[dict[str, Any]], Any]], ...] = ()

    def of_config(self, config: Config) -> dict[str, Constant]:
        """The constexprs of a configuration; an option is one, too, if a parameter has its name."""
        options = {name: value for name, value in config.options if name in self.parameters}
        return {**options, **dict(config.constexprs)}


class Functions(Mapping[str, Function]):
    """The jit functions of a file; each is read when first asked for. Raises CompileError."""

    def __init__(self, path: str, tree: ast.Module) -> None:
        self._module = _Module(path, tree)
        self._nodes: dict[str, list[tuple[ast.FunctionDef, ast.expr]]] = {}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and (decorator := _decorator(node, "jit")):
                self._nodes.setdefault(node.name, []).append((node, decorator))
        self._read: dict[str, Function] = {}

    def __getitem__(self, name: str) -> Function:
        if name not in self._read:
            (first, decorator), *more = self._nodes[name]
            if more:
                raise CompileError(
                    f"{self._module.path}({more[0][0].lineno}): error: `{name}` is defined in line "
                    f"{first.lineno}, too, and kernels are found by their names: rename one of them"
                )
            self._read[name] = _function(first, decorator, self._module)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)


def functions(path: Path) -> Functions:
    """The jit functions of a file, read once for each state of it. Raises CompileError."""
    return _functions(str(path), owned.state(path.stat()))


@functools.cache
def _functions(path: str, _state: tuple[int, ...]) -> Functions:
    try:
        tree = ast.parse(Path(path).read_bytes(), path)
    except SyntaxError as e:
        raise CompileError(f"{path}({e.lineno}): error: {e.msg}") from e
    return Functions(path, tree)


def _function(node: ast.FunctionDef, decorator: ast.expr, module: _Module) -> Function:
    positional = [*node.args.posonlyargs, *node.args.args]
    parameters = [*positional, *node.args.kwonlyargs]
    names = [parameter.arg for parameter in parameters]
    constexprs = frozenset(
        p.arg for p in parameters if p.annotation and "constexpr" in ast.unparse(p.annotation)
    )
    annotated = tuple((p.arg, kind) for p in parameters if (kind := _annotated(p.annotation)))
    for name, kind in annotated:
        if fault := scalar_fault(name, kind):
            raise CompileError(f"{module.path}({node.lineno}): error: {fault}")
    values = [None] * (len(positional) - len(node.args.defaults)) + node.args.defaults
    literals = {
        name: value
        for name, expression in zip(names, [*values, *node.args.kw_defaults])
        if expression
        for value in _literal(expression)
    }
    return Function(
        tuple(names),
        constexprs,
        tuple((n, v) for n, v in literals.items() if n in constexprs and v is not None),
        tuple((n, v) for n, v in literals.items() if n not in constexprs),
        frozenset(_named(decorator, "do_not_specialize", names, module)),
        frozenset(_named(decorator, "do_not_specialize_on_alignment", names, module)),
        annotated,
        *_tuning(_decorator(node, "autotune"), module),
        _heuristics(_decorator(node, "heuristics"), module),
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


def _tuning(
    decorator: ast.expr | None, module: _Module
) -> tuple[tuple[Config, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The configurations, and the lists of names in `_LISTS`."""
    if not isinstance(decorator, ast.Call):
        return (), (), (), ()
    arguments = dict(zip(("configs", "key"), decorator.args))
    arguments |= {item.arg: item.value for item in decorator.keywords if item.arg}
    refused = {"prune_configs_by", "pre_hook", "post_hook"}.intersection(arguments)
    if refused:
        raise CompileError(
            f"{module.path}({decorator.lineno}): error: `{min(refused)}` of @triton.autotune is "
            "not supported: remove it, and list the configurations that remain"
        )
    configs = tuple(module.value(arguments["configs"]))
    key, zeroed, restored = (
        tuple(module.value(arguments[name]) or ()) if name in arguments else () for name in _LISTS
    )
    return configs, key, zeroed, restored


def _heuristics(
    decorator: ast.expr | None, module: _Module
) -> tuple[tuple[str, Callable[[dict[str, Any]], Any]], ...]:
    if not isinstance(decorator, ast.Call):
        return ()
    (values,) = (*decorator.args, *(item.value for item in decorator.keywords))
    return tuple(module.value(values).items())


def _config(
    kwargs: dict[str, Constant], num_warps: int = 4, num_stages: int = 3, num_ctas: int = 1,
    maxnreg: int | None = None, **unsupported: object,
) -> Config:  # fmt: skip
    """Make a Config from the arguments of `triton.Config`, with its defaults."""
    if any(value is not None for value in unsupported.values()):
        raise ValueError(f"triton.Config({', '.join(unsupported)}=...) is not supported")
    options = {"num_warps": num_warps, "num_stages": num_stages}
    options |= {"num_ctas": num_ctas} if num_ctas != 1 else {}
    options |= {"maxnreg": maxnreg} if maxnreg else {}
    return Config(tuple(kwargs.items()), tuple(options.items()))


class _Names(dict[str, Any]):
    """The names that statements of a file gave a value; for a name that they failed to, why."""

    def __init__(self) -> None:
        light = SimpleNamespace(Config=_config, cdiv=cdiv, next_power_of_2=next_power_of_2)
        super().__init__(triton=light, Config=_config, math=math)
        self._failures: dict[str, Exception] = {}

    def run(self, node: ast.stmt, path: str) -> None:
        """Run a statement, unless it imports modules; a failure counts where its names are read."""
        failure: Exception = ImportError(f"line {node.lineno} imports a module")
        if not _imports(node):
            try:
                exec(compile(ast.Module([node], []), path, "exec"), self)  # noqa: S102  the kernel author's own code
            except Exception as e:  # noqa: BLE001
                failure = e
            else:
                return
        for name in _given_by(node):
            self.pop(name, None)
            self._failures[name] = failure

    def __missing__(self, name: str) -> Any:
        raise self._failures.get(name) or KeyError(name)


class _Module:
    """A file, of whose statements those are run, without Triton, that its decorators depend on."""

    def __init__(self, path: str, tree: ast.Module) -> None:
        self.path = path
        self._tree = tree

    @functools.cached_property
    def _given(self) -> list[tuple[ast.stmt, set[str]]]:
        """The statements of the file, each with the names whose values it gives or changes."""
        return [(node, _given_by(node)) for node in self._tree.body]

    def value(self, expression: ast.expr) -> Any:
        """The value of an expression of the file. Raises CompileError."""
        names = _Names()
        for node in self._leading_to(expression, known=frozenset(names)):
            names.run(node, self.path)
        try:
            code = compile(ast.Expression(expression), self.path, "eval")
            return eval(code, names)  # noqa: S307  the kernel author's own code
        except Exception as e:
            raise CompileError(
                f"{self.path}({expression.lineno}): error: a launch must evaluate this without "
                f"importing Triton, and cannot: {type(e).__name__}: {e}"
            ) from e

    def _leading_to(self, expression: ast.expr, known: frozenset[str]) -> list[ast.stmt]:
        """The statements, in order, that the values of the names in an expression follow from."""
        wanted = _names_in(expression) - known
        needed: set[ast.stmt] = set()
        while more := {node for node, given in self._given if given & wanted} - needed:
            needed |= more
            wanted = wanted.union(*map(_names_in, more)) - known
        return [node for node in self._tree.body if node in needed]


def _names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _imports(node: ast.stmt) -> bool:
    """Whether a statement, other than a definition, imports modules."""
    parts = () if isinstance(node, DEFINITIONS) else ast.walk(node)
    return any(isinstance(part, (ast.Import, ast.ImportFrom)) for part in parts)


def _given_by(node: ast.stmt) -> set[str]:
    """The names whose values a statement gives or changes: `a = 1`, `a[0] = 1`, `a.append(1)`."""
    if isinstance(node, DEFINITIONS):
        return {node.name}
    found = set()
    for part in ast.walk(node):
        if isinstance(part, DEFINITIONS):
            found.add(part.name)
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


def cdiv(a: int, b: int) -> int:
    """The quotient a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def _literal(expression: ast.expr) -> list[Constant | None]:
    """The number or None that an expression spells, in a list; [] for any other expression."""
    with contextlib.suppress(ValueError):
        value = ast.literal_eval(expression)
        if value is None or isinstance(value, (bool, int, float)):
            return [value]
    return []


def _decorator(node: ast.FunctionDef, name: str) -> ast.expr | None:
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(called).split(".")[-1] == name:
            return decorator
    return None


def _named(decorator: ast.expr, keyword: str, names: list[str], module: _Module) -> list[str]:
    """The parameters that a list keyword of the decorator names, by name or position."""
    for item in decorator.keywords if isinstance(decorator, ast.Call) else []:
        if item.arg == keyword:
            listed = module.value(item.value) or ()
            return [names[v] if isinstance(v, int) else str(v) for v in listed]
    return []
