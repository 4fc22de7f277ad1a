"""`compose` for `@triton.jit` functions of values: one kernel that applies one after the other.

Each function takes blocks of values, as `@triton.jit def scale(x, s): return x * s`, and returns
one block or a tuple of blocks. The kernel loads each input once, calls the functions, and stores
the results; values of 16-bit floats are computed in float32, and rounded once.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from jitkern.calls.signature import Signature
from jitkern.composition import registration
from jitkern.composition.arrange import all_contiguous, shape_of
from jitkern.composition.definition import SAMPLED, numbered
from jitkern.composition.eager import common
from jitkern.declare import registered
from jitkern.errors import DeclarationError
from jitkern.named_tuple import NamedTuple
from jitkern.op.declaration import Declaration
from jitkern.op.op import Op
from jitkern.source import texts, triton_decorators, triton_function
from jitkern.source.kinds import Triton

BLOCK = 1024  # values a program: with 4 warps a thread has one 16-byte vector of 16-bit floats


def composed(functions: Sequence[Any], place: tuple[str, str, int]) -> Op:
    """Return an op that calls `@triton.jit` functions one after the other, in one kernel.

    Its arguments are the parameters of the first function, then those of the others beside the
    values that they are given: tensors, but numbers where a parameter is annotated `float` or
    `int`. Tensors broadcast; results have the dtype that Torch promotes the tensors to. The op has
    no reference and no gradient: add them by its decorators. Raises DeclarationError.
    """
    own = chain(functions)
    module, file, line = place
    name = registration.qualified(module, own.name, own.text)
    schema = ", ".join(f"{kind} {parameter}" for parameter, kind in own.inputs)
    returns = "Tensor" if own.results == 1 else f"({', '.join(['Tensor'] * own.results)})"
    source = Triton(f"{own.name}.py", text=own.text, written_at=own.written_at)
    launch = launcher(own.name, tuple(kind == "Tensor" for _, kind in own.inputs), own.results)
    declaration = Declaration(
        {"cuda": (source.placed(str(Path(file).absolute().parent), (file, line)),), "cpu": ()},
        module=module, place=f"{file}:{line}: ", launchers={"cuda": launch},
        samples=samples_of([kind for _, kind in own.inputs]),
    )  # fmt: skip
    signature = Signature(f"{name}({schema}) -> {returns}")
    return registration.once(name, lambda: registered(signature, declaration))


def launcher(name: str, tensors: tuple[bool, ...], results: int) -> Callable[..., Any]:
    """Return the launch function. tensors: whether each argument is a tensor."""

    def launch(k: Any, *args: Any) -> Any:
        given = [arg for arg, is_tensor in zip(args, tensors) if is_tensor]
        dtype = common(tuple([(t.dtype, t.dim() != 0) for t in given]))
        shape = given[0].shape
        if not all_contiguous(given):
            shape = shape_of(name, given)
            args = tuple([a.expand(shape).contiguous() if t else a for a, t in zip(args, tensors)])
        outs = [torch.empty(shape, dtype=dtype, device=given[0].device) for _ in range(results)]
        count = outs[0].numel()
        if count > 0:
            grid = (count + BLOCK - 1) // BLOCK
            k[name + "_kernel"][{"BLOCK": BLOCK}](*outs, *args, count, grid=grid, num_warps=4)
        return outs[0] if results == 1 else tuple(outs)

    return launch


def samples_of(kinds: Sequence[str]) -> Callable[[str], Iterator[tuple[Any, ...]]]:
    """Return samples of each dtype, for arguments of these kinds."""

    def samples(device: str) -> Iterator[tuple[Any, ...]]:
        for dtype in SAMPLED:
            for size in (4096, 4097):
                values = {
                    "Tensor": torch.ones(size, dtype=dtype, device=device),
                    "float": 0.5,
                    "int": 1,
                }
                yield tuple(values[kind] for kind in kinds)

    return samples


class Stage(NamedTuple):
    """A function of a chain. parameters: (name, "Tensor", "float" or "int")."""

    function: Any  # as Python has it, below `@triton.jit`
    parameters: tuple[tuple[str, str], ...]
    results: int


class Chain(NamedTuple):
    """A kernel that applies functions one after the other.

    inputs: (name, kind) of the parameters of the op, in order. results: how many the last gives.
    """

    name: str
    text: str
    written_at: list[texts.Span]
    inputs: tuple[tuple[str, str], ...]
    results: int


def chain(functions: Sequence[Any]) -> Chain:
    """Return the kernel of some `@triton.jit` functions. Raises DeclarationError.

    The results of a function are the first arguments of the next; its further parameters become
    further inputs of the kernel.
    """
    stages = [_stage(function) for function in functions]
    name = "_".join(stage.function.__name__ for stage in stages)
    inputs: dict[str, str] = {}
    taken = {"BLOCK", "count", *(stage.function.__name__ for stage in stages)}
    taken |= {f"out{i}" for i in range(stages[-1].results)}
    given: tuple[str, ...] = ()
    lines = []
    for number, stage in enumerate(stages):
        if number and len(stage.parameters) < len(given):
            raise DeclarationError(
                f"`{stage.function.__name__}` takes {len(stage.parameters)} values, and the "
                f"function before it returns {len(given)}: give it a parameter for each"
            )
        arguments = list(given)
        for parameter, kind in stage.parameters[len(given) :]:
            unique = numbered(parameter, taken)
            inputs[unique] = kind
            arguments.append(f"jitkern_{unique}" if kind == "Tensor" else unique)
        given = tuple(f"jitkern_value{number}_{result}" for result in range(stage.results))
        lines.append(f"{', '.join(given)} = {stage.function.__name__}({', '.join(arguments)})")
    written, spans = triton_function.text_of([stage.function for stage in stages])
    tensors = [tensor for tensor, kind in inputs.items() if kind == "Tensor"]
    if not tensors:
        raise DeclarationError(f"`{name}` takes no tensor: give its first function a parameter")
    return Chain(
        name, written + _kernel(f"{name}_kernel", inputs, tensors, lines, given), spans,
        tuple(inputs.items()), len(given),
    )  # fmt: skip


def _kernel(
    name: str, inputs: dict[str, str], tensors: list[str], lines: list[str], given: Sequence[str]
) -> str:
    outs = [f"out{i}" for i in range(len(given))]
    parameters = ", ".join([*outs, *inputs, "count", "BLOCK: jitkern_tl.constexpr"])
    loads = [
        f"jitkern_{t} = jitkern_widened(jitkern_tl.load({t} + jitkern_at, jitkern_inside))"
        for t in tensors
    ]
    stores = [
        f"jitkern_tl.store({o} + jitkern_at, {v}, jitkern_inside)" for o, v in zip(outs, given)
    ]
    body = "\n    ".join([*loads, *lines, *stores])
    return f"""
import triton as jitkern_triton
import triton.language as jitkern_tl


@jitkern_triton.jit
def jitkern_widened(value):
    if value.dtype.is_fp16() or value.dtype.is_bf16():
        return value.to(jitkern_tl.float32)
    else:
        return value


@jitkern_triton.jit
def {name}({parameters}):
    jitkern_first = jitkern_tl.program_id(0).to(jitkern_tl.int64) * BLOCK
    jitkern_at = jitkern_first + jitkern_tl.arange(0, BLOCK)
    jitkern_inside = jitkern_at < count
    {body}
"""


def _stage(function: Any) -> Stage:
    plain = triton_decorators.inner(function)
    if plain is function or not isinstance(plain, types.FunctionType):
        raise DeclarationError(f"{function!r} is not a `@triton.jit` function")
    parameters = []
    for parameter in inspect.signature(plain).parameters.values():
        annotation = getattr(parameter.annotation, "__name__", str(parameter.annotation))
        if "constexpr" in annotation:
            if parameter.default is parameter.empty:
                raise DeclarationError(
                    f"`{plain.__name__}`: the constexpr `{parameter.name}` has no default, and a "
                    "composition passes values only: give it a default"
                )
            continue
        kind = annotation if annotation in ("float", "int") else "Tensor"
        parameters.append((parameter.name, kind))
    return Stage(plain, tuple(parameters), _results(plain))


def _results(function: types.FunctionType) -> int:
    """Return how many values a function returns. Raises DeclarationError."""
    (node,) = ast.parse(triton_function.written(function)).body
    returned = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
    counts = {len(v.elts) if isinstance(v, ast.Tuple) else 1 if v else 0 for v in returned}
    if len(counts) != 1 or counts == {0}:
        raise DeclarationError(
            f"`{function.__name__}` must return one block of values, or a tuple of them, of one "
            "length in each `return`"
        )
    return counts.pop()
