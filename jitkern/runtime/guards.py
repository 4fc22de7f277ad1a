"""A `World` as C checks it at each call: words that must be what they were.

The parts of functions (`__code__`, `__defaults__`, `__kwdefaults__`), the content of cells and the
size of dicts are words of the objects themselves. Of a namespace it is a version: up to Python 3.11
the one that every dict has; from 3.12 on a count that a dict watcher raises. Where a version has
changed, C compares the names one by one under the lock of the interpreter, which takes 0.2 us, and
takes the new version down if they are as they were.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import types
from ctypes import c_int, c_uint64, c_void_p
from typing import Any

from jitkern.trace.world import ABSENT, World

READ = 16  # namespaces that one world may read, as runtime.c has it
_VERSION_AT = 24  # bytes into a dict: after its head and its size


class _Word(ctypes.Structure):
    _fields_ = (("at", c_void_p), ("seen", c_uint64))


class _Binding(ctypes.Structure):
    _fields_ = (("namespace", c_void_p), ("name", c_void_p), ("value", c_void_p))


class Guard(ctypes.Structure):
    """`World` in runtime.c. It keeps alive what it has the addresses of."""

    _fields_ = (
        ("fixed", c_int), ("namespaces", c_int), ("bindings", c_int), ("words", c_void_p),
        ("bound", c_void_p),
    )  # fmt: skip


class Guards:
    """Makes the guards of worlds, over a loaded launch runtime."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._made: dict[World, Guard] = {}
        self._watcher: int | None = None
        library.jitkern_watch.restype = c_void_p

    def of(self, world: World) -> Guard | None:
        """The guard of a world; None where this Python shows no changes of what it reads."""
        if world not in self._made:
            made = self._guard(world)
            if made is None:
                return None
            self._made[world] = made
        return self._made[world]

    def _guard(self, world: World) -> Guard | None:
        places = _function_places()
        if len(places) < len(_PARTS):
            return None
        fixed = [
            (id(function) + places[name], 0 if part is None else id(part))
            for function, *parts in world.functions
            for name, part in zip(_PARTS, parts)
        ]
        for owner, name, value in world.members:
            seen = value if name == "size" else 0 if value is ABSENT else id(value)
            fixed.append((id(owner) + _CONTENT, seen))
        namespaces = {id(b.namespace): b.namespace for b in world.bindings.values()}
        versions = [self._version(namespace) for namespace in namespaces.values()]
        if len(versions) > READ or None in versions:
            return None
        words = [*fixed, *((at, c_uint64.from_address(at or 0).value) for at in versions)]
        names = [_interned(name) for _, name, _ in world.bindings.values()]
        bound = [
            (id(namespace), id(name), 0 if value is ABSENT else id(value))
            for name, (namespace, _, value) in zip(names, world.bindings.values())
        ]
        if not world.holds():  # it has changed since it was taken down
            return None
        word_array = (_Word * len(words))(*words)  # type: ignore[misc]
        bound_array = (_Binding * len(bound))(*bound)  # type: ignore[misc]
        guard = Guard(
            len(fixed), len(versions), len(bound), ctypes.addressof(word_array),
            ctypes.addressof(bound_array),
        )  # fmt: skip
        guard.alive = (word_array, bound_array, world, names)
        return guard

    def _version(self, namespace: dict[str, Any]) -> int | None:
        """Where the version of a namespace is."""
        if _OF_DICTS:
            return id(namespace) + _VERSION_AT if _dicts_have_versions() else None
        if self._watcher is None:
            self._watcher = ctypes.pythonapi.PyDict_AddWatcher(self._library.jitkern_changed)
        if self._watcher < 0:
            return None
        at: int | None = self._library.jitkern_watch(c_void_p(id(namespace)))
        if at is not None:
            ctypes.pythonapi.PyDict_Watch(self._watcher, ctypes.py_object(namespace))
        return at


_CONTENT = 16  # bytes into a cell its content, into a dict its size: after its head
_OF_DICTS = sys.version_info[:2] < (3, 12)  # whether versions are
_PARTS = ("__code__", "__defaults__", "__kwdefaults__")


def _interned(name: Any) -> Any:
    return sys.intern(name) if type(name) is str else name


@functools.cache
def _function_places() -> dict[str, int]:
    """At which byte of a function its parts are, found by looking for those of one."""

    def probe(a: object = object(), *, b: object = object()) -> None:
        """Have each part once."""

    words = (c_uint64 * (types.FunctionType.__basicsize__ // 8)).from_address(id(probe))
    return {
        name: 8 * list(words).index(id(getattr(probe, name)))
        for name in _PARTS
        if list(words).count(id(getattr(probe, name))) == 1
    }


@functools.cache
def _dicts_have_versions() -> bool:
    probe: dict[str, int] = {}
    version = c_uint64.from_address(id(probe) + _VERSION_AT)
    seen = [version.value]
    for change in (lambda: probe.update(a=1), lambda: probe.update(a=2), lambda: probe.pop("a")):
        change()
        seen.append(version.value)
    return len(set(seen)) == len(seen)
