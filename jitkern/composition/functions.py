"""Functions of Torch that are made of operations of the table, with Torch's own parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from jitkern.composition.symbol import FUNCTIONS, Element, apply, called
from jitkern.composition.table import TABLE


def _of_table(name: str, arity: int) -> Callable[..., Any]:
    """Return the function of a row, which takes only its operands."""

    def function(*values: Any, **keywords: Any) -> Any:
        operands = [*values, *(v for k, v in keywords.items() if k in ("input", "other"))]
        if len(operands) != arity or len(values) + len(keywords) != arity:
            given = ", ".join([*map(repr, values), *(f"{k}={v!r}" for k, v in keywords.items())])
            raise TypeError(
                f"torch.{name} takes {arity} operand{'s' * (arity > 1)} in a pointwise function, "
                f"got ({given})"
            )
        return apply(name, *operands)

    return function


FUNCTIONS.update({name: _of_table(name, row.arity) for name, row in TABLE.items()})


def _is(number: float, value: Any) -> bool:
    """Whether a value is this number, and no symbol."""
    return not isinstance(value, Element) and value == number


def _function(function: Callable[..., Any]) -> Callable[..., Any]:
    FUNCTIONS[function.__name__] = function
    return function


def _composite(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function that is one to PyTorch, which knows its dtypes."""
    FUNCTIONS[function.__name__] = functools.partial(called, function)
    return function


@_function
def add(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    """Return input + alpha other."""
    return apply("add", input, other) if _is(1, alpha) else called(_add, input, other, alpha=alpha)


def _add(input: Any, other: Any, *, alpha: Any) -> Any:
    return input + alpha * other


@_function
def sub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    """Return input - alpha other."""
    return apply("sub", input, other) if _is(1, alpha) else called(_sub, input, other, alpha=alpha)


def _sub(input: Any, other: Any, *, alpha: Any) -> Any:
    return input - alpha * other


@_function
def rsub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    """Return other - alpha input."""
    return sub(other, input, alpha=alpha)


@_function
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    """Return input / other; its floor with rounding_mode="floor"."""
    if rounding_mode is None:
        return apply("div", input, other)
    if rounding_mode == "floor":
        return apply("floor_divide", input, other)
    raise TypeError(
        f"torch.div(rounding_mode={rounding_mode!r}) in a pointwise function: write "
        "torch.trunc(a / b)"
    )


@_function
def pow(input: Any, exponent: Any) -> Any:
    """Return a power; of the exponents 2, 3, 0.5, -0.5, -1 and -2 as Torch computes them."""
    if not isinstance(exponent, (int, float)) or not isinstance(input, Element):
        return apply("pow", input, exponent)
    x: Any = input * (1.0 if isinstance(exponent, float) else 1)  # the dtype that Torch promotes to
    powers: dict[float, Callable[[], Any]] = {
        1: lambda: x,
        2: lambda: x * x,
        3: lambda: x * x * x,
        0.5: lambda: torch.sqrt(x),
        -0.5: lambda: torch.rsqrt(x),
        -1: lambda: apply("inverse", x),
        -2: lambda: apply("inverse_square", x),
    }
    return powers[exponent]() if exponent in powers else apply("pow", input, exponent)


@_function
def square(input: Any) -> Any:
    """Return input²."""
    return pow(input, 2)


@_function
def where(condition: Any, input: Any, other: Any) -> Any:
    """Return `input` where the condition holds, else `other`."""
    return apply("where", condition, input, other)


@_function
def clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    """Return input, at least `min` and at most `max`."""
    if min is None and max is None:
        raise TypeError("torch.clamp takes a minimum or a maximum")
    if min is None or max is None:
        return apply("clamp_max", input, max) if min is None else apply("clamp_min", input, min)
    return apply("clamp", input, min, max)


@_composite
def lerp(input: Any, end: Any, weight: Any) -> Any:
    """Return input + weight (end - input), as Torch computes it: from the nearer end."""
    return where(
        abs(weight) < 0.5, input + weight * (end - input), end - (end - input) * (1 - weight)
    )


@_composite
def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    """Return input + value tensor1 tensor2."""
    return input + value * tensor1 * tensor2


@_composite
def addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    """Return input + value tensor1 / tensor2."""
    return input + value * tensor1 / tensor2


@_composite
def nan_to_num(input: Any, nan: float = 0.0, posinf: Any = None, neginf: Any = None) -> Any:
    """Return input, with these numbers for NaN and the infinities."""
    if posinf is None or neginf is None:
        raise TypeError("torch.nan_to_num in a pointwise function needs posinf= and neginf=")
    finite = where(input == math.inf, posinf, where(input == -math.inf, neginf, input))
    return where(torch.isnan(input), nan, finite)


@_function
def relu(input: Any, inplace: bool = False) -> Any:
    """Return max(input, 0)."""
    return apply("relu", input)


@_composite
def silu(input: Any, inplace: bool = False) -> Any:
    """Return input sigmoid(input)."""
    return input * torch.sigmoid(input)


@_composite
def gelu(input: Any, approximate: str = "none") -> Any:
    """Return input Φ(input), where Φ is the normal distribution; or its approximation by tanh."""
    if approximate == "none":
        return 0.5 * input * (1 + torch.erf(input * math.sqrt(0.5)))
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (input + 0.044715 * (input * input * input))
        return 0.5 * input * (1 + torch.tanh(inner))
    raise TypeError(f"F.gelu(approximate={approximate!r}): it is 'none' or 'tanh'")


@_composite
def softplus(input: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """Return log(1 + exp(beta input)) / beta; `input` itself above the threshold."""
    if _is(1, beta):
        return where(input > threshold, input, apply("softplus", input))
    scaled = input * beta
    return where(scaled > threshold, input, apply("softplus", scaled) / beta)


@_composite
def logsigmoid(input: Any) -> Any:
    """Return log(sigmoid(input))."""
    return -apply("softplus", -input)


@_composite
def mish(input: Any, inplace: bool = False) -> Any:
    """Return input tanh(softplus(input))."""
    return input * torch.tanh(apply("softplus", input))


@_composite
def elu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    """Return input where positive, else alpha (exp(input) - 1)."""
    return where(input > 0, input, alpha * torch.expm1(where(input > 0, 0, input)))


@_composite
def leaky_relu(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    """Return input where positive, else negative_slope input."""
    return where(input > 0, input, input * negative_slope)


@_composite
def hardtanh(
    input: Any,
    min_val: float = -1.0,
    max_val: float = 1.0,
    inplace: bool = False,
) -> Any:
    """Return input between `min_val` and `max_val`."""
    return where(input <= min_val, min_val, where(input >= max_val, max_val, input))


@_composite
def relu6(input: Any, inplace: bool = False) -> Any:
    """Return input between 0 and 6."""
    return hardtanh(input, 0, 6)


@_composite
def hardsigmoid(input: Any, inplace: bool = False) -> Any:
    """Return (input + 3) / 6 between 0 and 1."""
    return hardtanh(input + 3, 0.0, 6.0) / 6


@_composite
def hardswish(input: Any, inplace: bool = False) -> Any:
    """Return input hardsigmoid(input)."""
    return input * hardsigmoid(input)


@_composite
def softsign(input: Any) -> Any:
    """Return input / (1 + |input|)."""
    return input / (1 + abs(input))


_SAME = {
    "multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div", "negative": "neg",
    "absolute": "abs", "sgn": "sign", "expit": "sigmoid", "clip": "clamp", "arctan2": "atan2",
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "less": "lt", "less_equal": "le",
    "greater": "gt", "greater_equal": "ge", "not_equal": "ne", "fix": "trunc",
    "log_sigmoid": "logsigmoid",
}  # fmt: skip
FUNCTIONS.update({name: FUNCTIONS[known] for name, known in _SAME.items()})
