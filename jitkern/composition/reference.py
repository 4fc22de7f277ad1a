"""The reference of a pointwise op: its expressions with Torch's operations, in float32 or more."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jitkern.composition.expression import CONST, INPUT, TO, Node, ordered
from jitkern.composition.promotion import computed_in, kinds_of
from jitkern.composition.symbol import FOLDED
from jitkern.composition.table import TABLE
from jitkern.source.dtypes import DTYPES

_OF_NUMBERS = {**FOLDED, "div": operator.truediv}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def reference_of(
    outputs: Sequence[Node], program: Sequence[Any], likes: Sequence[int]
) -> Callable[..., Any]:
    """Return the reference: what kernels compute, rounded once.

    likes: for each output the position of the argument that gives its dtype, or -1.
    """
    steps = ordered(outputs)
    numbers = [steps.index(output) for output in outputs]

    def reference(*values: Any) -> Any:
        kinds = kinds_of(program, values)
        wide = computed_in(program, kinds)
        widened = [value.to(wide) if _is_floating(value) else value for value in values]
        found = evaluated(outputs, widened, wide)
        dtypes = [
            kinds[n][0] if like < 0 else values[like].dtype for n, like in zip(numbers, likes)
        ]
        results = tuple(_own(r.to(d), values) for r, d in zip(found, dtypes))
        return results[0] if len(results) == 1 else results

    return reference


def evaluated(
    outputs: Sequence[Node], values: Sequence[Any], wide: torch.dtype | None = None
) -> list[Any]:
    """Return the expressions of these tensors and numbers, computed by Torch as they stand.

    wide: what conversions to a dtype of floating-point numbers are computed in, after they round.
    """
    results: dict[Node, Any] = {}
    for one in ordered(outputs):
        if one.op == INPUT:
            results[one] = values[one.value[0]]
        elif one.op == CONST:
            results[one] = one.value
        elif one.op == TO:
            dtype = getattr(torch, DTYPES[one.value].torch)
            result = results[one.args[0]].to(dtype)
            results[one] = result.to(wide) if wide and dtype in _FLOATS else result
        else:
            operands = [results[arg] for arg in one.args]
            results[one] = _applied(one.op, operands, wide)
    return [results[output] for output in outputs]


def _applied(name: str, operands: list[Any], wide: torch.dtype | None) -> Any:
    """Return the result of an operation of the table; for numbers only, mostly a number."""
    first, tensors = operands[0], [o for o in operands if isinstance(o, torch.Tensor)]
    if not tensors and name in _OF_NUMBERS and (name != "div" or operands[1] != 0):
        return _OF_NUMBERS[name](*operands)
    if not isinstance(first, torch.Tensor):  # few functions of Torch take a number there
        floating = isinstance(first, (float, torch.SymFloat))
        device = tensors[0].device if tensors else None
        first = torch.as_tensor(first, device=device, dtype=wide if floating else None)
    return TABLE[name].function(first, *operands[1:])


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _own(result: Any, values: Sequence[Any]) -> Any:
    """Clone a result that aliases an argument."""
    return result.clone() if any(result is value for value in values) else result
