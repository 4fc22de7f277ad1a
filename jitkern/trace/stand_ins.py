"""The parts of Torch, `math` and the builtins that a launch function sees while it is traced.

Functions that do not take a Symbol or a TensorProxy have stand-ins that do. Values that cannot be
followed are traps, which end the trace when they are touched.
"""

from __future__ import annotations

import functools
import math
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from jitkern.launch.symbols import Unsupported, is_symbol
from jitkern.launch.tuned import changed
from jitkern.trace.copying import copies
from jitkern.trace.fast_check import check
from jitkern.trace.lists import TensorList
from jitkern.trace.scope import Scope, overrides_of_tensors
from jitkern.trace.tensor_proxy import (
    ANSWERED,
    Address,
    Shape,
    TensorProxy,
    allocated,
    default_dtype,
)
from jitkern.trace.values import is_plain

Function = Callable[..., Any]
SUMS_ROUND_ONCE = sys.version_info >= (3, 12)


def traceable(function: Function, scope: Scope) -> Function:
    """Return a copy of a launch function over stand-ins and traps."""
    for name in ("__getitem__", *sorted(scope.attributes)):
        here = overrides_of_tensors().get(name)
        if name in ANSWERED and here and here is not getattr(torch._C.TensorBase, name, None):
            raise Unsupported(f"`Tensor.{name}`, which is not PyTorch's own, cannot be traced")
    seen = {id(value): _STAND_INS[n] for n, value in scope.known.items() if n in _STAND_INS}
    copied = iter(copies(scope, seen, Trap))
    return changed(function, lambda _: next(copied))


class Trap:
    """A value that no trace follows: any use of the value ends the trace."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        object.__setattr__(self, "_what", what)

    def _refuse(self, *_: object, **__: object) -> Any:
        raise Unsupported(object.__getattribute__(self, "_what"))

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._refuse()  # type: ignore[no-any-return]

    __getattr__ = __setattr__ = __delattr__ = __call__ = _refuse
    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = _refuse
    __bool__ = __int__ = __float__ = __complex__ = __index__ = __hash__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __divmod__ = __rdivmod__ = _refuse
    __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __lshift__ = __rlshift__ = _refuse
    __rshift__ = __rrshift__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse
    __neg__ = __pos__ = __abs__ = __invert__ = __round__ = __floor__ = __ceil__ = _refuse
    __repr__ = __str__ = __format__ = __bytes__ = __enter__ = __exit__ = _refuse
    __next__ = __reversed__ = __trunc__ = _refuse


class _Type(type):
    """A stand-in for the class `real`, whose values a trace follows."""

    real: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            return cls.made(args[0])
        return cls.real(*args, **kwargs)

    def __eq__(cls, other: object) -> bool:
        return cls.real is getattr(other, "real", other) if other is not cls else True

    def __hash__(cls) -> int:
        return hash(cls.real)

    def __getattr__(cls, name: str) -> Any:
        if cls.real is torch.Tensor:  # of the real classes alone, anybody may set its attributes
            raise Unsupported(f"`{name}` of the class torch.Tensor cannot be traced")
        return getattr(cls.real, name)

    def __or__(cls, other: Any) -> Any:
        return cls.real | _real(other)

    def __ror__(cls, other: Any) -> Any:
        return _real(other) | cls.real

    def __repr__(cls) -> str:
        return repr(cls.real)


class _Int(metaclass=_Type):
    real = int

    @staticmethod
    def made(value: Any) -> Any:
        return value.as_integer() if is_symbol(value) else int(value)


class _Float(metaclass=_Type):
    real = float

    @staticmethod
    def made(value: Any) -> Any:
        return value.as_real() if is_symbol(value) else float(value)


class _Size(metaclass=_Type):
    real = torch.Size

    @staticmethod
    def made(sizes: Any) -> Any:
        return Shape(sizes)


class _Tensor(metaclass=_Type):
    real = torch.Tensor

    @staticmethod
    def made(_: Any) -> Any:
        raise Unsupported("torch.Tensor() cannot be traced: use torch.empty")


for _stand_in in (_Int, _Float, _Size, _Tensor):
    _stand_in.__name__ = _stand_in.real.__name__
_TYPES: dict[Any, Any] = {int: _Int, float: _Float, torch.Size: _Size}
_CLASSES: dict[Any, Any] = {  # of values of this package, those that Python's answers are of
    Address: int, Shape: torch.Size, TensorList: list,
}  # fmt: skip


def _real(kind: Any) -> Any:
    return kind.real if isinstance(kind, _Type) else kind


def _type_of(*args: Any) -> Any:
    if len(args) != 1 or type(args[0]) is TensorProxy:
        raise Unsupported("type() of a tensor cannot be traced: C does not know its class")
    (value,) = args
    kind: Any = type(value.hint) if is_symbol(value) else type(value)
    if kind in _CLASSES:
        kind = _CLASSES[kind]
    elif not is_plain(value) and (kind.__module__ != "builtins" or kind is types.FunctionType):
        raise Unsupported("type() of anything but numbers, texts and containers cannot be traced")
    return _TYPES.get(kind, kind)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)  # which asks a trap for its class


def _is_instance(value: Any, kinds: Any) -> bool:
    union: Any = kinds if isinstance(kinds, (tuple, types.UnionType)) else (kinds,)
    listed = tuple(map(_real, getattr(union, "__args__", union)))
    special = [kind for kind in listed if type(kind) is not type and kind is not torch.Tensor]
    if type(value) is TensorProxy and special:
        raise Unsupported(f"isinstance() of a tensor and {special[0]!r} cannot be traced")
    return isinstance(value, listed)


def _length(value: Any) -> Any:
    if type(value) is not TensorProxy:
        return len(value)
    if not value.ndim:
        raise TypeError("len() of a 0-d tensor")
    return value.shape[0]


def _hash(value: Any) -> int:
    """Return hash() of numbers. Raises Unsupported for text, whose hash varies by process."""
    items = value if type(value) in (tuple, Shape) else (value,)
    for item in items:
        if not is_symbol(item) and type(item) not in (int, bool, float):
            raise Unsupported("hash() of more than numbers cannot be traced")
    return hash(value)


def _square_root(value: Any) -> Any:
    return value.square_root() if is_symbol(value) else math.sqrt(value)


def _is_nan(value: Any) -> bool:
    return bool(value != value) if is_symbol(value) else math.isnan(value)  # noqa: PLR0124


def _is_infinite(value: Any) -> bool:
    if not is_symbol(value):
        return math.isinf(value)
    return bool(value == math.inf) or bool(value == -math.inf)


def _is_finite(value: Any) -> bool:
    return not _is_nan(value) and not _is_infinite(value)


def _finfo(*args: Any, **kwargs: Any) -> Any:
    return torch.finfo(*args, **kwargs) if args or kwargs else torch.finfo(default_dtype())


def _sum(items: Any, /, start: Any = 0) -> Any:
    """Return sum(). Raises Unsupported where Python rounds a sum of floats once, at its end."""
    added = [start, *items]
    kinds = {type(value.hint) if is_symbol(value) else type(value) for value in added}
    if SUMS_ROUND_ONCE and float in kinds and any(map(is_symbol, added)):
        raise Unsupported("sum() of floats cannot be traced: write a + b")
    return sum(added[1:], start)


def _method(name: str) -> Function:
    """Return the stand-in of a function of Torch that is a method of tensors too."""

    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) is not TensorProxy:
            raise Unsupported(f"torch.{name} of a tensor from outside this call cannot be traced")
        return getattr(tensor, name)(*args, **kwargs)

    return call


_METHODS = (
    "clone", "flatten", "is_complex", "is_floating_point", "narrow", "numel", "permute", "reshape",
    "select", "squeeze", "t", "transpose", "unsqueeze",
)  # fmt: skip
_ALLOCATORS = ("empty", "empty_like", "empty_strided", "zeros", "zeros_like")


_STAND_INS: Mapping[str, Any] = {  # by the names of what they replace
    **{f"torch.{name}": _method(name) for name in _METHODS},
    **{f"torch.{name}": functools.partial(allocated, name) for name in _ALLOCATORS},
    "torch._check": check, "torch.is_tensor": _is_tensor, "torch.Size": _Size,
    "torch.Tensor": _Tensor,
    "builtins.type": _type_of, "builtins.isinstance": _is_instance, "builtins.len": _length,
    "builtins.hash": _hash, "builtins.int": _Int, "builtins.float": _Float,
    "math.sqrt": _square_root, "math.isnan": _is_nan, "math.isinf": _is_infinite,
    "math.isfinite": _is_finite, "builtins.sum": _sum, "torch.finfo": _finfo,
}  # fmt: skip
