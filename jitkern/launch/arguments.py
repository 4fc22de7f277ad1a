"""Check the arguments of a kernel call against the parameters that the compiler recorded."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jitkern.errors import LaunchError
from jitkern.source.kinds import DTYPES

ALIGNMENT = 64  # bytes: the alignment of every allocation of Torch on any device
SHORT = {
    getattr(torch, dtype.torch): code
    for code, dtype in DTYPES.items()
    if hasattr(torch, dtype.torch)
}
_RANGES = {
    f"{sign}{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1)) if sign == "i" else (0, 2**bits)
    for sign in "iu"
    for bits in (8, 16, 32, 64)
}
_LIMITS = {"f32": 2**128 - 2**103, "f64": 2**1024 - 2**970}  # the first that rounds to infinity


def checked(
    what: str,
    parameters: Sequence[str],
    args: Sequence[Any],
    device: torch.device,
    written: Callable[[], tuple[Sequence[int], Sequence[str]]] = lambda: ((), ()),
) -> Sequence[Any]:
    """Return the arguments of a launch, if each fits the parameter of the kernel.

    written: returns the parameters as messages show them; see `parameters.written`.

    Raises LaunchError for a wrong count, type, dtype or device, and for a number out of range:
    nothing is ever truncated.
    """
    if len(args) != len(parameters):
        listed = ", ".join(written()[1] or parameters)
        raise LaunchError(f"{what} takes {len(parameters)} arguments ({listed}), got {len(args)}")
    for i, (code, arg) in enumerate(zip(parameters, args)):
        fault = _fault(code, arg, device)
        if fault:
            positions, texts = written()
            position = positions[i] if texts else i
            spelled = f" (`{texts[position]}`)" if texts else ""
            raise LaunchError(
                f"{what}: argument {position + 1}{spelled} must be {fault[0]}, got {fault[1]}; "
                f"it takes ({', '.join(texts or parameters)})"
            )
    return args


def _fault(  # noqa: PLR0911  a table of cases
    code: str, arg: Any, device: torch.device
) -> tuple[str, str] | None:
    """Return (the expected argument, the given argument) in words, or None if they agree."""
    if code[:1] == "*":
        if arg is None:
            return None
        if isinstance(arg, torch.Tensor):
            if arg.device.type != device.type or device.index not in (None, arg.device.index):
                return f"a tensor on {device}", f"one on {arg.device}"
            if same_type(code[1:], SHORT.get(arg.dtype, "")):
                return None
            return f"a {DTYPES[code[1:]].torch} tensor", f"a tensor of {arg.dtype}"
    elif isinstance(arg, bool) or code == "bool":
        if isinstance(arg, bool) and code == "bool":
            return None
    elif code in _RANGES:
        if isinstance(arg, int):
            low, high = _RANGES[code]
            return None if low <= arg < high else (f"an integer that fits {code}", str(arg))
    elif code in _LIMITS and isinstance(arg, (int, float)):
        return (f"a number that fits {code}", reprlib.repr(arg)) if _overflows(code, arg) else None
    elif not code:
        return "of a type that launches can pass (no struct or half)", type(arg).__name__
    return "a tensor" if code[:1] == "*" else code, f"{type(arg).__name__} `{arg}`"


def _overflows(code: str, arg: float) -> bool:
    """Whether a finite number would become infinite. A trace guards these comparisons."""
    limit = _LIMITS[code]
    if isinstance(arg, int):
        return not -limit < arg < limit
    return code == "f32" and (limit <= arg < math.inf or -limit >= arg > -math.inf)


def limits_of(code: str) -> tuple[float, float]:
    """Return the least number that a parameter of this code takes, and the first too large."""
    if code == "f64":
        return -math.inf, math.inf
    if code == "f32":
        return -math.nextafter(_LIMITS["f32"], 0), _LIMITS["f32"]
    return _RANGES.get(code, (0, 0))  # a type that no number fits


def same_type(pointee: str, dtype: str) -> bool:
    """Whether a pointer to `pointee` takes a tensor of this dtype.

    True for equal types, for integers (and bool) of one width, and for a type that Torch lacks.
    """
    if pointee in ("", dtype):
        return True
    widths = {"bool": "8"}
    integers = pointee in _RANGES and (dtype in _RANGES or dtype == "bool")
    return integers and pointee[1:] == widths.get(dtype, dtype[1:])
