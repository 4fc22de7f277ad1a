"""Values that mean the same in every process: plain ones, known functions, and known types."""

from __future__ import annotations

import _operator
import builtins
import functools
import hashlib
import math
import types
from collections.abc import Callable
from typing import Any

import torch

ABSENT: Any = object()  # stands for the value of a name that a namespace lacks
_OF_TORCH = (  # beside its dtypes, layouts and memory formats
    "Size", "Tensor", "_check", "clone", "device", "dtype", "empty", "empty_like", "empty_strided",
    "finfo", "flatten", "iinfo", "is_complex", "is_floating_point", "is_tensor", "narrow", "numel",
    "permute", "promote_types", "reshape", "select", "squeeze", "t", "transpose", "unsqueeze",
    "zeros", "zeros_like",
)  # fmt: skip
_BUILTINS = (
    "abs", "all", "any", "bin", "bool", "bytes", "chr", "complex", "dict", "divmod", "enumerate",
    "filter", "float", "format", "frozenset", "hash", "hex", "int", "isinstance", "iter", "len",
    "list", "map", "max", "min", "next", "oct", "ord", "pow", "range", "repr", "reversed", "round",
    "set", "slice", "sorted", "str", "sum", "tuple", "type", "zip",
)  # fmt: skip
_HEAP_TYPE = 1 << 9  # of a class that is made at run time
_PLAIN = (
    bool, int, float, complex, str, bytes, range, type(None), type(...), type(NotImplemented),
    torch.dtype, torch.layout, torch.memory_format, torch.device,
)  # fmt: skip


class Pure:
    """A function whose result is plain and follows from its arguments, which are plain; memoized.

    A launch function may call it: a trace holds the result for constant.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = f"{function.__module__}.{function.__qualname__}"
        self._memo = functools.lru_cache(maxsize=1024)(function)

    def __call__(self, *args: Any) -> Any:
        """Return the result for these arguments."""
        return self._memo(*args)


def is_plain(value: object) -> bool:
    """Whether a value cannot change and its repr determines it; false for subclasses of numbers."""
    if type(value) in (tuple, frozenset):
        return all(map(is_plain, value))  # type: ignore[call-overload]
    return type(value) in _PLAIN


def homes_of(function: types.FunctionType) -> tuple[str, str]:
    """Return the `__module__` of a function, which `wraps` copies, and the module of its code."""
    return str(function.__module__), str(function.__globals__.get("__name__"))


def is_ordered(value: Any) -> bool:
    """Whether a plain value holds no set: a set has another order in each process.

    That of texts follows their hashes. That of integers follows how the set was made, and a `.pyc`
    makes one in another way than the compiler of Python did.
    """
    if type(value) is tuple:
        return all(map(is_ordered, value))
    return type(value) is not frozenset


_HARMLESS = (id(min), id(max))


def is_inert(value: Any) -> bool:
    """Whether a value that is not followed neither reads nor changes the names of functions.

    Known to be so are what Torch defines, functions of C other than `globals`, `eval` and their
    like, and containers of plain values.
    """
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is not builtins
    if type(value) in (list, set):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, (*value, *value.values())))
    if isinstance(value, functools.partial):  # torch.export puts such in place of min and max
        bound = (*value.args, *value.keywords.values())
        return is_inert(value.func) and all(id(one) in _HARMLESS or is_inert(one) for one in bound)
    homes: tuple[str, ...] = ("",)
    if isinstance(value, types.FunctionType):
        homes = homes_of(value)
    elif isinstance(value, type):
        homes = (value.__module__,)
    elif isinstance(value, types.ModuleType):
        homes = (getattr(value, "__name__", ""),)
    return all(f"{home}.".startswith("torch.") for home in homes)


def known_name(value: object) -> str:
    """Return the name of a function or type whose result never changes; "" for other values.

    The value itself tells, as the modules may hold others: torch.export replaces `min`, and a
    profiler `torch.empty`.
    """
    if isinstance(value, types.BuiltinFunctionType):
        home, name = value.__self__, value.__name__
        if home is math and name == "sumprod":  # which rounds a sum of floats once
            return ""
        if home is math or home is _operator or (home is builtins and name in _BUILTINS):
            return f"{home.__name__}.{name}"
    elif isinstance(value, type) and value.__module__ == "builtins":
        is_own = value.__name__ in _BUILTINS and not value.__flags__ & _HEAP_TYPE
        if is_own or issubclass(value, BaseException):
            return f"builtins.{value.__name__}"
    elif isinstance(value, Pure):
        return value.name
    elif isinstance(value, types.FunctionType):
        name = value.__code__.co_name
        if name in _OF_TORCH and value.__globals__ is vars(torch):
            return f"torch.{name}"
    return _of_torch().get(id(value), "")


@functools.cache
def _of_torch() -> dict[int, str]:
    """Return the names of Torch's types and C functions that are known, by ids of those that last.

    They come from where Torch defines them.
    """
    homes: Any = (torch._tensor, torch._C, torch._C._VariableFunctions)
    return {
        id(getattr(home, name)): f"torch.{name}"
        for home in homes
        for name in _OF_TORCH
        if hasattr(home, name)
    }


def spelled(value: Any) -> str:
    """Return a text of a plain value, different for different values, the same in each process."""
    if type(value) is frozenset:
        return f"frozenset({sorted(map(spelled, value))})"
    if type(value) is tuple:
        return f"({', '.join(map(spelled, value))})"
    return f"{type(value).__name__} {value!r}"


def spelled_code(code: types.CodeType) -> str:
    """Return a digest of a code object without its file names and line numbers."""
    constants = [
        spelled_code(c) if isinstance(c, types.CodeType) else spelled(c) for c in code.co_consts
    ]
    parts = (
        code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars,
        code.co_cellvars, code.co_flags, code.co_argcount, code.co_posonlyargcount,
        code.co_kwonlyargcount, getattr(code, "co_exceptiontable", b""),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode(errors="surrogatepass")).hexdigest()
