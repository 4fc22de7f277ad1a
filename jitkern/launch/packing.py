"""Arguments of a launch from Python, quickly checked against a kernel's parameters.

`ArgumentPacker` accepts arguments that plainly fit; `arguments.checked` looks at all others, and
says what is wrong with them, if anything is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jitkern.launch.arguments import limits_of, same_type
from jitkern.source.dtypes import TENSOR_MAP, codes_of_torch

Pack = Callable[[Any], Any]


class ArgumentPacker:
    """The packing of arguments for these parameters, none a table, for kernels on a device.

    strided: whether the kernels take tensors of any strides.
    """

    def __init__(self, parameters: Sequence[str], device: torch.device, *, strided: bool) -> None:
        self._index = -1 if device.type == "cpu" else device.index  # as Tensor.get_device says
        self._kinds = [_kind_of(code) for code in parameters]
        self._strided = strided

    def packed(self, args: Sequence[Any]) -> list[Any] | None:
        """Return the values to pass, addresses for tensors; None if other checks must look."""
        if len(args) != len(self._kinds):
            return None
        values: list[Any] = []
        index = self._index
        try:
            for (dtypes, pack), arg in zip(self._kinds, args):
                if pack:
                    values.append(pack(arg))
                elif arg is None:
                    values.append(None)
                elif (
                    arg.dtype not in dtypes
                    or arg.get_device() != index
                    or arg.is_neg()  # `is_lazy`, written out
                    or arg.is_conj()
                    or arg._is_zerotensor()
                    or not (self._strided or arg.is_contiguous())
                ):
                    return None
                else:
                    values.append(arg.data_ptr())
        except (AttributeError, TypeError):  # it does not plainly fit
            return None
        return values


def _kind_of(code: str) -> tuple[frozenset[torch.dtype], Pack | None]:
    """Return the dtypes that a pointer takes; for other parameters, a function that packs."""
    if code[:1] == "*":
        pointee = code[1:]
        return frozenset(d for d, c in codes_of_torch().items() if same_type(pointee, c)), None
    return frozenset(), _pack(code)


def _pack(code: str) -> Pack:
    if code == TENSOR_MAP:
        return lambda tensor_map: tensor_map.encoded  # an AttributeError for anything else
    kind: Any = bool if code == "bool" else float if code[:1] == "f" else int
    low, high = (-math.inf, math.inf) if kind is bool else limits_of(code)

    def number(value: Any) -> Any:
        if type(value) is not kind or not low <= value < high:
            raise TypeError
        return value

    return number
