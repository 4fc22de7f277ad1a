"""The rooms of jitkern, who imports whom, and what goes the wrong way.

python -m tests.architecture
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parent.parent
# From the ground up: a room, or a module beside the rooms, imports from its own room and from those
# before it.
ORDER = (
    "_version", "_fork", "_lazy", "errors", "named_tuple", "files", "config", "target", "cache", "source", "cache_tools", "remote",
    "calls", "compilers", "loading", "jit", "mega_cache", "launch", "trace", "runtime", "op", "raw",
    "dropin", "declare", "composition", "prewarming", "ops", "devtools", "service", "cli",
    "testing",
)  # fmt: skip
# Lines of Python and C in a room, or in the modules beside the rooms, at most.
BUDGETS = {
    "beside": 1462,
    "files": 449,
    "config": 920,
    "cache": 1873,
    "source": 3388,
    "cache_tools": 1716,
    "remote": 1873,
    "calls": 786,
    "compilers": 5949,
    "loading": 699,
    "jit": 786,
    "launch": 3508,
    "trace": 2571,
    "runtime": 3318,
    "op": 3107,
    "raw": 734,
    "dropin": 701,
    "composition": 3441,
    "prewarming": 1556,
    "devtools": 1075,
    "service": 1146,
    "cli": 3168,
}
PRODUCT = ("jitkern", "cache_tools", "kernels_src", "benches")
# Of named tuples, of tensors, of modules of Torch, of processes: not private, or not ours.
_OF_OTHERS = {"_replace", "_asdict", "_make", "_fields", "_field_defaults", "_version", "_modules", "_config"}  # fmt: skip
PACKAGES = {"jitkern": ROOT / "jitkern", "jitkern.cache_tools": ROOT / "cache_tools"}


LINKED = [ROOT / "jitkern" / name for name in ("cache_tools", "kernels_src")]  # copies in an sdist


def _files(folder: Path, *suffixes: str) -> list[Path]:
    """The files of a package, without those of other packages that are linked into it."""
    found = (path for path in folder.rglob("*") if path.suffix in suffixes)
    return sorted(path for path in found if not {*LINKED} & {*path.parents})


def _modules() -> Iterator[tuple[str, Path]]:
    for package, folder in PACKAGES.items():
        for path in _files(folder, ".py"):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((package, *parts)).removesuffix(".__init__"), path


MODULES = dict(_modules())


class _Trees(Mapping[str, ast.Module]):
    """The syntax trees of the modules, each parsed at its first use."""

    def __init__(self) -> None:
        self._parsed: dict[str, ast.Module] = {}

    def __getitem__(self, name: str) -> ast.Module:
        if name not in self._parsed:
            self._parsed[name] = ast.parse(MODULES[name].read_text())
        return self._parsed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


TREES = _Trees()


def room_of(name: str) -> str:
    """The room of a module, or the module itself where it lies beside the rooms."""
    return [*name.split("."), "__init__"][1]


@functools.cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All nodes of a module, which several tests look at."""
    return [*ast.walk(tree)]


def for_types(tree: ast.Module) -> set[int]:
    """The ids of the nodes that only a type checker sees."""
    return {
        id(inside)
        for node in nodes(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inside in ast.walk(node)
    }


@functools.cache
def imports(tree: ast.Module, *, types: bool = False) -> list[tuple[ast.AST, str]]:
    """(node, module of ours) for each that a file imports when it runs; types: or for types."""
    hidden, found = set() if types else for_types(tree), []
    for node in nodes(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            longer = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in longer]
        if id(node) not in hidden:
            found += [(node, name) for name in names if name in MODULES and name != "jitkern"]
    return found


def upward() -> list[tuple[str, str]]:
    """(module, what it imports) wherever that does not lie below it."""
    found = []
    for name, tree in TREES.items():
        own = room_of(name)
        if own in ("__init__", "__main__"):
            continue
        for _, other in imports(tree):
            reached = room_of(other)
            if ORDER.index(reached) > ORDER.index(own):
                found.append((name, other))
    return found


def met(name: str) -> set[str]:
    """The modules that a file meets as `room.module`, or by a name that a room has of one."""
    tree, found = TREES[name], set()
    rooms = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if f"{node.module}.{alias.name}" in MODULES
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            room = rooms.get(node.value.id, "")
            home = homes().get(room, {}).get(node.attr, node.attr)
            if f"{room}.{home}" in MODULES:
                found.add(f"{room}.{home}")
    return found


def _homes(tree: ast.Module) -> dict[str, str]:
    """The names that a room has of its modules, by its list `_HOMES`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            found: dict[str, str] = ast.literal_eval(node.value)
            return found
    return {}


@functools.cache
def homes() -> dict[str, dict[str, str]]:
    """For each room: the names that it has of its modules."""
    return {name: _homes(TREES[name]) for name in MODULES if MODULES[name].stem == "__init__"}


def circles(*, types: bool = False, chains: bool = False) -> list[list[str]]:
    """The groups of modules that need each other.

    types: by imports for types, too. chains: by `room.module`, too.
    """
    graph = nx.DiGraph()
    for name, tree in TREES.items():
        others = {other for _, other in imports(tree, types=types)}
        if name in homes() and types:
            others = set()  # the modules of a room, which it lists for type checkers
        if chains:
            others |= met(name)
        parents = {name.rsplit(".", level)[0] for level in range(1, name.count(".") + 1)}
        # A room is there before its modules.
        graph.add_edges_from((name, other) for other in others - parents - {name})
    groups = nx.strongly_connected_components(graph)
    return sorted(sorted(group) for group in groups if len(group) > 1)


def private_names() -> set[str]:
    """The names with an underscore of the product: of modules, of classes, of objects."""
    paths = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    return {
        name
        for path in paths
        for name in _stored(ast.parse(path.read_text()))
        if name.startswith("_") and not name.startswith("__")
    }


def _stored(tree: ast.Module) -> set[str]:
    """The names and attributes that a file sets, its functions and classes among them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def privates_met(tree: ast.Module, private: set[str]) -> Iterator[str]:
    """The places where a test reads, imports or sets a private name of the product.

    private: the names of the product. A name that the test has itself is its own.
    """
    others = private - _stored(tree) - _OF_OTHERS
    for node in ast.walk(tree):
        met: list[str] = []
        if isinstance(node, ast.Attribute) and node.attr in others:
            root = ast.unparse(node).partition(".")[0]
            met = [] if root in ("self", "cls", "torch") else [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jitkern"):
            met = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and called(node).endswith(("setattr", "getattr")):
            words = [a.value for a in node.args if isinstance(a, ast.Constant)]
            met = [word.rpartition(".")[2] for word in words if isinstance(word, str)]
        elif isinstance(node, ast.Constant) and re.search("(from|import) jitkern", str(node.value)):
            with contextlib.suppress(SyntaxError):  # the text of a child process
                yield from privates_met(ast.parse(textwrap.dedent(node.value)), private)
        if others & {*met}:
            yield ast.unparse(node)


def called(node: ast.Call) -> str:
    """The last name of what a call calls."""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def lines() -> dict[str, int]:
    """The lines of Python and C of each room, and of the modules beside the rooms together."""
    found: Counter[str] = Counter()
    for package, folder in PACKAGES.items():
        for path in _files(folder, ".py", ".c", ".h", ".cpp"):
            inside = path.relative_to(folder).parts[:-1]
            room = package.rpartition(".")[2] if package != "jitkern" else [*inside, "beside"][0]
            found[room] += len(path.read_text().splitlines())
    return dict(found)


def main() -> None:
    """Print the map."""
    edges: dict[str, Counter[str]] = {room: Counter() for room in ORDER}
    for name, tree in TREES.items():
        for _, other in imports(tree):
            if room_of(name) in edges and room_of(other) != room_of(name):
                edges[room_of(name)][room_of(other)] += 1
    counted = lines()
    for room in ORDER:
        files = sum(room_of(name) == room for name in MODULES)
        below = " ".join(sorted(edges[room], key=ORDER.index))
        length = counted.get(room, "")
        print(f"{room:12} {files:3} files {length:6} lines   imports {below or 'nothing'}")
    print(f"{len(MODULES)} files, {sum(counted.values())} lines")
    for kind in ({}, {"types": True}, {"chains": True}):
        found = circles(**kind)
        print(f"circles by imports{' and '.join(['', *kind])}: {len(found)}")
        for group in found:
            print(f"  {' '.join(group)}")
    print(f"upward imports: {len(upward())}")
    for name, other in upward():
        print(f"  {name} -> {other}")


if __name__ == "__main__":
    main()
