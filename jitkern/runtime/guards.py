"""Guards of a `Scope`, as C checks them at each call: words of memory that must not change.

The parts of functions (`__code__`, `__defaults__`, `__kwdefaults__`), the content of cells and the
class of modules are words of the objects themselves. A namespace has a version as its word: up to
Python 3.11 the version that every dict has; from 3.12 on a count that a dict watcher raises. After
a change of the version, C compares the names of the namespace one by one under the lock of the
interpreter, which takes 0.2 us, and stores the new version if all names are unchanged.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import types
from ctypes import c_int, c_int64, c_uint64, c_void_p
from typing import Any

from jitkern.trace.scope import Scope
from jitkern.trace.values import ABSENT

READ = 16  # namespaces that one scope may read: READ in runtime.c
_VERSION_AT = 24  # bytes into a dict: after its head and its size


class _Word(ctypes.Structure):
    _fields_ = (("at", c_void_p), ("seen", c_uint64))


class _Binding(ctypes.Structure):
    _fields_ = (
        ("namespace", c_void_p), ("name", c_void_p), ("value", c_void_p), ("word", c_int64),
    )  # fmt: skip


class Guard(ctypes.Structure):
    """`Scope` in runtime.c. The guard keeps alive the objects whose addresses it holds."""

    _fields_ = (
        ("fixed", c_int), ("namespaces", c_int), ("bindings", c_int), ("words", c_void_p),
        ("bound", c_void_p),
    )  # fmt: skip


class Guards:
    """A maker of the guards of scopes, for a loaded launch runtime."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._watcher: int | None = None
        library.jitkern_watch.restype = c_void_p

    def of(self, scope: Scope) -> Guard | None:
        """Return the guard of a scope; None if this Python does not show changes of the scope."""
        places = _function_places()
        if len(places) < len(_PARTS):
            return None
        fixed = [
            (id(function) + places[name], 0 if part is None else id(part))
            for function, *parts in scope.functions
            for name, part in zip(_PARTS, parts)
        ]
        fixed += [
            (id(owner) + (_CLASS if name == "__class__" else _CONTENT), _in_c(value))
            for owner, name, value in scope.members
        ]
        namespaces = {id(b.namespace): b.namespace for b in scope.bindings.values()}
        versions = [self._version(namespace) for namespace in namespaces.values()]
        if len(versions) > READ or None in versions:
            return None
        words = [*fixed, *((at, c_uint64.from_address(at or 0).value) for at in versions)]
        numbers = {at: number for number, at in enumerate(namespaces)}
        names = [sys.intern(name) for _, name, _ in scope.bindings.values()]
        bound = [
            (id(namespace), id(name), _in_c(value), numbers[id(namespace)])
            for name, (namespace, _, value) in zip(names, scope.bindings.values())
        ]
        if not scope.holds():  # a value has changed since the trace
            return None
        word_array = (_Word * len(words))(*words)  # type: ignore[misc]
        bound_array = (_Binding * len(bound))(*bound)  # type: ignore[misc]
        guard = Guard(
            len(fixed), len(versions), len(bound), ctypes.addressof(word_array),
            ctypes.addressof(bound_array),
        )  # fmt: skip
        guard.alive = (word_array, bound_array, scope, names)
        return guard

    def _version(self, namespace: dict[str, Any]) -> int | None:
        """Return the address of the version of a namespace, or None."""
        if _DICTS_HAVE_VERSIONS:
            return id(namespace) + _VERSION_AT if _dicts_have_versions() else None
        if self._watcher is None:
            self._watcher = ctypes.pythonapi.PyDict_AddWatcher(self._library.jitkern_changed)
        if self._watcher < 0:
            return None
        at: int | None = self._library.jitkern_watch(c_void_p(id(namespace)))
        if at is not None:
            ctypes.pythonapi.PyDict_Watch(self._watcher, ctypes.py_object(namespace))
        return at


def _in_c(address: int) -> int:
    """Return the id of a value as C has it: null for a value that is absent."""
    return 0 if address == id(ABSENT) else address


_CONTENT = 16  # bytes from the head of a cell to its content
_CLASS = 8  # and of an object to its class
_DICTS_HAVE_VERSIONS = sys.version_info[:2] < (3, 12)
_PARTS = ("__code__", "__defaults__", "__kwdefaults__")


@functools.cache
def _function_places() -> dict[str, int]:
    """Return the byte offsets of a function's parts, found by a search in one function."""

    def probe(a: object = object(), *, b: object = object()) -> None:
        """Have each part exactly once."""

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
    values = [version.value]
    for change in (lambda: probe.update(a=1), lambda: probe.update(a=2), lambda: probe.pop("a")):
        change()
        values.append(version.value)
    return len(set(values)) == len(values)
