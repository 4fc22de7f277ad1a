"""Dtypes and refusals of formulas: what eager PyTorch says for tensors of one element."""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Iterator, Sequence
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
    as_python,
    eager_operands,
    ordered,
)
from jitkern.composition.formula import Formula
from jitkern.composition.symbol import FOLDED
from jitkern.composition.table import TABLE
from jitkern.errors import shown
from jitkern.source.dtypes import DTYPES
from jitkern.trace.values import Pure

FORMULAS: dict[str, tuple[Definition, Formula]] = {}  # by the names of their ops
_PYTHON = {  # if the first operand is a number
    **FOLDED, "div": operator.truediv, "pow": operator.pow, "remainder": operator.mod,
    "floor_divide": operator.floordiv, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
    "ne": operator.ne, "bitwise_or": operator.or_, "bitwise_xor": operator.xor,
}  # fmt: skip
_DIVISIONS = ("floor_divide", "remainder", "fmod")
# These take no integers beyond the dtype's.
_LIMITED = (*_DIVISIONS, "clamp", "clamp_min", "clamp_max", "pow", "where", "add_scaled", "addcmul")
_INTEGERS = 2.0**62  # an argument that is an integer may be twice as large
_STEPS = 16  # of how a number is computed
_COMPUTED = ("neg", "add", "sub", "mul", "div")  # by a launch function
_KINDS: dict[str, type] = {"bool": bool, "int": int, "float": float}
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float32}  # of numbers alone, in kernels
_TRIED = (1, -(10**9), 10**9)  # in place of numbers, which a function may refuse together


def applied(one: Node, operands: Sequence[Any], wide: torch.dtype | None = None) -> Any:
    """Return the result of a node of a formula, by Torch; for numbers only, mostly a number.

    wide: the dtype of floating-point numbers that become tensors, by default Torch's.
    """
    first, tensors = operands[0], [o for o in operands if isinstance(o, torch.Tensor)]
    name, words = one.value if one.op == CALL else (one.op, ())
    given = iter(operands)
    values = [ast.literal_eval(text) if text else next(given) for _, text in words] or operands
    if not isinstance(first, torch.Tensor):
        python = _PYTHON.get(name)
        if python and len(values) == TABLE[name].arity:
            return python(*values)
        floating = isinstance(first, (float, torch.SymFloat))  # few functions take a number there
        device = tensors[0].device if tensors else None
        first = torch.as_tensor(first, device=device, dtype=wide if floating else None)
    if one.op == TO:
        return first.to(getattr(torch, DTYPES[one.value].torch))
    if one.op != CALL:
        return TABLE[one.op].function(first, *operands[1:])
    function = getattr(torch, name, None) or getattr(torch.nn.functional, name)
    named = {word: value for (word, _), value in zip(words[1:], values[1:])}
    try:
        return function(values[0], **named)
    except TypeError:
        if first is values[0]:
            raise
        return function(first, **named)


@Pure
def answer(name: str, given: tuple[Any, ...], _: torch.dtype, device: str) -> tuple[Any, ...]:
    """Return what PyTorch says of a class of calls. Raises RuntimeError for what it refuses.

    name: of the op. given: for each argument the dtype and whether it has dimensions, the kind of a
    number, or a list of the number. _: the default dtype. device: the type of the tensors' device,
    which is asked, where this machine has it, for what the CPU has no kernel for.

    The result is the dtypes of the outputs; template arguments as pairs, or None where no kernel
    computes what PyTorch does; the limits of numbers, see `_limits_of`; and the dtype that
    floating-point numbers are computed in.
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
    known = not any(isinstance(one, str) for one in given)
    formula = {*ordered(function.outputs, eager_operands)}
    for one in ordered(function.outputs):
        if one.op == INPUT:
            values[one] = _one(given[one.value[0]], number)
        elif one.op == CONST:
            values[one] = one.value
        else:
            try:
                operands = [values[arg] for arg in eager_operands(one)]
                values[one] = _asked(one, operands, device, known=known)
            except Exception as e:
                if one in formula:
                    raise RuntimeError(_refusal(function, one, values, e)) from e
                values[one] = None
    tensors = {one: value for one, value in values.items() if isinstance(value, torch.Tensor)}
    dtypes = {o: getattr(v, "dtype", _DTYPES.get(type(v))) for o, v in values.items()}
    whole = not any(dtype is not None and dtype.is_complex for dtype in dtypes.values())
    limits: list[tuple[Any, ...]] = []
    for one, dtype in dtypes.items():
        if whole and dtype not in (None, torch.bool):
            limits += _limits_of(one, dtype, values, device)
    whole = whole and None not in (*values.values(), *(way for way, *_ in limits))
    types = {name: _common([values[one] for one in of]) for name, of in own.types if whole}
    found = {*types.values(), *(t.dtype for one, t in tensors.items() if one.op != INPUT)}
    inputs = [t for one, t in tensors.items() if one.op == INPUT and t.is_floating_point()]
    found |= {_common(inputs)} if inputs else set()
    wide = torch.float64 if torch.float64 in found else torch.float32
    whole = whole and all(getattr(dtypes[one], "is_floating_point", False) for one in own.floats)
    pairs = tuple((n, wide if dtype.is_floating_point else dtype) for n, dtype in types.items())
    outputs = zip(function.outputs, function.likes)
    results = tuple(given[like][0] if like >= 0 else dtypes[one] for one, like in outputs)
    return results, (("A", wide), *pairs) if whole else None, tuple(dict.fromkeys(limits)), wide


def _asked(one: Node, operands: list[Any], device: str, *, known: bool) -> Any:
    """Return what eager PyTorch gives, as ones but for numbers that are known."""
    of_tensors = any(isinstance(operand, torch.Tensor) for operand in operands)
    if not of_tensors and not known:
        pairs = zip(eager_operands(one), operands)
        operands = [value if arg.op == CONST else type(value)(1) for arg, value in pairs]
    if one.op in _DIVISIONS and not isinstance(operands[1], torch.Tensor) and not operands[1]:
        operands[1] = type(operands[1])(1)  # only some devices refuse zero, where elements are
    try:
        result = applied(one, operands)
    except NotImplementedError:  # the CPU has no such kernel, but a GPU may: abs of bools
        if device == "cpu" or (device == "cuda" and not torch.cuda.is_available()):
            raise
        there = [o.to(device) if isinstance(o, torch.Tensor) else o for o in operands]
        result = applied(one, there)
    if one.op == TO or of_tensors:
        return torch.ones_like(result, device="cpu")
    number = result.item() if isinstance(result, torch.Tensor) else result
    return number if known else type(number)(1)


def _refusal(function: Definition, one: Node, values: dict[Node, Any], e: Exception) -> str:
    """Return the line, the operation with the names and dtypes of its operands, and the reason."""
    names = [parameter.name for parameter in function.parameters]
    texts = []
    for arg in eager_operands(one):
        text, kind = as_python(arg, names), type(values[arg]).__name__
        if isinstance(values[arg], torch.Tensor):
            kind = str(values[arg].dtype).removeprefix("torch.")
            kind += "" if values[arg].dim() else " without dimensions"
        texts.append(text if arg.op == CONST else f"{text}: {kind}")
    what = one.value[0] if one.op == CALL else one.op
    place = f"{shown(function.place[0])}:{function.place[1]}: {function.name}"
    return f"{place}: PyTorch refuses {what}({', '.join(texts)}): {e}"


def _limits_of(
    one: Node, dtype: torch.dtype, values: dict[Node, Any], device: str
) -> Iterator[tuple[Any, ...]]:
    """Yield between which limits PyTorch surely takes the numbers of an operation.

    A limit is how the number is computed (see `launch.number_of`; None for what it does not know),
    its least and most, whether it may be infinite, and whether it may be zero.
    """
    if dtype.is_floating_point:
        about = torch.finfo(dtype)
        if isinstance(values[one], torch.Tensor):
            for arg in _checked(one, values, about.max, device):
                yield _way(arg), about.min, about.max, True, True
        elif one.op in ("div", *_DIVISIONS):  # by Python
            yield _way(one.args[1]), -sys.float_info.max, sys.float_info.max, True, False
    elif one.op in _LIMITED:
        integers = torch.iinfo(dtype)
        for place, arg in enumerate(one.args):
            value, divides = values[arg], one.op in _DIVISIONS and place == 1
            if isinstance(value, torch.Tensor) or (arg.op == CONST and not value):
                if divides and device == "cpu":  # it refuses zero, which only a kernel would see
                    yield None, 0, 0, False, False
            elif isinstance(value, float):
                yield None, 0, 0, False, False
            elif arg.op != CONST:
                least = 0 if one.op == "pow" else integers.min
                few = one.op == "pow" and _checked(one, values, 1.5, device)  # only x ** 0, x ** 1
                yield _way(arg), least, 1 if few else integers.max, False, not divides
            elif not integers.min <= value <= integers.max:
                yield None, 0, 0, False, False  # some versions wrap it, some hold it within


def _checked(one: Node, values: dict[Node, Any], most: float, device: str) -> list[Node]:
    """Return the numbers that PyTorch refuses beyond the range of a floating-point dtype."""
    found = []
    for arg in eager_operands(one):
        kind = type(values[arg])
        if arg.op != CONST and (kind is float or (kind is int and most < _INTEGERS)):
            beyond = [kind(2 * most) if o is arg else values[o] for o in eager_operands(one)]
            try:
                _asked(one, beyond, device, known=True)
            except RuntimeError:
                found.append(arg)
    return found


def _way(number: Node) -> Any:
    """Return how a number is computed, see `launch.number_of`; None for what it does not know."""
    if number.op in (INPUT, CONST):
        return number.op, number.value[0] if number.op == INPUT else number.value
    ways = [_way(arg) for arg in number.args] if len(ordered([number])) < _STEPS else [None]
    return (number.op, *ways) if number.op in _COMPUTED and None not in ways else None
