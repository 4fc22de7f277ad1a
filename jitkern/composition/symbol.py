"""Symbols: the numbers that a pointwise function is run with, once, to learn its formula."""

from __future__ import annotations

import contextlib
import inspect
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from jitkern.composition import expression
from jitkern.composition.expression import Node
from jitkern.errors import meant
from jitkern.source.dtypes import codes_of_torch

FUNCTIONS: dict[str, Callable[..., Any]] = {}  # of Torch by name, see `functions.py`
FOLDED: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg,
    "eq": operator.eq, "ge": operator.ge, "bitwise_and": operator.and_,
}  # fmt: skip
_METHODS = {  # of tensors, that are called otherwise than their functions
    "to": "to", "type": "to", "float": "float32", "double": "float64", "half": "float16",
    "bfloat16": "bfloat16", "int": "int32", "long": "int64", "short": "int16", "char": "int8",
    "byte": "uint8", "bool": "bool",
}  # fmt: skip
_OF_TENSORS = """
dtype shape device ndim size dim numel requires_grad all amax amin any argmax argmin cumprod cumsum
log_softmax logsumexp max mean median min norm prod softmax std sum var
"""
_RANDOM = """
alpha_dropout bernoulli cauchy dropout dropout1d dropout2d dropout3d exponential
feature_alpha_dropout geometric gumbel_softmax log_normal multinomial normal poisson rand_like
randint_like randn_like random rrelu uniform
"""
_WRITE_WHERE = (
    "a pointwise function runs once, on symbols, and cannot choose by a value: write "
    "torch.where(condition, a, b), torch.maximum(a, b) for max(), or `&`, `|`, `~` of conditions"
)
_WRITE_TORCH = (
    "the value is not known when a pointwise function runs: write torch.exp(x), torch.sqrt(x) and "
    "the like in place of float(x), int(x), round(x) and the functions of math"
)

_running = threading.local()  # `names`: of the inputs of the function that runs


@contextlib.contextmanager
def named(names: Sequence[str]) -> Iterator[None]:
    """Let errors of this thread spell the inputs by these names while the block runs."""
    before, _running.names = getattr(_running, "names", ()), names
    try:
        yield
    finally:
        _running.names = before


def apply(name: str, *values: Any) -> Any:
    """Return the symbol of an operation of the table; for numbers only, a number."""
    nodes = [node_of(value) for value in values]
    numbers = [one.value for one in nodes if one.op == expression.CONST]
    if len(numbers) == len(nodes) and name in FOLDED:
        return FOLDED[name](*numbers)
    if name == "where" and nodes[0].op == expression.CONST:
        return values[1] if nodes[0].value else values[2]
    return Element(expression.node(name, *nodes))


def node_of(value: Any) -> Node:
    """Return the node of a symbol or a number. Raises TypeError for anything else."""
    if isinstance(value, Element):
        return value.node
    value = expression.plain(value, operand=True)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise TypeError(
            "a pointwise function computes with integers of 64 bits, and got one of "
            f"{value.bit_length()} bits: write a floating-point number"
        )
    if isinstance(value, torch.Tensor):
        raise TypeError(
            "a pointwise function cannot hold a tensor from outside: pass the tensor as an argument"
        )
    for kind in (bool, float, int):
        if isinstance(value, kind):  # of a subclass, too
            return expression.node(expression.CONST, value=kind(value))
    raise TypeError(
        f"a pointwise function computes with its arguments and numbers, got {type(value).__name__} "
        f"`{value!r:.80}`"
    )


def called(name: str, function: Callable[..., Any], /, *args: Any, **keywords: Any) -> Any:
    """Return the symbol of a function of Torch, which another one computes."""
    keywords.pop("inplace", None)
    args = (*(keywords.pop(word) for word in ("input",) if word in keywords), *args)
    given = args[:-1] if isinstance(args[-1], bool) else args  # `inplace`
    result = function(*given, **keywords)
    if not isinstance(result, Element):
        return result
    operands, words = [], []
    for word, value in inspect.signature(function).bind(*given, **keywords).arguments.items():
        literal = value is None or isinstance(value, (bool, str))
        words.append((word, repr(value) if literal else ""))
        operands += [] if literal else [node_of(value)]
    return Element(
        expression.node(expression.CALL, result.node, *operands, value=(name, tuple(words)))
    )


def cast(value: Any, dtype: Any) -> Any:
    """Return the symbol of `value` converted to a dtype."""
    code = codes_of_torch().get(dtype)
    if code is None or not (dtype.is_floating_point or code[0] in "iub") or code.startswith("f8"):
        raise TypeError(f"a pointwise function converts to dtypes of numbers, not to {dtype!r}")
    return Element(expression.node(expression.TO, node_of(value), value=code))


def _unary(name: str) -> Any:
    return lambda self: apply(name, self)


def _binary(name: str) -> Any:
    return lambda self, other: FUNCTIONS[name](self, other)  # noqa: PLW0108  it is filled later


def _reflected(name: str) -> Any:
    return lambda self, other: FUNCTIONS[name](other, self)


def _refused(message: str) -> Any:
    def refuse(self: Element, *_: Any, **__: Any) -> Any:
        raise TypeError(f"`{self}`: {message}")

    return refuse


class Element:
    """A number that is not known yet: Python's operators, and Torch's functions and methods."""

    __slots__ = ("node",)
    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None  # numbers of NumPy leave operators to symbols

    def __init__(self, one: Node) -> None:
        self.node = one

    __add__, __radd__ = _binary("add"), _reflected("add")
    __sub__, __rsub__ = _binary("sub"), _reflected("sub")
    __mul__, __rmul__ = _binary("mul"), _reflected("mul")
    __truediv__, __rtruediv__ = _binary("div"), _reflected("div")
    __floordiv__, __rfloordiv__ = _binary("floor_divide"), _reflected("floor_divide")
    __pow__, __rpow__ = _binary("pow"), _reflected("pow")
    __neg__, __abs__, __invert__ = map(_unary, ("neg", "abs", "bitwise_not"))
    __mod__, __rmod__ = _binary("remainder"), _reflected("remainder")
    __and__, __rand__ = _binary("bitwise_and"), _reflected("bitwise_and")
    __or__, __ror__ = _binary("bitwise_or"), _reflected("bitwise_or")
    __xor__, __rxor__ = _binary("bitwise_xor"), _reflected("bitwise_xor")
    __lt__, __le__, __gt__, __ge__ = map(_binary, ("lt", "le", "gt", "ge"))
    __eq__, __ne__ = _binary("eq"), _binary("ne")
    __bool__ = _refused(_WRITE_WHERE)
    __float__ = __int__ = __index__ = __complex__ = __round__ = __trunc__ = __floor__ = __ceil__ = (
        _refused(_WRITE_TORCH)
    )
    __len__ = __iter__ = __getitem__ = __contains__ = _refused(
        "a pointwise function sees one element at a time, which has no parts"
    )
    __matmul__ = __rmatmul__ = _refused(
        "a pointwise function sees one element at a time, and there are no products of matrices"
    )
    __setitem__ = __delitem__ = _refused("a pointwise function changes nothing in place")

    def __pos__(self) -> Any:
        return self

    def __repr__(self) -> str:
        return expression.as_python(self.node, getattr(_running, "names", ()))

    def __getattr__(self, name: str) -> Any:
        if name in _METHODS:
            return lambda *args, **kwargs: _converted(self, _METHODS[name], args, kwargs)
        if name.startswith("__"):
            raise AttributeError(name)
        function = _function(name, "method")
        return lambda *args, **kwargs: function(self, *args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", str(function)).removeprefix("special_")
        return _function(name, "function")(*args, **(kwargs or {}))


def _converted(value: Element, name: str, args: Any, kwargs: Any) -> Any:
    """Return the result of a method of tensors that converts them."""
    if name != "to":
        return cast(value, getattr(torch, name))
    dtypes = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)]
    if len(dtypes) != 1:
        raise TypeError(f"{value!r}: .to() takes a dtype here, as in x.to(torch.float32)")
    return cast(value, dtypes[0])


def _function(name: str, what: str) -> Callable[..., Any]:
    """Return what a function of Torch means for symbols. Raises TypeError for an unknown one."""
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    if name in _OF_TENSORS.split():
        raise TypeError(
            f"x.{name}: a pointwise function sees one element at a time, for every dtype, shape "
            "and device. Pass what depends on these as an argument; reduce in a kernel of its own"
        )
    plain = name.removesuffix("_")
    if plain in _RANDOM.split():
        raise TypeError(
            f"{name}(): a pointwise function is deterministic: pass the noise as an argument"
        )
    if plain in FUNCTIONS:
        raise TypeError(f"{name}() changes its argument in place: write {plain}()")
    near = "" if hasattr(torch.ops.aten, plain) else meant(plain, FUNCTIONS)  # it is not misspelt
    hint = near or f"; it knows {', '.join(sorted(FUNCTIONS))}"
    raise TypeError(f"a pointwise function has no {what} `{name}`{hint}")
