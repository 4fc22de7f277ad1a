"""The launch functions of pointwise ops: allocate as Torch would, choose a kernel, launch it.

A trace follows them. All that one of them knows of its op is plain data in the variables around it,
so it is one and the same in every process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jitkern.composition.arrange import (
    MAX_RANK,
    all_contiguous,
    collapsed,
    dense_steps,
    order_of,
    shape_of,
    steps_of,
)
from jitkern.composition.definition import Definition
from jitkern.composition.eager import answer
from jitkern.composition.expression import CONST, INPUT, inputs_of
from jitkern.composition.formula import Formula

HALVES = (torch.float16, torch.bfloat16)
BLOCK = 128  # threads
BITS = 62  # of `INNER`


def launchers(
    op: str, function: Definition, own: Formula
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return the launch functions for CUDA and for the CPU, and the fake.

    op: the name of the op. own: the formula of the function for CUDA.
    """
    name, fast, positions = own.name, own.fast, function.tensors
    about = (
        name, op, tuple(function.argument_names), function.defaults, function.kinds, positions,
        tuple(tuple(i for i in inputs_of(one) if i in positions) for one in function.outputs),
        templates_of(function, own),
    )  # fmt: skip

    def cuda(k: Any, *args: Any, **named: Any) -> Any:
        numbers, template, every, results, sizes, steps = begun(k, about, args, named, "cuda")
        if fast:
            halves = all([result.dtype in HALVES for result in results])  # noqa: C419  a trace
            template = {**template, "FAST": halves}
        count = total(sizes)
        if count == 0:
            return returned(results)
        flat = len(sizes) == 1 and all(own[0] == 1 for own in steps)
        vector = width(every, steps, sizes, flat)
        template = {**template, "V": vector}
        if flat:
            grid = (count + BLOCK * vector - 1) // (BLOCK * vector)
            k[name + "_flat"][template](*every, *numbers, count, grid=grid, block=BLOCK)
        else:
            index = torch.uint32 if count < 2**31 else torch.int64
            template = {**template, "RANK": len(sizes), "I": index}
            inner, padding = sizes[0] // vector, [1] * (MAX_RANK - len(sizes))
            count = count // vector
            k[name + "_strided"][template](
                *every, *numbers, count, inner, *sizes[1:], *padding, *padded(steps, len(sizes)),
                grid=(count + BLOCK - 1) // BLOCK, block=BLOCK,
            )  # fmt: skip
        return returned(results)

    def cpu(k: Any, *args: Any, **named: Any) -> Any:
        numbers, template, every, results, sizes, steps = begun(k, about, args, named, "cpu")
        count = total(sizes)
        if count == 0:
            return returned(results)
        if len(sizes) == 1 and all(own[0] == 1 for own in steps):
            k[name + "_flat"][template](*every, *numbers, count)
        else:
            template = {**template, "RANK": len(sizes), "INNER": inner_steps(steps)}
            padding = [1] * (MAX_RANK - len(sizes))
            k[name + "_strided"][template](
                *every, *numbers, count, *sizes, *padding, *padded(steps, len(sizes))
            )
        return returned(results)

    def fake(*args: Any, **named: Any) -> Any:
        _, _, names, defaults, kinds, _, outputs, _ = about
        values = with_defaults(names, defaults, args, named)
        tensors = [values[i] for i in positions]
        given, device = given_of(kinds, values), tensors[0].device.type
        dtypes = answer(op, given, torch.finfo().dtype, device)[0]
        walked = arranged(name, outputs, tensors, positions, values, dtypes, fake=True)
        return returned(walked[1])

    return cuda, cpu, fake


def begun(k: Any, about: Any, args: Sequence[Any], named: Any, device: str) -> tuple[Any, ...]:
    """Return the numbers and template arguments of a launch, and its tensors as `arranged`."""
    name, op, names, defaults, kinds, positions, outputs, templates = about
    values = with_defaults(names, defaults, args, named)
    tensors = [values[i] for i in positions]
    numbers = [values[i] for i in range(len(values)) if i not in positions]
    given = given_of(kinds, values)
    dtypes, types, limits, _ = answer(op, given, torch.finfo().dtype, device)
    if types is None or not within(limits, values):
        k.leave_to_reference()  # which refuses what PyTorch refuses
    template = template_of(templates, types, dtypes, tensors)
    tensors, results, sizes, steps = arranged(name, outputs, tensors, positions, values, dtypes)
    return numbers, template, [*results, *tensors], results, sizes, steps


def templates_of(function: Definition, own: Formula) -> tuple[str, ...]:
    """Return the template parameters for the dtypes of the outputs, then of the tensors."""
    return tuple(f"T_{n}" for n in (*own.outputs, *[own.inputs[i] for i in function.tensors]))


def given_of(kinds: Sequence[str], values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the class of arguments, see `eager.answer`."""
    pairs = zip(kinds, values)
    return tuple([(v.dtype, v.dim() != 0) if kind == "tensor" else kind for kind, v in pairs])


def within(limits: Sequence[Any], values: Sequence[Any]) -> bool:
    """Whether numbers are such that PyTorch does not refuse any."""
    for way, least, most, infinite, zero in limits:
        value = number_of(way, values)
        inside = least <= value <= most or (infinite and not abs(value) < math.inf)
        if not inside or (value == 0 and not zero):
            return False
    return True


def number_of(way: Sequence[Any], values: Sequence[Any]) -> Any:
    """Return a number as it is computed: an operation and how its operands are."""
    if way[0] == INPUT:
        return values[way[1]]
    if way[0] == CONST:
        return way[1]
    first = number_of(way[1], values)
    if way[0] == "neg":
        return -first
    second = number_of(way[2], values)
    if way[0] == "add":
        return first + second
    if way[0] == "sub":
        return first - second
    return first * second if way[0] == "mul" else first / second


def template_of(
    templates: Sequence[str], types: Any, dtypes: Sequence[Any], tensors: Sequence[Any]
) -> dict[str, Any]:
    """Return the template arguments for dtypes."""
    own = dict(zip(templates, [*dtypes, *[tensor.dtype for tensor in tensors]]))
    return {**own, **dict(types)}


def with_defaults(
    names: Sequence[str], defaults: Sequence[Any], args: Sequence[Any], named: Any
) -> list[Any]:
    """Return the arguments in order, with the defaults that Torch leaves out."""
    without = len(names) - len(defaults)
    values = [*args]
    for position in range(len(args), len(names)):
        name = names[position]
        values = [*values, named[name] if name in named else defaults[position - without]]
    return values


def returned(results: Sequence[Any]) -> Any:
    """Return the results as an op returns them."""
    return results[0] if len(results) == 1 else tuple(results)


def arranged(
    name: str,
    outputs: Sequence[Any],
    tensors: list[Any],
    positions: Sequence[int],
    values: Sequence[Any],
    dtypes: Sequence[Any],
    *,
    fake: bool = False,
) -> tuple[list[Any], list[Any], list[Any], list[list[Any]]]:
    """Return the tensors, new results, and the sizes and strides that kernels walk over.

    Sizes and strides are listed innermost first; strides for each result, then for each tensor.
    fake: whether the results alone count, so that no question about a size is asked for a walk.
    """
    # As in PyTorch, a tensor without dimensions on the CPU counts as a number.
    placed = [t for t in tensors if t.dim() != 0 or t.device.type != "cpu"]
    device = (placed or tensors)[0].device
    torch._check(
        all([t.device == device for t in placed]),  # noqa: C419  a trace
        lambda: f"{name}: tensors on different devices, {[str(t.device) for t in tensors]}",
    )
    if all_contiguous(tensors):
        shape = tensors[0].shape
        results = [torch.empty(shape, dtype=dtype, device=device) for dtype in dtypes]
        return tensors, results, [total(shape)], [[1]] * (len(results) + len(tensors))
    shape = shape_of(name, tensors)
    steps = [steps_of(tensor, shape) for tensor in tensors]
    order = order_of(shape, steps)
    results = []
    for own, dtype in zip(outputs, dtypes):
        if len(own) == len(positions):
            results = [*results, new(shape, order, dtype, device)]
        else:
            of = [values[i] for i in own]
            inside = shape_of(name, of)
            sorted_dims = order_of(inside, [steps_of(tensor, inside) for tensor in of])
            results = [*results, new(inside, sorted_dims, dtype, device)]
    if any([len(own) != len(positions) for own in outputs]):  # noqa: C419  a trace
        torch._check(
            total(shape) != 0 or all([total(result.shape) == 0 for result in results]),  # noqa: C419
            lambda: (
                f"{name}: outputs of several shapes, and a tensor without elements, for which no "
                "kernel runs: compute the outputs that do not depend on the tensor apart"
            ),
        )
    if fake and len(shape) <= MAX_RANK:
        return tensors, results, [], []
    sizes, walks = collapsed(shape, order, [*[steps_of(r, shape) for r in results], *steps])
    if len(sizes) > MAX_RANK:
        torch._check(
            all([list(result.shape) == list(shape) for result in results]),  # noqa: C419  a trace
            lambda: (
                f"{name}: outputs of several shapes, and tensors that lie apart in more than "
                f"{MAX_RANK} dimensions: make the tensors contiguous first"
            ),
        )
        tensors = [tensor.expand(shape).contiguous() for tensor in tensors]
        results = [torch.empty(shape, dtype=dtype, device=device) for dtype in dtypes]
        return tensors, results, [total(shape)], [[1]] * (len(results) + len(tensors))
    return tensors, results, sizes, walks


def new(shape: Sequence[Any], order: Sequence[int], dtype: Any, device: Any) -> Any:
    """Return new memory without gaps, with this order of dimensions, innermost first."""
    if list(order) == list(range(len(shape) - 1, -1, -1)):
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty_strided(shape, dense_steps(shape, order), dtype=dtype, device=device)


def total(sizes: Sequence[Any]) -> Any:
    """Return the number of elements."""
    count: Any = 1
    for size in sizes:
        count = count * size
    return count


def padded(steps: Sequence[Sequence[Any]], rank: int) -> list[Any]:
    """Return the strides of all tensors one after the other, each filled up with zeros."""
    found: list[Any] = []
    for own in steps:
        found = [*found, *own, *[0] * (MAX_RANK - rank)]
    return found


def width(
    every: Sequence[Any],
    steps: Sequence[Sequence[Any]],
    sizes: Sequence[Any],
    flat: bool,  # noqa: FBT001
) -> int:
    """Return how many elements a thread handles: vectors of 16 bytes if all are aligned, else 1."""
    rows = [(tensor, own) for tensor, own in zip(every, steps) if own[0] != 0]
    bytes_each = [tensor.element_size() for tensor, _ in rows]
    elements: int = max(1, min(16 // min(bytes_each), 32 // max(bytes_each)))
    if not flat and sizes[0] % elements != 0:
        return 1
    for tensor, own in rows:
        if own[0] != 1 or tensor.data_ptr() % min(16, elements * tensor.element_size()) != 0:
            return 1
    for own in steps:
        for step in own[1:]:
            if step % elements != 0:
                return 1
    return elements


def inner_steps(steps: Sequence[Sequence[Any]]) -> int:
    """Return a bit mask of tensors with unit inner stride, or -1 if a stride is not 0 or 1.

    It is -1 too for more tensors than a number has bits for.
    """
    bits = 0
    if len(steps) > BITS:
        return -1
    for bit, own in enumerate(steps):
        if own[0] == 1:
            bits += 2**bit
        elif own[0] != 0:
            return -1
    return bits
