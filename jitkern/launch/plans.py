"""What a warm process serves a call with, without tracing: which stub, over which kernels.

A plan is a small entry, keyed by all that a trace depends on: the launch function with the
functions and constants it uses, the kernel's sources, the target, and the situation, which is what
a trace takes for granted of the arguments (dtypes, ranks, which are None). It names the entries of
the stub and of its kernels, which are a part of its key too. A situation has as many plans as its
launch function took branches: entries of one label; where a configuration had to be chosen, they
are for the device model that chose it. A launch function that could read anything else (a device's
properties, the environment, an object of its module) has none, and is traced by each process.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import hashlib
import json
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from jitkern import __version__, events, jit
from jitkern.cache import Entry
from jitkern.closure import Closure, closure_of
from jitkern.compilers import compiler_for
from jitkern.errors import CacheError, DeclarationError
from jitkern.kernel import DTYPES, Source, Variant
from jitkern.key import Key, canonical, digest_of, make_key
from jitkern.launch.tune import Tuned, model_of, parts_of
from jitkern.manifest import Manifest
from jitkern.target import Target

ARTIFACT = "plan.json"
_UNKNOWN = object()
_TORCH = frozenset((  # of torch, besides its dtypes: what gives the same answer in every process
    "_check", "contiguous_format", "device", "empty", "empty_like", "empty_strided", "finfo",
    "iinfo", "preserve_format", "strided", "Size", "Tensor", "zeros", "zeros_like",
))  # fmt: skip
_BUILTINS = frozenset((
    "AssertionError", "IndexError", "NotImplementedError", "RuntimeError", "TypeError",
    "ValueError", "ZeroDivisionError", "abs", "all", "any", "bool", "dict", "divmod", "enumerate",
    "float", "format", "frozenset", "int", "isinstance", "len", "list", "map", "max", "min", "pow",
    "range", "repr", "reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple", "type",
    "zip",
))  # fmt: skip
_SHORT = {
    getattr(torch, dtype.torch): code
    for code, dtype in DTYPES.items()
    if hasattr(torch, dtype.torch)
}


class Plan(NamedTuple):
    """Entries of the cache, as `target`, `label` and digest."""

    stub: tuple[str, str, str]
    kernels: tuple[tuple[str, str, str], ...]


def identity_of(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """What a trace of this function depends on besides the arguments; None where more may."""
    known: list[str] = []
    for part in parts_of(function):
        own = _identity_of(part)
        if own is None:
            return None
        known += own
    return tuple(known)


def _identity_of(function: Callable[..., Any]) -> list[str] | None:
    if not isinstance(function, types.FunctionType) or not Path(_file(function)).is_file():
        return None
    known: dict[str, str] = {"file": hashlib.sha256(Path(_file(function)).read_bytes()).hexdigest()}
    queue, seen = [function], set()
    while queue:
        one = queue.pop()
        if one in seen:
            continue
        seen.add(one)
        if one.__module__.startswith("jitkern.launch."):
            continue  # cdiv and the like
        defaults = (*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values())
        if one.__closure__ or _file(one) != _file(function) or not all(map(_plain, defaults)):
            return None
        own = f"{_place(one.__code__)}()"
        known[own] = repr(defaults)
        for name in _globals_of(one.__code__):
            value = one.__globals__.get(name, getattr(builtins, name, _UNKNOWN))
            if isinstance(value, types.FunctionType):
                queue.append(value)
                known[f"{own} {name}"] = _place(value.__code__)
            elif _plain(value):
                known[name] = repr(value)
            elif name not in ("torch", "math") and name not in _BUILTINS:
                return None
    return [f"{name}={value}" for name, value in sorted(known.items())]


def _file(function: types.FunctionType) -> str:
    return function.__code__.co_filename


def _place(code: types.CodeType) -> str:
    """Which function of its file this is, the same for every Python but for a lambda."""
    several = code.co_name == "<lambda>"  # a line may hold more than one
    plain = [c for c in code.co_consts if not isinstance(c, types.CodeType)]
    found = hashlib.sha256(code.co_code + repr((code.co_names, plain)).encode())
    return f"{code.co_name}:{code.co_firstlineno}" + (f":{found.hexdigest()}" if several else "")


def _globals_of(code: types.CodeType) -> Iterator[str]:
    """The global names that a function's code reads; one with a space stands for what is amiss."""
    before = ""
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield value
        elif name.startswith(("IMPORT_", "STORE_GLOBAL", "DELETE_GLOBAL")):
            yield " does more than compute"
        elif name.startswith("LOAD_") and value == "index":
            yield " the index of a device"
        elif before == "torch" and not _constant_of_torch(value):
            yield f" torch.{value}"
        before = value if name in ("LOAD_GLOBAL", "LOAD_NAME") else ""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)


def _constant_of_torch(name: object) -> bool:
    return isinstance(name, str) and (
        name in _TORCH or isinstance(getattr(torch, name, None), torch.dtype)
    )


def _plain(value: object) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


@functools.cache
def _tracer() -> str:
    """jitkern's own part in a trace."""
    found = hashlib.sha256(__version__.encode())
    for path in sorted(Path(__file__).parent.iterdir()):
        if path.suffix in (".py", ".h"):
            found.update(path.read_bytes())
    return found.hexdigest()


def situation_of(args: Sequence[Any]) -> tuple[str, ...]:
    """What a trace takes for granted of the arguments."""
    return tuple(
        f"{_SHORT.get(arg.dtype, arg.dtype)}[{arg.dim()}]"
        if isinstance(arg, torch.Tensor)
        else str(arg)
        if arg is None or isinstance(arg, bool)
        else type(arg).__name__
        for arg in args
    )


class Plans:
    """Those of one launch function, over one source, for one target."""

    def __init__(
        self, op: str, schema: str, function: Callable[..., Any], source: Source, target: Target
    ) -> None:
        self.op = op
        self.source = source
        self.target = target.for_host_code()
        self._tunable = isinstance(function, Tuned) or source.kind == "triton"
        self._closure: Closure | None = None
        identity = identity_of(function)
        if identity is None:
            return
        exact = jit.exact_target(Variant(op, source), target)  # a native kernel's instruction set
        flags = compiler_for(source).flags(source, exact)
        self._flags = (schema, str(exact), *flags, *identity, _tracer())
        with contextlib.suppress(DeclarationError):  # a call will say so
            self._closure = closure_of(source)

    def find(
        self, situation: tuple[str, ...], device: torch.device | None = None
    ) -> Iterator[tuple[Entry, Plan]]:
        """Every plan for a situation; with a device, those of its model too."""
        models = [""] if device is None or not self._tunable else ["", model_of(device)]
        for key in filter(None, (self._key(situation, model) for model in models)):
            for entry in jit.open_cache().labelled(key.target, key.label):
                if _without_plan(entry.manifest.inputs) == key.inputs:
                    events.use(entry)
                    yield entry, _read(entry)

    def publish(
        self, situation: tuple[str, ...], plan: Plan, model: str = ""
    ) -> tuple[Entry, bool] | None:
        """Keep a plan for the next process; returns its entry, and whether it is new.

        model: the device model that it is for, "" for any. None for a function that has no plans,
        and where the cache cannot be written.
        """
        of_situation = self._key(situation, model)
        if of_situation is None:
            return None
        inputs = {**of_situation.inputs, "plan": plan}
        key = Key(inputs, digest_of(inputs), of_situation.label)
        cache = jit.open_cache()
        if known := cache.find(key):
            events.use(known)
            return known, False
        provenance = {"name": "jitkern", "version": __version__}
        try:
            with cache.staging() as staging:
                (staging / ARTIFACT).write_bytes(canonical(plan))
                manifest = Manifest(key.inputs, compiler=provenance)
                entry = cache.publish(key, staging, manifest)
            jit.keep_to_limits(cache, entry)
        except CacheError:
            return None
        events.use(entry)
        return entry, True

    def _key(self, situation: tuple[str, ...], model: str) -> Key | None:
        """Of the plans of a situation, without what they are; None where there can be none."""
        if self._closure is None:
            return None
        flags = (*self._flags, str(torch.get_default_dtype()), *filter(None, [model]))
        variant = Variant(
            self.op, self.source, "plan", tuple((str(i), s) for i, s in enumerate(situation))
        )
        key = make_key(variant, self.target, flags, self._closure)
        return key._replace(label=f"{key.label}.{key.digest[:8]}")


def _without_plan(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != "plan"}


def _read(entry: Entry) -> Plan:
    stub, kernels = json.loads(entry.read(ARTIFACT))
    return Plan(tuple(stub), tuple(map(tuple, kernels)))


def reference_to(key: Key) -> tuple[str, str, str]:
    """What a plan names an entry by."""
    return key.target, key.label, key.digest


def entry_of(reference: tuple[str, str, str]) -> Entry | None:
    """The entry that a plan names, or None where it is gone."""
    target, label, digest = reference
    return jit.open_cache().find(Key({"target": target}, digest, label))
