"""Dtypes of expressions: what Torch promotes operands to, for each operation of a program.

A program is an expression as plain data, for launch functions: a tuple of steps, operands first.
A step is `(rule, operands, deciding, what)`: the rule of a row of the table, or `input`, `number`
or `to`; the numbers of earlier steps; those of them that decide on the dtype; and the name of the
row, the position of an input, or the dtype of a number or conversion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from jitkern.composition.expression import CONST, INPUT, TO, Node, ordered
from jitkern.composition.table import TABLE
from jitkern.source.dtypes import DTYPES

OF_PYTHON = {bool: torch.bool, int: torch.int64, float: torch.float32}
_OF_KIND = {"bool": torch.bool, "int": torch.int64, "float": torch.float32}
NUMBER = 0  # its weight in promotion; that of a tensor is 1 without dimensions, else 2
_NOT_OF_BOOL = ("sub", "neg")
_OF_INTEGERS = ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not")

_NO_INTEGERS = ("inverse", "inverse_square")
_CONVERTED = {  # the places of numbers that Torch converts to the dtype of the result
    "where": (1, 2), "clamp_min": (1,), "clamp_max": (1,), "clamp": (1, 2), "add_scaled": (2,),
    "addcmul": (3,),
}  # fmt: skip
_DIVISIONS = ("floor_divide", "remainder", "fmod")
_NEGATIVE_POWER = "Integers to negative integer powers are not allowed."
UNKNOWN = -2  # in place of the position of a number

Kind = tuple[torch.dtype, int]


def program_of(outputs: Sequence[Node]) -> tuple[Any, ...]:
    """Return the steps of these expressions, in the order of `ordered(outputs)`."""
    numbers: dict[Node, int] = {}
    steps: list[Any] = []
    for one in ordered(outputs):
        operands = tuple(numbers[arg] for arg in one.args)
        numbers[one] = len(steps)
        if one.op == INPUT:
            position, kind = one.value
            if kind == "tensor":
                steps.append(("input", (), (), position))
            else:
                steps.append(("number", (), (), _OF_KIND[kind]))
        elif one.op == CONST:
            steps.append(("number", (), (), OF_PYTHON[type(one.value)]))
        elif one.op == TO:
            steps.append(("to", operands, (), getattr(torch, DTYPES[one.value].torch)))
        else:
            row = TABLE[one.op]
            steps.append((row.rule, operands, row.deciding_of(operands), one.op))
    return tuple(steps)


def kinds_of(program: Sequence[Any], values: Sequence[Any]) -> list[Kind]:
    """Return the dtype and the weight of each step, for these arguments. Launch functions call it.

    Raises RuntimeError for what Torch refuses, as the difference of two bools.
    """
    found: list[Any] = []
    for rule, operands, deciding, what in program:
        if rule == "input":
            value = values[what]
            found.append((value.dtype, 2 if value.dim() else 1))
        elif rule == "number":
            found.append((what, 0))
        else:
            weight = max([found[i][1] for i in operands])  # that of numbers alone is a number's
            given = [found[i] for i in deciding]
            if rule == "to":
                dtype, weight = what, max(weight, 1)
            elif rule == "bool":
                dtype = torch.bool
            else:
                dtype = promoted(given)
                if rule == "float" and not dtype.is_floating_point:
                    if what in _NO_INTEGERS:
                        raise RuntimeError(_NEGATIVE_POWER)
                    dtype = torch.float32
                if dtype.is_floating_point and what in _OF_INTEGERS:
                    raise RuntimeError(f"{what}() takes integers and conditions, got {dtype}")
                whole = not dtype.is_floating_point
                if whole and what == "add_scaled" and found[operands[2]][0].is_floating_point:
                    raise RuntimeError(f"add() of {dtype} takes no alpha with a fraction")
                if dtype == torch.bool and what in _NOT_OF_BOOL:
                    raise RuntimeError(f"{what}() takes no bools: write `^` or torch.logical_not")
            found.append((dtype, weight))
    return found


def promoted(kinds: Sequence[Any]) -> Any:
    """Return the dtype that operands of these dtypes and weights are promoted to.

    This is torch.result_type: tensors with dimensions decide over those without, and these over
    numbers, unless the lighter operand is of a higher kind (bool, integer, floating-point).
    """
    chosen: Any = None
    for weight in (0, 1, 2):
        alike: Any = None
        for dtype, own in kinds:
            if own == weight:
                alike = dtype if alike is None else torch.promote_types(alike, dtype)
        if alike is None:
            continue
        if (
            chosen is not None
            and not alike.is_floating_point
            and (alike == torch.bool or chosen.is_floating_point)
        ):
            alike = torch.promote_types(alike, chosen)
        chosen = alike
    return chosen


def computed_in(program: Sequence[Any], kinds: Sequence[Any]) -> Any:
    """Return the dtype that floating-point numbers are computed in: float64 for float64."""
    given = [kind for (rule, *_), kind in zip(program, kinds) if rule == "input"]
    floating = [kind for kind in given if kind[0].is_floating_point]
    if floating and promoted(floating) == torch.float64:
        return torch.float64
    for (rule, *_), (dtype, _) in zip(program, kinds):
        if rule not in ("input", "number") and dtype == torch.float64:
            return torch.float64
    return torch.float32


def checks_of(outputs: Sequence[Node]) -> tuple[tuple[str, int, int, Any], ...]:
    """Return what Torch refuses for some dtypes or some numbers, for `check`.

    A check is the name of an operation, its step, and the position of the number to look at among
    the arguments, or -1 and the number. UNKNOWN stands for a divisor that only a kernel knows.
    """
    found: list[tuple[str, int, int, Any]] = []
    for step, one in enumerate(ordered(outputs)):
        divides = one.op in _DIVISIONS
        for place in (1,) if divides or one.op == "pow" else _CONVERTED.get(one.op, ()):
            arg = one.args[place]
            if arg.op == CONST:
                small = arg.value != 0 if divides else -128 <= arg.value < 128
                fits = arg.value >= 0 if one.op == "pow" else small
                if not fits and math.isfinite(arg.value):
                    found.append((one.op, step, -1, arg.value))
            elif arg.op == INPUT and arg.value[1] in ("int", "float"):
                found.append((one.op, step, arg.value[0], 0))
            elif divides:
                found.append((one.op, step, UNKNOWN, 0))
    return tuple(found)


def check(
    name: str, checks: Sequence[Any], program: Sequence[Any], values: Sequence[Any], *, zeros: bool
) -> bool:
    """Raise RuntimeError for numbers that Torch refuses. Launch functions call it.

    zeros: whether Torch refuses an integer divisor of zero, as it does on the CPU, unless there is
    nothing to divide. Returns whether there are divisors that only a kernel knows.
    """
    unknown = False
    kinds = kinds_of(program, values) if checks else []
    for what, step, position, number in checks:
        dtype = kinds[step][0]
        value = values[position] if position >= 0 else number
        floating = dtype.is_floating_point
        if what in _DIVISIONS:
            if zeros and not floating and position == UNKNOWN:
                unknown = True
            elif zeros and not floating:
                torch._check(value != 0, lambda: f"{name}: ZeroDivisionError")
        elif what == "pow":
            torch._check(floating or value >= 0, lambda: f"{name}: {_NEGATIVE_POWER}")
        elif dtype != torch.bool and not (floating and what in ("where", "addcmul")):
            most = torch.finfo(dtype).max if floating else torch.iinfo(dtype).max
            least = -most if floating or not dtype.is_signed else -most - 1
            torch._check(
                least <= value <= most or (floating and not abs(value) < math.inf),
                lambda value=value, dtype=dtype: (
                    f"{name}: the number {value} cannot be converted to type {dtype} without "
                    "overflow"
                ),
            )
    return unknown
