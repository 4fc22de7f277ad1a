"""The class of a call: what a trace takes for granted of the arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from jitkern.source.dtypes import codes_of_torch

_LONG = 500  # letters of an example, in place of which its digest is kept


def class_of(args: Sequence[Any]) -> tuple[str, ...]:
    """Return the class of a call: what a trace takes for granted of the arguments, as texts.

    A list of tensors counts by its dtypes alone: the guards of a program tell all else.
    """
    return tuple(map(_class_of, args))


def _class_of(arg: Any) -> str:
    if isinstance(arg, list):
        if arg and hasattr(arg[0], "dtype"):
            return f"[{' '.join(sorted({_code(item) for item in arg}))}]"
        return f"[{' '.join(map(_class_of, arg))}]"
    if arg is None or isinstance(arg, (bool, str)):
        return repr(arg)
    return (
        type(arg).__name__ if isinstance(arg, (int, float)) else f"{_code(arg)}[{len(arg.shape)}]"
    )


def _code(tensor: Any) -> str:
    return str(codes_of_torch().get(tensor.dtype, tensor.dtype))


def example_of(args: Sequence[Any]) -> str:
    """Return the numbers of a call as a text: tensor sizes, integers and floats."""
    text = ",".join(map(_example_of, args))
    return text if len(text) < _LONG else hashlib.sha256(text.encode()).hexdigest()


def _example_of(arg: Any) -> str:
    if isinstance(arg, list):
        return f"[{' '.join(map(_example_of, arg))}]"
    if arg is None or isinstance(arg, (bool, int, float, str)):
        return repr(arg)
    return "x".join(map(str, arg.shape))
