"""Text of functions that is equal in two processes only if they do the same.

The text has the code of functions and all that the code reads by a name. What comes with an
installed package, such as Torch, counts by its name; all else counts by its content now: numbers,
strings, dtypes, containers, the functions and classes of the op's own package, and objects as
`pickle` would take them apart. An object of which nothing can be told is another one in each
process.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import sys
import types
import uuid
from collections.abc import Sequence, Set as AbstractSet
from typing import Any

import torch

from jitkern.source.global_names import code_names
from jitkern.trace.values import ABSENT, is_plain, spelled, spelled_code
from jitkern.trace.world import content_of

PROCESS = uuid.uuid4().hex  # for objects that mean something in this process alone
_MOST = 10_000  # functions, containers and objects
_LARGEST = 1 << 16  # bytes of a tensor
_KERNELS = "jitkern.kernels_src"
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_HOMES = (type, types.ModuleType)  # of the functions of C that have no state


def description_of(module: str, functions: Sequence[Any]) -> str:
    """Return the text of what functions do that an op of this module was declared with."""
    try:
        return repr(_Description(module).of(functions))
    except RecursionError:
        return uuid.uuid4().hex


class _Description:
    """Describes what functions do, value by value. own: the package of the op."""

    def __init__(self, module: str) -> None:
        self.own = _KERNELS if module.startswith(f"{_KERNELS}.") else module.partition(".")[0]
        self._seen: dict[int, tuple[int, Any]] = {}  # numbers, by ids of objects that are kept
        self._left = _MOST

    def of(self, value: Any) -> Any:  # noqa: PLR0911  a table of cases
        """Return the text of a value, or a tuple of texts."""
        kind = type(value)
        if value is ABSENT:
            return "absent"
        if is_plain(value):
            return spelled(value)
        if kind.__module__ == "torch._ops":  # an op of Torch, or a namespace of some
            return str(value)
        if isinstance(value, types.ModuleType):
            return self._module(value)
        if kind is types.BuiltinFunctionType and isinstance(value.__self__, _HOMES):
            return value.__self__.__name__, value.__name__
        if id(value) in self._seen:
            return "again", self._seen[id(value)][0]
        self._left -= 1
        if self._left < 0:
            return self._unknown(value)
        self._seen[id(value)] = len(self._seen), value
        return self._new(kind, value)

    def _new(self, kind: type, value: Any) -> Any:  # noqa: PLR0911  a table of cases
        """Return the text of a value that was not met before."""
        if kind is types.FunctionType:
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if kind is property:
            return self.of((value.fget, value.fset, value.fdel))
        if kind in (torch.finfo, torch.iinfo):
            return repr(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind in (list, tuple):
            return kind.__name__, *map(self.of, tuple(value))
        if kind in (set, frozenset):  # which other threads may change
            return kind.__name__, *sorted(map(self._member, tuple(value)))
        if isinstance(value, AbstractSet):  # which `pickle` takes apart in its order
            return self._unknown(value)
        if kind in (dict, types.MappingProxyType):
            return "dict", *((self.of(key), self.of(item)) for key, item in tuple(value.items()))
        if kind is functools._lru_cache_wrapper:
            return kind.__name__, self.of(value.__wrapped__)
        return self._object(value)

    def _member(self, value: Any) -> str:
        """Return the text of a member of a set, whatever members come before it."""
        outside, self._seen = self._seen, {**self._seen}
        try:
            return repr(self.of(value))
        finally:
            self._seen = outside

    def _function(self, function: types.FunctionType) -> Any:
        code, scope = function.__code__, function.__globals__
        cells = [content_of(cell, "cell_contents") for cell in function.__closure__ or ()]
        held = self.of(cells), self.of(function.__defaults__), self.of(function.__kwdefaults__)
        if self._is_installed(str(scope.get("__name__")), code.co_filename):
            return function.__module__, function.__qualname__, *held
        text, reads = _of_code(code)
        around = dict(zip(code.co_freevars, cells))
        names = [
            self._read(around if is_around else scope, name, attributes)
            for name, attributes, is_around in reads
        ]
        return text, *held, self.of(vars(function)), *names

    def _read(self, scope: dict[str, Any], name: str, attributes: Sequence[str]) -> Any:
        """Return the text of a name's value; for a module, of the attribute read from it."""
        if name not in scope:
            return "a builtin"
        value = scope[name]
        for attribute in attributes:
            if not isinstance(value, types.ModuleType) or type(value).__module__ == "torch._ops":
                break
            if attribute not in vars(value):
                return "absent"
            value = vars(value)[attribute]
        return self.of(value)

    def _module(self, value: types.ModuleType) -> Any:
        if self._is_installed(value.__name__, str(getattr(value, "__file__", ""))):
            return value.__name__
        members = tuple(vars(value).items())
        plain = [(name, spelled(member)) for name, member in members if is_plain(member)]
        return value.__name__, *sorted(pair for pair in plain if pair[0][:2] != "__")

    def _class(self, value: type) -> Any:
        module = sys.modules.get(value.__module__)
        if self._is_installed(value.__module__, str(getattr(module, "__file__", ""))):
            return value.__module__, value.__qualname__
        members = []
        for name, member in sorted(dict(vars(value)).items()):
            inner: Any = member
            if isinstance(member, (staticmethod, classmethod)):
                inner = member.__func__
            elif isinstance(member, functools.cached_property):
                inner = member.func
            if type(inner) is types.FunctionType or not name.startswith(("__", "_abc_")):
                members.append((name, self.of(inner)))
        return value.__qualname__, self.of(value.__bases__), *members

    def _tensor(self, value: torch.Tensor) -> Any:
        is_small = value.layout is torch.strided and value.nbytes <= _LARGEST
        if type(value) not in _TENSORS or value.device.type != "cpu" or not is_small:
            return self._unknown(value)
        try:
            array = value.detach().contiguous().view(torch.uint8).numpy()
            digest = hashlib.sha256(array.tobytes()).hexdigest()
            return repr(value.dtype), repr(value.shape), digest
        except RuntimeError:  # Torch is tracing: it knows this tensor as a fake one
            return self._unknown(value)

    def _object(self, value: Any) -> Any:
        reduce = copyreg.dispatch_table.get(type(value))
        try:
            parts = reduce(value) if reduce else value.__reduce_ex__(2)
        except Exception:  # noqa: BLE001  of any class, and most say TypeError
            return self._unknown(value)
        if isinstance(parts, str):
            return type(value).__qualname__, parts
        state, items = parts[:3], [list(part) for part in parts[3:5] if part is not None]
        return type(value).__qualname__, self.of(state), self.of(items)

    def _unknown(self, value: Any) -> str:
        return f"{type(value).__qualname__} {id(value)} of {PROCESS}"

    def _is_installed(self, module: str, file: str) -> bool:
        """Whether a module belongs to another, installed package than the op."""
        if f"{module}.".startswith(f"{self.own}."):
            return False
        top = module.partition(".")[0]
        if top in ("torch", "jitkern") or top in sys.stdlib_module_names:
            return True
        return "site-packages" in file or "dist-packages" in file


@functools.lru_cache(maxsize=1024)
def _of_code(code: types.CodeType) -> tuple[str, list[tuple[str, tuple[str, ...], bool]]]:
    """Return a digest of a code object, and the names that it reads, with attributes.

    The third of each is whether it is a variable of the enclosing function.
    """
    reads = [(read.name, read.attributes, read.cell) for read in code_names(code).reads]
    return spelled_code(code), [*dict.fromkeys(reads)]
