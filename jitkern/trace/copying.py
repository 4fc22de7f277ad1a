"""Copies of the functions of a scope with fixed values, for a trace or a run."""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jitkern.trace.scope import Called, FollowedFunction, Function, Known, Namespace, Scope, Trapped
from jitkern.trace.values import ABSENT

_IMPORT = {"__import__": builtins.__import__}  # the only builtin that C code of a call may need


def copies(
    scope: Scope, seen: Mapping[int, Any], trap: Callable[[str], Any] | None = None
) -> list[Function]:
    """Return copies of the functions of a scope, over a closed copy of it.

    seen: the replacements of objects in the copy, by the ids of the objects.
    trap: makes the stand-in for a value that is not followed, from the reason; without it the copy
        reads the value itself, which must be inert.
    """
    copying = _Copying(scope.nodes, seen, trap)
    return [copying.function(number) for number in scope.entries]


class _Copying:
    """Copies a scope's functions, each once, with separate namespaces."""

    def __init__(
        self,
        nodes: Sequence[FollowedFunction],
        seen: Mapping[int, Any],
        trap: Callable[[str], Any] | None,
    ) -> None:
        self._nodes = nodes
        self._seen = seen
        self._trap = trap
        self._functions: dict[int, types.FunctionType] = {}
        self._traps: dict[int, Any] = {}

    def function(self, number: int) -> types.FunctionType:
        """Return the copy of a function."""
        if number in self._functions:
            return self._functions[number]
        node = self._nodes[number]
        function = node.function
        namespace: dict[str, Any] = {
            "__builtins__": vars(builtins) if self._trap is None else _IMPORT,
            "__name__": function.__globals__.get("__name__"),
        }
        cells = tuple(types.CellType() for _ in node.cells)
        copy = types.FunctionType(function.__code__, namespace, function.__name__, None, cells)
        self._functions[number] = copy
        if self._trap is None:
            copy.__dict__ = function.__dict__
        for name, part in node.names.items():
            if not _is_absent(part):
                namespace[name] = self._built(part)
        for cell, part in zip(cells, node.cells):
            if not _is_absent(part):
                cell.cell_contents = self._built(part)
        copy.__defaults__ = tuple(map(self._built, node.defaults)) or None
        copy.__kwdefaults__ = {n: self._built(part) for n, part in node.keywords.items()} or None
        return copy

    def _built(self, part: Any) -> Any:
        if isinstance(part, Called):
            return self.function(part.number)
        if isinstance(part, Namespace):
            module = types.ModuleType("")
            members = {n: self._built(v) for n, v in part.members.items() if not _is_absent(v)}
            vars(module).update(members)
            return module
        if isinstance(part, Trapped) and self._trap is not None:
            if part.number not in self._traps:
                self._traps[part.number] = self._trap(part.what)
            return self._traps[part.number]
        return self._seen.get(id(part.value), part.value)


def _is_absent(part: Any) -> bool:
    return isinstance(part, Known) and part.value is ABSENT
