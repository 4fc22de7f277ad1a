"""Arguments of a launch from Python, checked by functions that are made for a kernel's parameters.

These functions accept arguments that plainly fit; `arguments.checked` looks at all others, and says
what is wrong with them, if anything is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jitkern.launch.arguments import limits_of, same_type
from jitkern.launch.call import is_lazy
from jitkern.source.dtypes import TENSOR_MAP, codes_of_torch, table_of

Pack = Callable[[Any], Any]


class Misfit(Exception):
    """An argument does not plainly fit its parameter."""


def packed(packs: Sequence[Pack], args: Sequence[Any]) -> list[Any] | None:
    """Return the values to pass, addresses for tensors; None if `arguments.checked` must look."""
    if len(packs) != len(args):
        return None
    try:
        return [pack(arg) for pack, arg in zip(packs, args)]
    except (Misfit, AttributeError, TypeError):
        return None


def packs_of(parameters: Sequence[str], device: torch.device) -> list[Pack]:
    """Return a packing function for each parameter."""
    return [_pack(code, device) for code in parameters]


def _pack(code: str, device: torch.device) -> Pack:
    if code[:1] == "*":
        return _pointer(code[1:], device)
    if code == TENSOR_MAP:
        return lambda tensor_map: tensor_map.encoded  # an AttributeError for anything else
    if table_of(code):
        return _refused
    kind: Any = bool if code == "bool" else float if code[:1] == "f" else int
    low, high = (-math.inf, math.inf) if kind is bool else limits_of(code)

    def number(value: Any) -> Any:
        if type(value) is not kind or not low <= value < high:
            raise Misfit
        return value

    return number


def _refused(_: Any) -> Any:
    raise Misfit  # all tensors of a table are checked anyway


def _pointer(pointee: str, device: torch.device) -> Pack:
    dtypes = frozenset(d for d, code in codes_of_torch().items() if same_type(pointee, code))
    index = -1 if device.type == "cpu" else device.index  # as Tensor.get_device returns it

    def address(tensor: Any) -> int | None:
        if tensor is None:
            return None
        if tensor.dtype not in dtypes or tensor.get_device() != index or is_lazy(tensor):
            raise Misfit
        value: int = tensor.data_ptr()
        return value

    return address
