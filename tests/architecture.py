"""The rooms of jitkern, who imports whom, and what goes the wrong way.

python -m tests.architecture
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
# From the ground up: a room, or a module beside the rooms, imports from its own room and from those
# before it.
ORDER = (
    "errors", "named_tuple", "files", "config", "target", "cache", "source", "cache_tools", "remote",
    "calls", "compilers", "loading", "jit", "mega_cache", "launch", "trace", "runtime", "op", "raw",
    "dropin", "declare", "composition", "prewarming", "ops", "devtools", "inference", "service", "cli",
)  # fmt: skip
PACKAGES = {"jitkern": ROOT / "jitkern", "jitkern.cache_tools": ROOT / "cache_tools"}


def _modules() -> Iterator[tuple[str, Path]]:
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
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


def for_types(tree: ast.AST) -> set[int]:
    """The ids of the nodes that only a type checker sees."""
    return {
        id(inside)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inside in ast.walk(node)
    }


def imports(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """(node, module of ours) for each that a file imports when it runs."""
    hidden = for_types(tree)
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            longer = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in longer]
        for name in names:
            if id(node) not in hidden and name in MODULES and name != "jitkern":
                yield node, name


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


def circle() -> list[str]:
    """Modules that import each other at their top, if there are such."""
    graph = {}
    for name, tree in TREES.items():
        others = {other for _, other in imports(tree)} - {name}
        parents = {name.rsplit(".", level)[0] for level in range(1, name.count(".") + 1)}
        graph[name] = others - parents  # a room is there before its modules
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        found: list[str] = e.args[1]
        return found
    return []


def main() -> None:
    """Print the map."""
    edges: dict[str, Counter[str]] = {room: Counter() for room in ORDER}
    for name, tree in TREES.items():
        for _, other in imports(tree):
            if room_of(name) in edges and room_of(other) != room_of(name):
                edges[room_of(name)][room_of(other)] += 1
    for room in ORDER:
        inside = [path for name, path in MODULES.items() if room_of(name) == room]
        lines = sum(len(path.read_text().splitlines()) for path in inside)
        below = " ".join(sorted(edges[room], key=ORDER.index))
        print(f"{room:12} {len(inside):3} files {lines:6} lines   imports {below or 'nothing'}")
    total = sum(len(path.read_text().splitlines()) for path in MODULES.values())
    print(f"{len(MODULES)} files, {total} lines")
    print(f"circles: {' -> '.join(circle()) or 0}")
    print(f"upward imports: {len(upward())}")
    for name, other in upward():
        print(f"  {name} -> {other}")


if __name__ == "__main__":
    main()
