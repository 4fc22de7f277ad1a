"""Ops of pointwise functions: their names, their declarations, and how others find them."""

from __future__ import annotations

import hashlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from jitkern._fork import after_fork
from jitkern.calls.signature import Signature
from jitkern.composition import launch
from jitkern.composition.backward import Backward
from jitkern.composition.definition import Definition, in_ascii
from jitkern.composition.eager import FORMULAS, answer
from jitkern.composition.formula import CPP, CUDA, Formula, formula_of
from jitkern.composition.kernel_texts import cpp_text, cuda_text
from jitkern.composition.reference import reference_of
from jitkern.declare import MAX_NAME, registered
from jitkern.op.all_ops import ANNOUNCED
from jitkern.op.declaration import Declaration
from jitkern.op.op import OPS, Op
from jitkern.source.kinds import Cpp, Cuda, Source

_VECTORIZED = ("-fno-math-errno", "-fno-trapping-math")
_alive: weakref.WeakSet[Any] = weakref.WeakSet()  # pointwise functions
_declaring = threading.RLock()
after_fork(_declaring)


def announce(function: Any) -> None:
    """Let `prewarm`, `list` and `check` find a pointwise function that a module gives a name."""
    _alive.add(function)
    ANNOUNCED.setdefault(__name__, declare_named)


def declare_named() -> None:
    """Declare the ops of all functions that are bound to a name in a loaded module."""
    for function in [*_alive]:
        module = sys.modules.get(function.module)
        if any(value is function for value in vars(module).values()) if module else False:
            assert function.op
            for gradient in function.gradient.functions():
                assert gradient.op


def namespace_of(module: str) -> str:
    """Return the namespace of a module's ops: its top-level package, `main` of a script."""
    package = module.partition(".")[0].strip("_")
    return package if package.isascii() and package.isidentifier() else "pointwise"


def qualified(module: str, name: str, identity: Any) -> str:
    """Return the qualified name of an op that a module declares, with a digest of its identity."""
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:8]
    namespace = namespace_of(module)
    name = in_ascii(name)
    return f"{namespace}::{name[: MAX_NAME - len(namespace) - 11]}_{digest}"


def name_of(function: Definition) -> str:
    """Return the name of the op of a function."""
    return qualified(function.module, function.name, function.identity)


def op_of(function: Definition, gradient: Backward[Any], cost: Callable[..., Any]) -> Op:
    """Return the op of a function, declared now if it was not before."""
    name = name_of(function)
    return once(name, lambda: _declare(name, function, gradient, cost))


def once(name: str, declare: Callable[[], Op]) -> Op:
    """Return the op of this name; `declare` declares it if no thread has."""
    with _declaring:
        return OPS.get(name) or declare()


def _declare(
    name: str, function: Definition, gradient: Backward[Any], cost: Callable[..., Any]
) -> Op:
    own = known_formula(function)
    cuda, cpu, fake = launch.launchers(name, function, own)
    sources: dict[str, Source] = {
        "cuda": Cuda(text=text_of(function, "cuda"), strided=True),
        "cpu": Cpp(
            text=text_of(function, "cpu"), native=True, openmp=True, strided=True,
            flags=_VECTORIZED,
        ),
    }  # fmt: skip
    folder = str(Path(function.place[0]).absolute().parent)
    declaration = Declaration(
        {device: (source.placed(folder, function.place),) for device, source in sources.items()},
        fusible=True, nondifferentiable=gradient.nondifferentiable,
        module=function.module, place=f"{function.place[0]}:{function.place[1]}: ",
        launchers={"cuda": cuda, "cpu": cpu}, fake=fake,
        reference=reference_of(name, function.outputs, function.kinds),
        samples=function.samples or default_samples(function), cost=cost,
    )  # fmt: skip
    op = registered(Signature(f"{name}{schema_of(function)}"), declaration)
    if gradient.expressions():
        op.backward(gradient.of_op)
    return op


def schema_of(function: Definition) -> str:
    """Return the schema of the op of a function, without its name."""
    kinds = {"tensor": "Tensor"}
    parameters = []
    for i, (parameter, name) in enumerate(zip(function.parameters, function.argument_names)):
        default = f"={parameter.default!r}" if i >= function.least else ""
        parameters.append(f"{kinds.get(parameter.kind, parameter.kind)} {name}{default}")
    named = [f"Tensor {name}" if name else "Tensor" for name in function.results]
    returns = named[0] if len(named) == 1 and not function.results[0] else f"({', '.join(named)})"
    return f"({', '.join(parameters)}) -> {returns}"


def formula(function: Definition, device: str) -> Formula:
    """Return the function in C++ of the expressions, for the language of a device.

    Numbers make the names unlike each other, and unlike keywords and macros of any compiler.
    """
    inputs = [f"in{i}_{in_ascii(p.name)}" for i, p in enumerate(function.parameters)]
    outputs = [f"out{i}_{name}" if name else f"out{i}" for i, name in enumerate(function.results)]
    language = CUDA if device == "cuda" else CPP
    return formula_of(in_ascii(function.name), function.outputs, inputs, outputs, language)


def text_of(function: Definition, device: str) -> str:
    """Return the text of the kernels for a device."""
    own = formula(function, device)
    numbers = [
        (name, parameter.kind)
        for name, parameter in zip(own.inputs, function.parameters)
        if parameter.kind != "tensor"
    ]
    return (cuda_text if device == "cuda" else cpp_text)(own, numbers)


def default_samples(function: Definition) -> Any:
    """Return samples of each dtype, for vectors and for tensors that no vector fits."""

    def values(dtype: torch.dtype, skipped: int, device: str) -> Iterator[Any]:
        for parameter in function.parameters:
            if parameter.kind == "tensor":
                yield torch.ones(4096 + skipped, dtype=dtype, device=device)[skipped:]
            else:
                default = {"float": 0.5, "int": 1, "bool": False}[parameter.kind]
                yield default if parameter.default is None else parameter.default

    def fits(dtype: torch.dtype) -> bool:
        try:
            asked(function, [*values(dtype, 0, "meta")], "cpu")
        except RuntimeError:
            return False
        return True

    def samples(device: str) -> Iterator[tuple[Any, ...]]:
        for dtype in [*filter(fits, function.dtypes)] or [torch.int64]:
            for skipped in (0, 1):
                yield tuple(values(dtype, skipped, device))

    return samples


def asked(function: Definition, values: Sequence[Any], device: str) -> tuple[Any, ...]:
    """Return what PyTorch answers about a call, see `eager.answer`. Raises RuntimeError."""
    known_formula(function)
    given = launch.given_of(function.kinds, values)
    found: tuple[Any, ...] = answer(name_of(function), given, torch.finfo().dtype, device)
    return found


def known_formula(function: Definition) -> Formula:
    """Return the formula of a function for CUDA, which `answer` finds by the name of the op."""
    return FORMULAS.setdefault(name_of(function), (function, formula(function, "cuda")))[1]


def template_of(function: Definition, dtypes: Sequence[torch.dtype]) -> dict[str, torch.dtype]:
    """Return the template arguments for dtypes of a call with tensors of these dtypes."""
    given = iter(dtypes)
    values = [
        torch.empty(1, dtype=next(given), device="meta") if p.kind == "tensor" else 0
        for p in function.parameters
    ]
    results, types, *_ = asked(function, values, "meta")
    templates = launch.templates_of(function, known_formula(function))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return launch.template_of(templates, types or (), results, tensors)
