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


def _scaled(x: Any, other: Any, *, alpha: Any) -> Any:
    return apply("add_scaled", x, other, alpha)


@_function
def add(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    """Return input + alpha other."""
    if _is(1, alpha):
        return apply("add", input, other)
    return called("add", _scaled, input, other, alpha=alpha)


@_function
def sub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    """Return input - alpha other."""
    if _is(1, alpha):
        return apply("sub", input, other)
    return called(
        "sub", lambda x, other, alpha: _scaled(x, other, alpha=-alpha), input, other, alpha=alpha
    )


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
    """Return a power."""
    by_number = isinstance(exponent, (int, float)) and isinstance(input, Element)
    if by_number and exponent in _POWERS:
        return called("pow", _power, input, exponent=exponent)
    return apply("pow", input, exponent)


def _power(x: Any, exponent: Any) -> Any:
    floating = isinstance(exponent, float) or exponent < 0
    return _POWERS[exponent](x * (1.0 if floating else 1))  # the dtype that Torch promotes to


_POWERS: dict[float, Callable[[Any], Any]] = {  # which Torch computes otherwise than by `pow`
    1: lambda x: x,
    2: lambda x: x * x,
    3: lambda x: x * x * x,
    0.5: torch.sqrt,
    -0.5: torch.rsqrt,
    -1: torch.reciprocal,
    -2: lambda x: torch.reciprocal(x) * torch.reciprocal(x),
}


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


def _nan_to_num(x: Any, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Any:
    if posinf is None or neginf is None:
        raise TypeError("torch.nan_to_num in a pointwise function needs posinf= and neginf=")
    finite = where(x == math.inf, posinf, where(x == -math.inf, neginf, x))
    return where(torch.isnan(x), nan, finite)


def _gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "none":
        return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1 + torch.tanh(inner))
    raise TypeError(f"F.gelu(approximate={approximate!r}): it is 'none' or 'tanh'")


def _softplus(x: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Any:
    if _is(1, beta):
        return where(x > threshold, x, apply("softplus", x))
    scaled = x * beta
    return where(scaled > threshold, x, apply("softplus", scaled) / beta)


def _elu(x: Any, alpha: Any = 1.0) -> Any:
    return where(x > 0, x, alpha * torch.expm1(where(x > 0, 0, x)))


def _lerp(x: Any, end: Any, weight: Any) -> Any:  # from the nearer end, as Torch does
    near, far = x + weight * (end - x), end - (end - x) * (1 - weight)
    return where(abs(weight) < 0.5, near, far)


def _hardtanh(x: Any, min_val: Any = -1.0, max_val: Any = 1.0) -> Any:
    return where(x <= min_val, min_val, where(x >= max_val, max_val, x))


# What computes the functions that PyTorch has as one. Parameters have PyTorch's names but for x,
# which is `input`; `inplace` makes no difference.
_COMPOSITES: dict[str, Callable[..., Any]] = {
    "nan_to_num": _nan_to_num, "gelu": _gelu, "softplus": _softplus, "elu": _elu, "lerp": _lerp,
    "hardtanh": _hardtanh, "relu": lambda x: apply("relu", x),
    "addcmul": lambda x, tensor1, tensor2, *, value=1:
        apply("addcmul", x, tensor1, tensor2, value),
    "addcdiv": lambda x, tensor1, tensor2, *, value=1:
        apply("addcdiv", x, tensor1, tensor2, value),
    "silu": lambda x: x * torch.sigmoid(x),
    "logsigmoid": lambda x: -apply("softplus", -x),
    "mish": lambda x: x * torch.tanh(apply("softplus", x)),
    "leaky_relu": lambda x, negative_slope=0.01:
        where(x > 0, x, x * negative_slope),
    "relu6": lambda x: _hardtanh(x, 0, 6),
    "hardsigmoid": lambda x: _hardtanh(x + 3, 0.0, 6.0) / 6,
    "hardswish": lambda x: x * (_hardtanh(x + 3, 0.0, 6.0) / 6),
}  # fmt: skip
FUNCTIONS.update({name: functools.partial(called, name, f) for name, f in _COMPOSITES.items()})
FUNCTIONS["rsub"] = lambda x, other, alpha=1: sub(other, x, alpha=alpha)
FUNCTIONS["square"] = lambda x: pow(x, 2)
FUNCTIONS["softsign"] = lambda input: input / (abs(input) + 1)  # noqa: A006  as PyTorch has it
_SAME = {
    "multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div", "negative": "neg",
    "absolute": "abs", "sgn": "sign", "expit": "sigmoid", "clip": "clamp", "arctan2": "atan2",
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "less": "lt", "less_equal": "le",
    "greater": "gt", "greater_equal": "ge", "not_equal": "ne", "fix": "trunc",
    "log_sigmoid": "logsigmoid",
}  # fmt: skip
FUNCTIONS.update({name: FUNCTIONS[known] for name, known in _SAME.items()})
