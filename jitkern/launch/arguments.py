"""Check the arguments of a kernel call against the parameters that the compiler recorded."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jitkern import launch
from jitkern.errors import LaunchError
from jitkern.launch.resources.tensor_maps import TensorMap
from jitkern.source.dtypes import DTYPES, TENSOR_MAP, codes_of_torch, table_of

ALIGNMENT = 64  # bytes: the alignment of every allocation of Torch on any device


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


def _fault(  # noqa: PLR0911, PLR0912  a table of cases
    code: str, arg: Any, device: torch.device
) -> tuple[str, str] | None:
    """Return (the expected argument, the given argument) in words, or None if they agree."""
    if code[:1] == "*":
        if arg is None:
            return None
        if isinstance(arg, torch.Tensor):
            if arg.device.type != device.type or device.index not in (None, arg.device.index):
                return f"a tensor on {device}", f"one on {arg.device}"
            if same_type(code[1:], codes_of_torch().get(arg.dtype, "")):
                return None
            return f"a {DTYPES[code[1:]].torch} tensor", f"a tensor of {arg.dtype}"
    elif code == TENSOR_MAP:
        wanted = "a tensor map, `k.tensor_map(x, box)`"
        return None if isinstance(arg, TensorMap) else (wanted, type(arg).__name__)
    elif table := table_of(code):
        return _fault_of_table(code, table[:2], arg, device)
    elif isinstance(arg, bool) or code == "bool":
        if isinstance(arg, bool) and code == "bool":
            return None
    elif not code:
        return "of a type that launches can pass (no struct or half)", type(arg).__name__
    elif code[0] == "f":
        if isinstance(arg, (int, float)):
            fits = not _overflows(code, arg)
            return None if fits else (f"a number that fits {code}", reprlib.repr(arg))
    elif isinstance(arg, int):
        low, high = DTYPES[code].limits
        return None if low <= arg < high else (f"an integer that fits {code}", str(arg))
    return "a tensor" if code[:1] == "*" else code, f"{type(arg).__name__} `{arg}`"


def _fault_of_table(
    code: str, wanted: tuple[str, int], arg: Any, device: torch.device
) -> tuple[str, str] | None:
    """Return the same for a table of tensors; wanted: its element type and its capacity."""
    element, capacity = wanted
    kind = f"{'Table' if code[0] == '@' else 'Pointers'}<{element or '…'}, {capacity}>"
    if not isinstance(arg, launch.resources.tables.Table):
        return f"a table of k.tables(), for {kind}", type(arg).__name__
    if not same_type(element, codes_of_torch().get(arg.dtype, "")):
        return f"a table of {DTYPES[element].torch} tensors", f"one of {arg.dtype}"
    if arg.capacity != capacity:
        return f"a {kind}", f"a table of capacity {arg.capacity}: pass its `capacity` as N"
    fault = arg.fault(device)
    return (f"a {kind} of tensors on {device}", f"one where {fault}") if fault else None


def _overflows(code: str, arg: float) -> bool:
    """Whether a finite number would become infinite. A trace guards these comparisons."""
    limit = DTYPES[code].limits[1]
    if isinstance(arg, int):
        return not -limit < arg < limit
    return code == "f32" and (limit <= arg < math.inf or -limit >= arg > -math.inf)


def limits_of(code: str) -> tuple[float, float]:
    """Return the least number that a parameter of this code takes, and the first too large."""
    if code == "f64":
        return -math.inf, math.inf
    low, high = DTYPES[code].limits if code else (0, 0)  # a struct, which no number fits
    return (-math.nextafter(high, 0), high) if code == "f32" else (low, high)


def same_type(pointee: str, dtype: str) -> bool:
    """Whether a pointer to `pointee` takes a tensor of this dtype.

    True for equal types, for integers (and bool) of one width, and for a type that Torch lacks.
    """
    if pointee in ("", dtype):
        return True
    dtype = "u8" if dtype == "bool" else dtype
    integers = pointee[0] in "iu" and dtype[:1] in ("i", "u")
    return integers and pointee[1:] == dtype[1:]
