"""The reference of a pointwise op: its expressions with Torch's operations, in float32 or more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from jitkern.composition.eager import answer, applied
from jitkern.composition.expression import CONST, INPUT, TO, Node, eager_operands, ordered
from jitkern.composition.launch import given_of


def reference_of(name: str, outputs: Sequence[Node], kinds: Sequence[str]) -> Callable[..., Any]:
    """Return the reference of an op: what kernels compute, rounded once.

    kinds: those of the arguments.
    """

    def reference(*values: Any) -> Any:
        given = [
            (kind, value) if type(value) in (bool, int, float) else one
            for one, value, kind in zip(given_of(kinds, values), values, kinds)
        ]
        device = next(value.device.type for value in values if isinstance(value, torch.Tensor))
        dtypes, *_, wide = answer(name, tuple(given), torch.finfo().dtype, device)
        widened = [value.to(wide) if _is_floating(value) else value for value in values]
        found = evaluated(outputs, widened, wide)
        results = tuple(_own(r.to(d), values) for r, d in zip(found, dtypes))
        return results[0] if len(results) == 1 else results

    return reference


def evaluated(
    outputs: Sequence[Node], values: Sequence[Any], wide: torch.dtype | None = None
) -> list[Any]:
    """Return the expressions of these tensors and numbers, computed by Torch as they stand.

    wide: the dtype that floating-point numbers are computed in, by default as they stand.
    """
    results: dict[Node, Any] = {}
    for one in ordered(outputs, eager_operands):
        if one.op == INPUT:
            results[one] = values[one.value[0]]
        elif one.op == CONST:
            results[one] = one.value
        else:
            operands = [results[arg] for arg in eager_operands(one)]
            result = applied(one, operands, wide)
            narrow = wide and _is_floating(result) and result.dtype != wide
            if narrow and one.op not in (TO, "where"):  # of integers, in the default dtype
                operands = [o.to(wide) if isinstance(o, torch.Tensor) else o for o in operands]
                result = applied(one, operands, wide)
            results[one] = result.to(wide) if narrow else result
    return [results[output] for output in outputs]


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _own(result: Any, values: Sequence[Any]) -> Any:
    """Clone a result that aliases an argument."""
    return result.clone() if any(result is value for value in values) else result
