"""The table of scalar operations: one row an operation.

A new operation is a row here, and a name in `functions.py` if it takes more than operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.torch_version import TorchVersion

from jitkern.composition import expression
from jitkern.named_tuple import NamedTuple

Values = tuple[Any, ...]
_TIES_ARE_SHARED = TorchVersion(torch.__version__) >= "2.14"  # by `clamp`, with its bound
_SLOPE = 2 / math.sqrt(math.pi)  # of erf at 0


class Primitive(NamedTuple):
    """An operation on numbers.

    name: also that of the function of Torch, and of the method of tensors, if there are such.
    arity: the number of operands.
    rule: how the text computes: in the `same` type as the result, in `float` or more, to a `bool`
        from what operands are promoted to, or `where`: as `same`, and the first is a condition.
    cuda, cpp: the text in each language, of operands `{0}`, …; cpp is "" where it is the same.
        Names that end in an underscore are functions of `helpers.py`.
    gradient: `f(g, *operands, out)` returns, for each operand, its part of the gradient: None for
        one without derivative, the number 0 where the derivative is zero. It is written for
        symbols, and works on tensors as well.
    eager: the function of Torch, where it is not `torch.<name>`.
    deciding: the places of the operands that decide on the dtype; all if none is given.
    wraps: whether the text adds, subtracts or multiplies, which overflows signed integers.
    """

    name: str
    arity: int
    rule: str
    cuda: str
    cpp: str = ""
    gradient: Callable[..., Values] | None = None
    eager: Callable[..., Any] | None = None
    deciding: tuple[int, ...] = ()
    wraps: bool = False

    @property
    def function(self) -> Callable[..., Any]:
        """The function of Torch that the reference calls."""
        found: Callable[..., Any] = self.eager or getattr(torch, self.name)
        return found


def _where(condition: Any, x: Any, y: Any) -> Any:
    """Return torch.where for a condition that may be constant, as one of two numbers is."""
    if isinstance(condition, bool):
        return x if condition else y
    return torch.where(condition, x, y)


def _on_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of Torch that takes only tensors, extended to numbers."""

    def call(*values: Any) -> Any:
        like = next(v for v in values if isinstance(v, torch.Tensor))

        def tensor(value: Any) -> torch.Tensor:
            exact = torch.float64 if isinstance(value, (float, torch.SymFloat)) else None
            made = torch.as_tensor(value, device=like.device, dtype=exact)
            return made.to(torch.result_type(like, value))

        return function(*(v if isinstance(v, torch.Tensor) else tensor(v) for v in values))

    return call


def _chosen(g: Any, x: Any, y: Any, by_x: Any, by_y: Any) -> Values:
    """Return the gradient of a choice of x or y: a tie shares it, and NaN gives it to both."""
    shared = _where(x == y, g / 2, g)
    return _where(by_y, 0, shared), _where(by_x, 0, shared)


def _is_tensor(value: Any) -> bool:
    """Whether an operand is a tensor, or a symbol of what is computed of tensors."""
    node = getattr(value, "node", None)
    return isinstance(value, torch.Tensor) if node is None else expression.of_tensors(node)


def _clamp(x: Any, low: Any, high: Any) -> Any:
    of_tensors = isinstance(low, torch.Tensor) or isinstance(high, torch.Tensor)
    return (_on_tensors(torch.clamp) if of_tensors else torch.clamp)(x, low, high)


def _clamped(g: Any, x: Any, bound: Any, within: Any, beyond: Any) -> Values:
    """Return the gradient of a clamp by one bound.

    within, beyond: whether x is on the one side of the bound, or on the other.
    """
    if not _TIES_ARE_SHARED:
        return _where(within | (x == bound), g, 0), _where(beyond, g, 0)
    return _chosen(g, x, bound, within, beyond) if _is_tensor(bound) else (_where(within, g, 0), 0)


def _clamped_between(g: Any, x: Any, low: Any, high: Any) -> Values:
    """Return the gradient of a clamp by two bounds."""
    if not _TIES_ARE_SHARED:
        return (
            _where((x >= low) & (x <= high), g, 0),
            _where((low < high) & (x < low), g, 0),
            _where((x > high) | (high < low), g, 0),
        )
    if not (_is_tensor(low) or _is_tensor(high)):
        return _where((x > low) & (x < high), g, 0), 0, 0
    at_low, at_high = (low < high) & (x == low), (low < high) & (x == high)
    return (
        _where((x < low) | (x > high), 0, _where(at_low | at_high, g / 2, g)),
        _where(at_low, g / 2, _where((x < low) & (low <= high), g, 0)),
        _where(at_high, g / 2, _where((low > high) | ((x > high) & (low <= high)), g, 0)),
    )


def _angle(g: Any, part: Any, square: Any) -> Any:
    """Return g part / square, and zero at the origin, as Torch does."""
    return _where(square == 0, 0, g * (part / square))


def _power(g: Any, x: Any, y: Any, out: Any) -> Values:
    zeroth = y == 0  # has the derivative 0, and so have its derivatives, whatever x and g are
    return (
        _where(zeroth, 0, g) * (y * torch.pow(x, _where(zeroth, 1, y) - 1)),
        _where((x == 0) & (y >= 0), 0, g * (out * torch.log(x))),
    )


def _unary(name: str, cuda: str, gradient: Any, cpp: str = "", eager: Any = None) -> Primitive:
    """A function of one number, whose result is floating-point; gradient: `f(g, x, out)`."""
    return Primitive(name, 1, "float", cuda, cpp, lambda g, x, out: (gradient(g, x, out),), eager)


def _flat(name: str, text: str) -> Primitive:
    """A function whose derivative is zero wherever there is one."""
    return Primitive(name, 1, "same", text, gradient=lambda g, x, out: (0,))


def _compared(name: str, sign: str) -> Primitive:
    return Primitive(name, 2, "bool", f"{{0}} {sign} {{1}}")


def _logical(name: str, text: str) -> Primitive:
    return Primitive(name, 2, "bool", text, eager=_on_tensors(getattr(torch, name)))


_ROWS = (
    Primitive("add", 2, "same", "{0} + {1}", gradient=lambda g, x, y, out: (g, g), wraps=True),
    Primitive("sub", 2, "same", "{0} - {1}", gradient=lambda g, x, y, out: (g, -g), wraps=True),
    Primitive("mul", 2, "same", "{0} * {1}", wraps=True,
        gradient=lambda g, x, y, out: (g * y, g * x)),
    Primitive("div", 2, "float", "{0} / {1}",
        gradient=lambda g, x, y, out: (g / y, -g * (out / y))),
    Primitive("neg", 1, "same", "-{0}", gradient=lambda g, x, out: (-g,), wraps=True),
    Primitive("abs", 1, "same", "abs_({0})", gradient=lambda g, x, out: (g * torch.sign(x),)),
    _flat("sign", "(0 < {0}) - ({0} < 0)"),
    Primitive("relu", 1, "same", "{0} <= 0 ? 0 : {0}",
        gradient=lambda g, x, out: (_where(out <= 0, 0, g),)),
    Primitive("maximum", 2, "same", "{0} != {0} || {0} > {1} ? {0} : {1}",
        gradient=lambda g, x, y, out: _chosen(g, x, y, x > y, x < y),
        eager=_on_tensors(torch.maximum)),
    Primitive("minimum", 2, "same", "{0} != {0} || {0} < {1} ? {0} : {1}",
        gradient=lambda g, x, y, out: _chosen(g, x, y, x < y, x > y),
        eager=_on_tensors(torch.minimum)),
    Primitive("clamp_min", 2, "same", "{0} != {0} || {0} > {1} ? {0} : {1}",
        gradient=lambda g, x, low, out: _clamped(g, x, low, x > low, x < low)),
    Primitive("clamp_max", 2, "same", "{0} != {0} || {0} < {1} ? {0} : {1}",
        gradient=lambda g, x, high, out: _clamped(g, x, high, x < high, x > high)),
    Primitive("clamp", 3, "same", "clamp_({0}, {1}, {2})", eager=_clamp,
        gradient=lambda g, x, low, high, out: _clamped_between(g, x, low, high)),
    Primitive("where", 3, "where", "{0} ? {1} : {2}", deciding=(1, 2),
        gradient=lambda g, c, x, y, out: (None, _where(c, g, 0), _where(c, 0, g))),
    Primitive("add_scaled", 3, "same", "{0} + {2} * {1}", deciding=(0, 1), wraps=True,
        eager=lambda x, y, alpha: torch.add(x, y, alpha=alpha),
        gradient=lambda g, x, y, alpha, out: (g, g * alpha, g * y)),
    Primitive("addcmul", 4, "same", "{0} + {3} * {1} * {2}", deciding=(0, 1, 2), wraps=True,
        eager=lambda x, a, b, by: torch.addcmul(x, a, b, value=by),
        gradient=lambda g, x, a, b, by, out: (g, g * (by * b), g * (by * a), g * (a * b))),
    Primitive("addcdiv", 4, "float", "{0} + {3} * {1} / {2}", deciding=(0, 1, 2),
        eager=lambda x, a, b, by: torch.addcdiv(x, a, b, value=by),
        gradient=lambda g, x, a, b, by, out: (
            g, g * (by / b), -g * (by * a / (b * b)), g * (a / b))),
    Primitive("pow", 2, "same", "pow_({0}, {1})", gradient=_power),
    Primitive("fmod", 2, "same", "fmod_({0}, {1})",
        gradient=lambda g, x, y, out: (g, -g * torch.trunc(x / y))),
    Primitive("remainder", 2, "same", "remainder_({0}, {1})",
        gradient=lambda g, x, y, out: (g, -g * torch.div(x, y, rounding_mode="floor"))),
    Primitive("floor_divide", 2, "same", "floor_divide_({0}, {1})",
        gradient=lambda g, x, y, out: (0, 0),
        eager=lambda x, y: torch.div(x, y, rounding_mode="floor")),  # floor_divide has no autograd
    Primitive("atan2", 2, "float", "atan2({0}, {1})", gradient=lambda g, x, y, out: (
        _angle(g, y, x * x + y * y), _angle(g, -x, x * x + y * y)), eager=_on_tensors(torch.atan2)),
    Primitive("hypot", 2, "float", "hypot({0}, {1})", eager=_on_tensors(torch.hypot),
        gradient=lambda g, x, y, out: (g * (x / out), g * (y / out))),
    *(_flat(name, f"{name}_({{0}})") for name in ("floor", "ceil", "round", "trunc")),
    _unary("exp", "exp_<FAST>({0})", lambda g, x, out: g * out, "exp_({0})"),
    _unary("exp2", "exp2({0})", lambda g, x, out: g * out * math.log(2)),
    _unary("expm1", "expm1({0})", lambda g, x, out: g * (out + 1)),
    _unary("log", "log({0})", lambda g, x, out: g / x, "log_({0})"),
    _unary("log2", "log2({0})", lambda g, x, out: g / (x * math.log(2))),
    _unary("log10", "log10({0})", lambda g, x, out: g / (x * math.log(10))),
    _unary("log1p", "log1p({0})", lambda g, x, out: g / (x + 1)),
    _unary("sqrt", "sqrt({0})", lambda g, x, out: g / (2 * out)),
    _unary("rsqrt", "rsqrt({0})", lambda g, x, out: -0.5 * g * (out * out * out), "1 / sqrt({0})"),
    _unary("reciprocal", "1 / {0}", lambda g, x, out: -g * (out * out)),
    _unary("sin", "sin({0})", lambda g, x, out: g * torch.cos(x)),
    _unary("cos", "cos({0})", lambda g, x, out: -g * torch.sin(x)),
    _unary("tan", "tan({0})", lambda g, x, out: g * (1 + out * out)),
    _unary("asin", "asin({0})", lambda g, x, out: g * torch.rsqrt(1 - x * x)),
    _unary("acos", "acos({0})", lambda g, x, out: -g * torch.rsqrt(1 - x * x)),
    _unary("atan", "atan({0})", lambda g, x, out: g / (x * x + 1)),
    _unary("sinh", "sinh({0})", lambda g, x, out: g * torch.cosh(x)),
    _unary("cosh", "cosh({0})", lambda g, x, out: g * torch.sinh(x)),
    _unary("tanh", "tanh({0})", lambda g, x, out: g * (1 - out * out), "tanh_({0})"),
    _unary("sigmoid", "sigmoid_<FAST>({0})", lambda g, x, out: g * (out * (1 - out)),
           "sigmoid_({0})"),
    _unary("erf", "erf({0})", lambda g, x, out: g * (_SLOPE * torch.exp(-(x * x))), "erf_({0})"),
    _unary("erfc", "erfc({0})", lambda g, x, out: -g * (_SLOPE * torch.exp(-(x * x)))),
    _unary("softplus", "softplus_({0})", lambda g, x, out: g * torch.sigmoid(x),
           eager=lambda x: torch.logaddexp(x, torch.zeros_like(x))),
    _compared("lt", "<"), _compared("le", "<="), _compared("gt", ">"), _compared("ge", ">="),
    _compared("eq", "=="), _compared("ne", "!="),
    _logical("logical_and", "{0} != 0 && {1} != 0"),
    _logical("logical_or", "{0} != 0 || {1} != 0"),
    _logical("logical_xor", "({0} != 0) != ({1} != 0)"),
    Primitive("logical_not", 1, "bool", "{0} == 0"),
    Primitive("bitwise_and", 2, "same", "{0} & {1}"),
    Primitive("bitwise_or", 2, "same", "{0} | {1}"),
    Primitive("bitwise_xor", 2, "same", "{0} ^ {1}"),
    Primitive("bitwise_not", 1, "same", "not_({0})"),
    Primitive("isnan", 1, "bool", "{0} != {0}"),
    Primitive("isinf", 1, "bool", "{0} == {0} && {0} - {0} != 0"),
    Primitive("isfinite", 1, "bool", "{0} - {0} == 0"),
    Primitive("signbit", 1, "bool", "signbit_({0})"),
)  # fmt: skip
TABLE = {row.name: row for row in _ROWS}
