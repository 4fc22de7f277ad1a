"""The digest of the declarations and sources of ops, for the keys of Torch's compile caches."""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from jitkern import __version__
from jitkern.cache.key import canonical
from jitkern.errors import DeclarationError
from jitkern.source.closure import closure_of
from jitkern.source.kinds import Source, Triton

# The files of jitkern that Torch traces: how a gradient is recorded, and how a reference runs.
_OWN = ("autograd.py", "gradient.py", "nodes.py", "op.py")
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_PROCESS = uuid.uuid4().hex  # for objects that mean something in this process alone


def digest(ops: Mapping[str, Any]) -> str:
    """Return a digest of these ops, by their names, as they are now."""
    return _digest_of(tuple(_parts(op) for _, op in sorted(ops.items())))


def _parts(op: Any) -> tuple[Any, ...]:
    """Return the parts of an op: declaration, sources, and the functions that Torch may trace."""
    declared = op.declaration
    functions = [declared.reference, declared.fake, *declared.launchers.values()]
    functions += [op.gradient.function] if op.gradient else []
    plain = [function for function in functions if hasattr(function, "__code__")]
    files = {function.__code__.co_filename for function in plain}
    in_files = tuple(sorted(file for file in files if Path(file).is_file()))
    others = [f for f in plain if f.__code__.co_filename not in in_files]  # of cells, or of `exec`
    sources = tuple(source for listed in declared.sources.values() for source in listed)
    codes = tuple(function.__code__ for function in plain)
    described = repr([_described(function, set()) for function in others])
    by_op = op.gradient.op.name if op.gradient and op.gradient.op else ""
    traced = (declared.fusible, by_op, *declared.nondifferentiable)
    return op.schema, traced, declared.module, sources, in_files, codes, described


@functools.lru_cache(maxsize=4)
def _digest_of(ops: tuple[tuple[Any, ...], ...]) -> str:
    sha256 = hashlib.sha256(canonical([__version__, *map(_own, _OWN)]))
    for schema, traced, module, sources, in_files, codes, described in ops:
        sha256.update(canonical([schema, traced, *(_files(source) for source in sources)]))
        package = module.rpartition(".")[0]
        for path in in_files:
            folder, name = str(Path(path).parent), Path(path).name
            written = Triton(name, folder=folder, package=package)  # Python, read as text
            sha256.update(canonical(_files(written)))
        sha256.update(repr([_code(code) for code in codes]).encode())
        sha256.update(described.encode())
    return sha256.hexdigest()[:16]


def forget() -> None:
    """Read all files again, because an op was declared again."""
    _digest_of.cache_clear()


def _described(function: Any, seen: set[int]) -> Any:
    """Return what a function does, as far as this can be told: its code, and the values it reads.

    The text of its file tells the rest. A function of a cell has no file.
    """
    code = getattr(function, "__code__", None)
    if code is None or id(code) in seen:
        return getattr(function, "__qualname__", type(function).__name__)
    seen.add(id(code))
    values = inspect.getclosurevars(function)
    named = {**values.globals, **values.nonlocals}
    defaults = (function.__defaults__, function.__kwdefaults__)
    return (
        _code(code), *((name, _value(value, seen)) for name, value in sorted(named.items())),
        *(_value(value, seen) for value in defaults),
    )  # fmt: skip


def _code(code: types.CodeType) -> tuple[Any, ...]:
    consts = (_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts)
    return code.co_code.hex(), code.co_names, code.co_varnames, *consts


def _value(value: Any, seen: set[int]) -> Any:
    """Return a value as text that no other value has; an object is another one in each process."""
    if isinstance(value, types.FunctionType):
        return _described(value, seen)
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, (tuple, list)):
        return tuple(_value(item, seen) for item in value)
    if isinstance(value, dict):
        return tuple((repr(key), _value(item, seen)) for key, item in value.items())
    if type(value) in _PLAIN:
        return repr(value)
    return f"{type(value).__qualname__} {id(value)} of {_PROCESS}"


def _files(source: Source) -> dict[str, str]:
    try:
        return closure_of(source).files
    except DeclarationError:  # a file that is gone: the op says so when it is called
        return {}


def _own(name: str) -> str:
    return hashlib.sha256(Path(__file__).with_name(name).read_bytes()).hexdigest()
