"""The digest of the declarations and sources of ops, for the keys of Torch's compile caches.

Of the functions that Torch may trace, and of the functions that these call, the digest has the code
and all that they read by a name. What comes with an installed package, such as Torch, counts by its
name; a plain value, and a container of such values, by its content. An op whose functions read
anything else, such as an object or a whole module of the user's, has another digest each time.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import types
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from jitkern._version import __version__
from jitkern.cache.key import canonical
from jitkern.errors import DeclarationError
from jitkern.launch.tuned import parts_of
from jitkern.op.declaration import DeclaredOp
from jitkern.source.closure import closure_of
from jitkern.source.global_names import code_names
from jitkern.source.kinds import Source
from jitkern.trace.scope import read_member
from jitkern.trace.values import ABSENT, is_plain, spelled, spelled_code

_KERNELS = "jitkern.kernels_src"
_HOMES = (type, types.ModuleType, type(None))  # of the functions of C that have no state


def digest(ops: Mapping[str, Any]) -> str:
    """Return a digest of the current state of these ops, by their names."""
    each = [_digest_of(_parts(op)) for _, op in sorted(ops.items())]
    return hashlib.sha256(canonical([__version__, _own(), *each])).hexdigest()[:16]


def _parts(op: Any) -> tuple[Any, ...]:
    """Return the parts of an op: declaration, sources, and the functions that Torch may trace."""
    declared = op.declaration
    shapes = [declared.fake] if declared.fake else declared.launchers.values()
    functions = [declared.reference, *(part for one in shapes for part in parts_of(one))]
    functions += [op.gradient.function] if op.gradient else []
    sources = tuple(source for listed in declared.sources.values() for source in listed)
    by_op = op.gradient.op.name if op.gradient and op.gradient.op else ""
    traced = (declared.fusible, by_op, *declared.nondifferentiable)
    return op.schema, traced, sources, _text(declared.module, functions)


@functools.lru_cache(maxsize=4096)
def _digest_of(op: tuple[Any, ...]) -> str:
    """Return the digest of an op by its parts; its files are read once."""
    schema, traced, sources, text = op
    told = canonical([schema, traced, *map(_files, sources)])
    return hashlib.sha256(told + text.encode(errors="surrogatepass")).hexdigest()


def forget() -> None:
    """Read all files again, because an op was declared again."""
    _digest_of.cache_clear()


def _files(source: Source) -> dict[str, str]:
    try:
        return closure_of(source).files
    except DeclarationError:  # a file that is gone: the op says so when it is called
        return {}


@functools.cache
def _own() -> list[str]:
    """Return digests of this folder's files: Torch traces how they record and run references."""
    paths = sorted(Path(__file__).parent.glob("*.py"))
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


def _text(module: str, functions: Sequence[Any]) -> str:
    """Return the text of what functions of an op of this module do; a new one if none can tell."""
    try:
        return repr([*map(_Description(module).of, functions)])
    except (_UnknownValue, RecursionError):
        return uuid.uuid4().hex


class _UnknownValue(Exception):
    """A function reads a value that has no text."""


class _Description:
    """The texts of functions and of the values that they read. own: the package of the op."""

    def __init__(self, module: str) -> None:
        self.own = _KERNELS if module.startswith(f"{_KERNELS}.") else module.partition(".")[0]
        self._numbers: dict[types.FunctionType, int] = {}

    def of(self, value: Any) -> Any:
        """Return the text of a value, or a tuple of texts. Raises `_UnknownValue`."""
        kind = type(value)
        if kind is types.FunctionType:
            return self._function(value)
        if kind in (list, tuple):
            return kind.__name__, *map(self.of, value)
        if kind in (dict, types.MappingProxyType):
            return "dict", *((self.of(key), self.of(item)) for key, item in (*value.items(),))
        if kind is set:
            return "set", self.of(frozenset(value))
        if is_plain(value):
            return spelled(value)
        return "absent" if value is ABSENT else self._of_a_package(kind, value)

    def _of_a_package(self, kind: type, value: Any) -> Any:
        """Return the name of an op, or of what an installed package defines."""
        if isinstance(value, DeclaredOp):
            return value.schema
        if kind.__module__ == "torch._ops" or kind in (torch.finfo, torch.iinfo):
            return str(value)
        if kind is types.BuiltinFunctionType and isinstance(value.__self__, _HOMES):
            return getattr(value.__self__, "__name__", ""), value.__qualname__
        is_module = isinstance(value, types.ModuleType)
        if is_module or isinstance(value, type):
            name = value.__name__ if is_module else value.__module__
            if self._is_installed(name, sys.modules.get(name)):
                return name, getattr(value, "__qualname__", "")
        raise _UnknownValue

    def _function(self, function: types.FunctionType) -> Any:
        if function in self._numbers:
            return "again", self._numbers[function]
        self._numbers[function] = len(self._numbers)
        code, namespace, home = function.__code__, function.__globals__, function.__module__
        if str(home).startswith("jitkern.composition."):
            return home  # the name of such an op has a digest of the formula
        cells = [read_member(cell, "cell_contents") for cell in function.__closure__ or ()]
        held = self.of((cells, function.__defaults__, function.__kwdefaults__))
        if self._is_installed(str(namespace.get("__name__")), code):
            return home, function.__qualname__, held
        text, reads = _of_code(code)
        around = dict(zip(code.co_freevars, cells))
        names = [
            self._read(around if cell else namespace, name, attributes)
            for name, attributes, cell in reads
        ]
        return text, held, self.of(vars(function)), *names

    def _read(self, namespace: dict[str, Any], name: str, attributes: Sequence[str]) -> Any:
        """Return the text of a name's value; for a module, of the attribute read from it."""
        if name not in namespace:
            return "a builtin"
        value = namespace[name]
        for attribute in attributes:
            if not isinstance(value, types.ModuleType) or type(value).__module__ == "torch._ops":
                break
            value = vars(value).get(attribute, ABSENT)
        return self.of(value)

    def _is_installed(self, module: str, place: Any) -> bool:
        """Whether a module belongs to another, installed package than the op.

        place: the module, or code of it.
        """
        if f"{module}.".startswith(f"{self.own}."):
            return False
        top = module.partition(".")[0]
        if top in ("torch", "jitkern") or top in sys.stdlib_module_names:
            return True
        file = str(getattr(place, "co_filename", getattr(place, "__file__", "")))
        return "site-packages" in file or "dist-packages" in file


@functools.lru_cache(maxsize=1024)
def _of_code(code: types.CodeType) -> tuple[str, list[tuple[str, tuple[str, ...], bool]]]:
    """Return a digest of a code object, and the names that it reads, with attributes.

    The third of each is whether it is a variable of the enclosing function.
    """
    reads = [(read.name, read.attributes, read.cell) for read in code_names(code).reads]
    return spelled_code(code), [*dict.fromkeys(reads)]
