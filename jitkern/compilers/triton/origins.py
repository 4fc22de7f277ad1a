"""Find where the values that a Triton function uses come from, by reading the modules' texts.

Triton puts the values of global names into its output. The key covers the texts of the kernel's own
modules, and so every value that is computed there from literals. A value from another module, a
data file or the machine is not covered, and is refused by its name.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, NoReturn

from jitkern.source.triton_text import DEFINITIONS, PURE, by_function, names_in, root_of

# The results of these follow from their arguments, or from a version that the key has.
_FOLLOWED = PURE | {"packaging", "sys", "torch", "triton"}
_OF_THE_MACHINE = (  # or of files
    "torch.backends", "torch.cuda", "torch.from_file", "torch.hub", "torch.jit", "torch.load",
    "triton.runtime",
)  # fmt: skip
_OF_THE_KEY = ("os.environ", "os.getenv")  # only variables that a source names are there
_READING = frozenset((
    "__import__", "compile", "eval", "exec", "globals", "input", "locals", "open", "vars",
))  # fmt: skip
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
ANY = "*"  # in place of a name
_INSTEAD = "write the value out in the kernel's own file, or pass it as a constexpr argument"


class Origins:
    """The names that a function uses, followed to the statements that assign their values.

    covered: the files that the key covers.
    """

    def __init__(self, covered: Iterable[str]) -> None:
        self._covered = {Path(path).resolve() for path in covered}
        self._seen: set[tuple[int, str]] = set()

    def check(self, names: dict[str, Any], name: str) -> None:
        """Raise TypeError if the value of `name` in a module follows from data outside of the key.

        names: the names of the module, as `vars` returns them.
        """
        if (id(names), name) in self._seen or name.startswith("__"):
            return
        self._seen.add((id(names), name))
        if name not in names:
            if name in _READING and hasattr(builtins, name):
                _refuse(name)
            return  # a builtin, or a name of a function's own
        if _is_tritons(names[name]):
            return
        path = Path(names.get("__file__") or names["__name__"])
        if path.resolve() not in self._covered:
            raise TypeError(
                f"`{name}` comes from {path}, which the cache key does not cover: define it in the "
                f"kernel's own file or package, or {_INSTEAD}"
            )
        value = names[name]
        mutable = isinstance(value, (dict, list, set))
        has_fields = not isinstance(value, (ModuleType, FunctionType)) and not hasattr(value, "fn")
        statements = [
            statement
            for statement in _statements(path.read_bytes())
            if statement.gives(name, mutable=mutable)
            or (has_fields and name in _with_fields_set(statement.node))
            or name in statement.hidden
            or (has_fields and ANY in statement.hidden)
            or _sets_member(statement.node, names, name)
        ]
        if not statements:
            raise TypeError(f"no statement of {path} gives `{name}` its value: {_INSTEAD}")
        for statement in statements:
            reader = _Reader(self, names)
            reader.read_statement(statement.node, name)
            for condition in statement.conditions:
                reader.visit(condition)

    def check_member(self, module: ModuleType, name: str) -> None:
        """Raise TypeError likewise for a member of a module; for all members if `name` is ""."""
        full = f"{module.__name__}.{name}".strip(".")
        package = full.partition(".")[0]
        if f"{full}.".startswith(tuple(f"{place}." for place in _OF_THE_MACHINE)):
            _refuse(full)
        if package in _FOLLOWED or full in _OF_THE_KEY:
            return
        if package in sys.stdlib_module_names:
            _refuse(full)
        for member in [name] if name else list(vars(module)):
            self.check(vars(module), member)


class _Reader(ast.NodeVisitor):
    """Follows the names that a part of a module's text reads, except the names in `local`."""

    def __init__(
        self, origins: Origins, names: dict[str, Any], local: frozenset[str] = frozenset()
    ) -> None:
        self._origins = origins
        self._names = names
        self._local = local

    def read_statement(self, node: ast.AST, name: str) -> None:
        """Follow the names that a statement of the module reads to give `name` its value."""
        if isinstance(node, ast.ImportFrom):
            self._read_import(node, name)
        elif not isinstance(node, ast.Import):  # of a module, only the members used count
            self.visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Follow a function with its own names as local, without the decorators of Triton."""
        of_triton = hasattr(self._names.get(node.name), "fn")
        own = {part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)}
        inside = _Reader(self._origins, self._names, self._local | own | _stored(node.body))
        for part in ast.iter_child_nodes(node):
            if not (of_triton and part in node.decorator_list):
                (inside if part in node.body else self).visit(part)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        own = {part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)}
        _Reader(self._origins, self._names, self._local | own).visit(node.body)
        self.visit(node.args)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load) or node.id in self._local:
            return
        self._origins.check(self._names, node.id)
        if module := self._module(node):
            self._origins.check_member(module, "")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        module = self._module(node.value)
        if not module:
            self.visit(node.value)
            return
        self._origins.check_member(module, node.attr)
        root = next(part for part in ast.walk(node) if isinstance(part, ast.Name))
        self._origins.check(self._names, root.id)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if module := sys.modules.get(alias.name):
                self._origins.check_member(module, "")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._read_import(node, "")

    def _read_import(self, node: ast.ImportFrom, name: str) -> None:
        """Follow the import of `name`, or all names of the statement if `name` is ""."""
        package = self._names.get("__package__")
        module = None  # an import under a condition may not have run
        with contextlib.suppress(ImportError):
            full = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            module = sys.modules.get(full)
        if module is None:
            return
        for alias in node.names:
            member = getattr(module, alias.name, None)
            if alias.name == "*":
                value = getattr(module, name, None) if name else module
                if not name or not (value is None or isinstance(value, ModuleType)):
                    self._origins.check_member(module, name)
            elif name and (alias.asname or alias.name) != name:
                continue
            elif not isinstance(member, ModuleType):
                self._origins.check_member(module, alias.name)
            elif not name:
                self._origins.check_member(member, "")

    def _module(self, node: ast.AST) -> ModuleType | None:
        if isinstance(node, ast.Attribute):
            above = self._module(node.value)
            value = getattr(above, node.attr, None) if above else None
        elif isinstance(node, ast.Name) and node.id not in self._local:
            value = self._names.get(node.id)
        else:
            return None
        return value if isinstance(value, ModuleType) else None


class _OriginOfStatement(NamedTuple):
    """A statement of a module, and the conditions and loops that it stands under.

    hidden: the names that it may give by other ways than assignments; ANY for any name.
    """

    node: ast.AST
    conditions: tuple[ast.AST, ...]
    hidden: frozenset[str] = frozenset()

    def gives(self, name: str, *, mutable: bool) -> bool:
        """Whether the statement gives `name` its value, or may change that value."""
        node = self.node
        if isinstance(node, DEFINITIONS):
            inside = (part for part in ast.walk(node) if isinstance(part, ast.Global))
            return node.name == name or any(name in part.names for part in inside)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            return name in names or "*" in names
        if name in _stored([node]):
            return True
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        return mutable and name in names and isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign))


@functools.lru_cache(maxsize=64)
def _statements(text: bytes) -> list[_OriginOfStatement]:
    """The statements of a module that run when it is imported."""
    tree = ast.parse(text)
    called = by_function(tree, _hidden_in)
    found = []
    for statement in _flattened(tree.body, ()):
        node = statement.node
        runs = getattr(node, "decorator_list", []) if isinstance(node, DEFINITIONS) else [node]
        hidden = {name for part in runs for name in _hidden_in(part)}
        hidden = hidden.union(*(called.get(n, ()) for part in runs for n in names_in(part)))
        found.append(statement._replace(hidden=frozenset(hidden)))
    return found


def _hidden_in(node: ast.AST) -> set[str]:
    """The global names that a statement may give by `exec`, `globals()[...]` and the like."""
    found: set[str] = set()
    for above in ast.walk(node):
        for part in ast.iter_child_nodes(above):
            called = _called(part)
            arguments = part.args if isinstance(part, ast.Call) else []
            if called in ("exec", "eval") and len(arguments) == 1:
                found.add(ANY)
            elif called == "setattr" and not isinstance(arguments[0], ast.Name):
                found.add(_constant(arguments[1]))
            elif called in ("globals", "vars", "locals") or _is_own_module(part):
                found |= _written_through(part, above)
            elif isinstance(part, ast.Attribute) and part.attr == "__dict__":
                found |= _written_through(part, above) if _is_own_module(part.value) else set()
    return found


def _written_through(place: ast.AST, above: ast.AST) -> set[str]:
    """The names that are given through a module or its dictionary, whose use is `above`."""
    loads = isinstance(getattr(above, "ctx", None), ast.Load)
    if isinstance(above, ast.Subscript) and above.value is place:
        return set() if loads else {_constant(above.slice)}
    if isinstance(above, ast.Attribute):
        reads = _is_own_module(place) or above.attr in ("copy", "get", "items", "keys", "values")
        return {above.attr} if not loads else set() if reads else {ANY}
    reads = isinstance(above, (ast.Compare, ast.For, ast.comprehension))
    reads = reads or _called(above) in ("dict", "getattr", "hasattr", "len", "list", "setattr")
    return set() if reads else {ANY}


def _called(node: ast.AST) -> str:
    """The name of the function that a call calls."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _constant(node: ast.AST) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ANY


def _is_own_module(node: ast.AST) -> bool:
    """Whether an expression spells the module itself: `sys.modules[__name__]`."""
    text = ast.unparse(node) if isinstance(node, (ast.Call, ast.Subscript)) else ""
    return bool(
        re.fullmatch(r"(sys\.)?modules(\[|\.get\()__name__[])]|.*import\w*\(__name__\)", text)
    )


def _sets_member(node: ast.AST, names: dict[str, Any], name: str) -> bool:
    """Whether a statement sets `name` by a name of the module itself: `import me; me.V = 1`."""
    return any(
        isinstance(part, ast.Name)
        and isinstance(module := names.get(part.id), ModuleType)
        and vars(module) is names
        for part in ast.walk(node)
    ) and name in {
        *(p.attr for p in ast.walk(node) if isinstance(p, ast.Attribute)),
        *(p.value for p in ast.walk(node) if isinstance(p, ast.Constant)),
    }


def _flattened(
    body: Iterable[ast.AST], conditions: tuple[ast.AST, ...]
) -> Iterator[_OriginOfStatement]:
    for node in body:
        blocks = [getattr(node, name, []) for name in _BLOCKS]
        if isinstance(node, DEFINITIONS) or not any(blocks):
            yield _OriginOfStatement(node, conditions)
            continue
        inside = {id(part) for block in blocks for part in block}
        head = tuple(part for part in ast.iter_child_nodes(node) if id(part) not in inside)
        if any(
            isinstance(part, ast.Name) and part.id == "__name__"
            for h in head
            for part in ast.walk(h)
        ):
            continue  # not run by an import
        yield from (_OriginOfStatement(part, (*conditions, *head)) for part in head)
        for block in blocks:
            yield from _flattened(block, (*conditions, *head))


def _is_tritons(value: Any) -> bool:
    """Whether a value is a function of Triton's own; its text depends on Triton's version."""
    function = getattr(value, "fn", value)
    package = str(getattr(function, "__module__", "")).partition(".")[0]
    return package == "triton" and hasattr(function, "__qualname__")


def _stored(body: Iterable[ast.AST]) -> frozenset[str]:
    """The names that statements assign to."""
    parts = [part for node in body for part in ast.walk(node)]
    return frozenset(
        part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    )


def _with_fields_set(node: ast.AST) -> set[str]:
    """The names of values whose attributes or items a statement sets: `a.b = 1`, `a[0].b = 1`."""
    return {
        root_of(part)
        for part in ast.walk(node)
        if isinstance(part, (ast.Attribute, ast.Subscript)) and isinstance(part.ctx, ast.Store)
    }


def _refuse(what: str) -> NoReturn:
    raise TypeError(
        f"the kernel uses a value made by `{what}`, and the cache key does not cover the data that "
        f"`{what}` reads: {_INSTEAD}"
    )
