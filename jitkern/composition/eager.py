"""Dtypes and refusals of formulas: what eager PyTorch says for tensors of one element."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from jitkern.composition.definition import Definition
from jitkern.composition.expression import (
    CALL,
    CONST,
    INPUT,
    TO,
    Node,
    eager_operands,
    ordered,
    spelled,
)
from jitkern.composition.formula import Formula
from jitkern.composition.symbol import FOLDED
from jitkern.composition.table import TABLE
from jitkern.source.dtypes import DTYPES
from jitkern.trace.values import Pure

FORMULAS: dict[str, tuple[Definition, Formula]] = {}  # by the names of their ops
_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    **FOLDED, "div": operator.truediv, "inverse": lambda x: x**-1,
    "inverse_square": lambda x: x**-2,
}  # fmt: skip
_REFLECTED = {
    **_OF_NUMBERS, "remainder": operator.mod, "pow": operator.pow, "lt": operator.lt,
    "floor_divide": operator.floordiv, "le": operator.le, "gt": operator.gt, "ne": operator.ne,
    "bitwise_or": operator.or_, "bitwise_xor": operator.xor,
}  # fmt: skip
_INVERTING = ("div", "inverse", "inverse_square")
_DIVISIONS = ("floor_divide", "remainder", "fmod")
_CLAMPS = ("clamp", "clamp_min", "clamp_max")
_LIMITED = (*_DIVISIONS, *_CLAMPS, "pow", "where", "add_scaled", "addcmul")
_KINDS: dict[str, type] = {"bool": bool, "int": int, "float": float}
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float32}  # of numbers alone, in kernels
_TRIED = (1, -(10**9), 10**9)  # in place of numbers, which a function may refuse together


def applied(one: Node, operands: Sequence[Any], wide: torch.dtype | None = None) -> Any:
    """Return the result of a node of a formula, by Torch; for numbers only, mostly a number.

    wide: the dtype of floating-point numbers that become tensors, by default Torch's.
    """
    first, tensors = operands[0], [o for o in operands if isinstance(o, torch.Tensor)]
    python = _REFLECTED if tensors else _OF_NUMBERS
    if not isinstance(first, torch.Tensor):
        if one.op in python and (tensors or one.op not in _INVERTING or operands[-1] != 0):
            return python[one.op](*operands)
        floating = isinstance(first, (float, torch.SymFloat))  # few functions take a number there
        device = tensors[0].device if tensors else None
        first = torch.as_tensor(first, device=device, dtype=wide if floating else None)
    if one.op == TO:
        return first.to(getattr(torch, DTYPES[one.value].torch))
    if one.op != CALL:
        return TABLE[one.op].function(first, *operands[1:])
    name, words = one.value
    function = getattr(torch, name, None) or getattr(torch.nn.functional, name)
    given = iter(operands[1:])
    named = {k: ast.literal_eval(text) if text else next(given) for k, text in words[1:]}
    try:
        return function(operands[0], **named)
    except TypeError:
        if first is operands[0]:
            raise
        return function(first, **named)


@Pure
def answer(name: str, given: tuple[Any, ...], _: torch.dtype, device: str) -> tuple[Any, ...]:
    """Return what PyTorch says of a class of calls. Raises RuntimeError for what it refuses.

    name: of the op. given: for each argument the dtype and whether it has dimensions, the kind of a
    number, or a list of the number. _: the default dtype. device: the type of the tensors' device,
    which is asked, where this machine has it, for what the CPU has no kernel for.

    The result is the dtypes of the outputs; template arguments as pairs, or None where no kernel
    computes what PyTorch does; the limits of numbers, see `_limits_of`; whether only a kernel knows
    a divisor of integers; and the dtype that floating-point numbers are computed in.
    """
    with ThreadPoolExecutor(1) as thread:  # without modes, autocast and transforms
        return thread.submit(_answered, name, given, device).result()


@Pure
def common(given: tuple[Any, ...]) -> torch.dtype:
    """Return the dtype that tensors are promoted to, of their dtypes and whether they have dims."""
    return _common([_one(one) for one in given])


def _common(values: Sequence[Any]) -> torch.dtype:
    whole = torch.as_tensor(values[0]) if len(values) == 1 else values[0]
    for value in values[1:]:
        dims = any(isinstance(v, torch.Tensor) and v.dim() for v in (whole, value))
        whole = _one((torch.result_type(whole, value), dims))
    dtype: torch.dtype = whole.dtype
    return dtype


def _one(given: Any, number: int = 1) -> Any:
    """Return a tensor of one element, or a number."""
    if isinstance(given, str):
        return _KINDS[given](number)
    first, second = given
    return torch.ones((1,) * second, dtype=first) if isinstance(first, torch.dtype) else second


def _answered(name: str, given: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    errors = []
    for number in _TRIED:
        try:
            return _answer(name, given, number, device)
        except RuntimeError as e:
            errors.append(e)
    raise errors[0]


def _answer(name: str, given: tuple[Any, ...], number: int, device: str) -> tuple[Any, ...]:
    function, own = FORMULAS[name]
    values: dict[Node, Any] = {}  # None where the step of a kernel is nothing to PyTorch
    formula = {*ordered(function.outputs, eager_operands)}
    for one in ordered(function.outputs):
        if one.op == INPUT:
            values[one] = _one(given[one.value[0]], number)
        elif one.op == CONST:
            values[one] = one.value
        else:
            try:
                values[one] = _asked(one, [values[arg] for arg in eager_operands(one)], device)
            except Exception as e:
                if one in formula:
                    raise RuntimeError(_refusal(function, one, values, e)) from e
                values[one] = None
    dtypes = {one: _dtype_of(value) for one, value in values.items()}
    whole = not any(dtype is not None and dtype.is_complex for dtype in dtypes.values())
    limits, whole, unknown = _limits_of(values, dtypes) if whole else ((), False, False)
    whole = whole and None not in values.values()
    types = {name: _common([values[one] for one in of]) for name, of in own.types if whole}
    inputs = [v for o, v in values.items() if o.op == INPUT and _dtype_of(v, number=False)]
    found = {_dtype_of(v, number=False) for o, v in values.items() if o.op != INPUT}
    found |= {*types.values(), *([_common(inputs)] if inputs else [])}
    wide = torch.float64 if torch.float64 in found else torch.float32
    whole = whole and all(dtypes[one].is_floating_point for one in own.floats)
    pairs = tuple((n, wide if dtype.is_floating_point else dtype) for n, dtype in types.items())
    outputs = zip(function.outputs, function.likes)
    results = tuple(given[like][0] if like >= 0 else dtypes[one] for one, like in outputs)
    return results, (("A", wide), *pairs) if whole else None, limits, unknown, wide


def _dtype_of(value: Any, *, number: bool = True) -> Any:
    """Return the dtype of a tensor, or of a number in kernels; None for what has none."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    return _DTYPES.get(type(value)) if number else None


def _asked(one: Node, operands: list[Any], device: str) -> Any:
    """Return ones of what eager PyTorch gives."""
    if one.op in _DIVISIONS and not isinstance(operands[1], torch.Tensor) and not operands[1]:
        operands[1] = type(operands[1])(1)  # only some devices refuse zero, where elements are
    try:
        result = applied(one, operands)
    except NotImplementedError:  # the CPU has no such kernel, but a GPU may: abs of bools
        if device == "cpu" or (device == "cuda" and not torch.cuda.is_available()):
            raise
        there = [o.to(device) if isinstance(o, torch.Tensor) else o for o in operands]
        result = applied(one, there)
    if not isinstance(result, torch.Tensor):
        return type(result)(1)
    if one.op == TO or any(isinstance(operand, torch.Tensor) for operand in operands):
        return torch.ones_like(result, device="cpu")
    return type(result.item())(1)


def _refusal(function: Definition, one: Node, values: dict[Node, Any], e: Exception) -> str:
    """Return the line, the operation with the names and dtypes of its operands, and the reason."""
    names = [parameter.name for parameter in function.parameters]
    texts = []
    for arg in eager_operands(one):
        kind = type(values[arg]).__name__
        if isinstance(values[arg], torch.Tensor):
            kind = str(values[arg].dtype).removeprefix("torch.")
            kind += "" if values[arg].dim() else " without dimensions"
        texts.append(spelled(arg, names) if arg.op == CONST else f"{spelled(arg, names)}: {kind}")
    what = one.value[0] if one.op == CALL else one.op
    place = f"{function.place[0]}:{function.place[1]}: {function.name}"
    return f"{place}: PyTorch refuses {what}({', '.join(texts)}): {e}"


def _limits_of(
    values: dict[Node, Any], dtypes: dict[Node, Any]
) -> tuple[tuple[Any, ...], bool, bool]:
    """Return between which limits PyTorch surely takes numbers, by their values.

    A limit is the position of a number, its least and most, whether it may be infinite, and whether
    it may be zero. Then follows whether there are no other such numbers; and whether there is a
    divisor of integers that only a kernel knows.
    """
    limits, whole, unknown = [], True, False
    for one, dtype in dtypes.items():
        floating = dtype is not None and dtype.is_floating_point
        if dtype in (None, torch.bool) or one.op not in (_CLAMPS if floating else _LIMITED):
            continue
        about = torch.finfo(dtype) if floating else torch.iinfo(dtype)
        for place, arg in enumerate(one.args):
            divides = one.op in _DIVISIONS and place == 1
            if isinstance(values[arg], torch.Tensor) or arg.op == CONST:
                unknown |= divides and (arg.op != CONST or not values[arg])
                if arg.op == CONST and not (floating or about.min <= values[arg] <= about.max):
                    whole = False  # some versions wrap it, some hold it within the limits
            elif arg.op != INPUT or (isinstance(values[arg], float) and not floating):
                whole = False
            else:
                least = 0 if one.op == "pow" else about.min
                limits.append((arg.value[0], least, about.max, floating, not divides))
    return tuple(limits), whole, unknown
