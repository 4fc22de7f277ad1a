"""Tensors as flat parameters: address, sizes, strides; and the classes they are compiled for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from jitkern.errors import LaunchError
from jitkern.source.argument_classes import ALIGNMENT, ONE, ZERO, TensorClass
from jitkern.source.dtypes import codes_of_torch


def class_of(where: str, arg: Any, *, strided: bool) -> str:
    """Return the class that a kernel is compiled for, of an argument. Raises LaunchError."""
    if isinstance(arg, torch.Tensor):
        code = codes_of_torch().get(arg.dtype)
        if not code:
            raise LaunchError(f"{where}: no kernel knows {arg.dtype}: pass a view of another dtype")
        sizes = tuple(ALIGNMENT if size % ALIGNMENT == 0 else 1 for size in arg.shape)
        elements = ALIGNMENT // arg.itemsize
        strides = tuple(
            ONE if (strided or last) and stride == 1
            else ZERO if strided and stride == 0
            else str(elements if stride % elements == 0 else 1)
            for stride, last in _strides_of(arg, strided=strided)
        )  # fmt: skip
        aligned = address_of(arg) % ALIGNMENT == 0
        return TensorClass(code, ALIGNMENT if aligned else 1, sizes, strides).text
    for kind in (bool, int, float):
        if isinstance(arg, kind):
            return kind.__name__
    raise LaunchError(
        f"{where}: a kernel takes tensors and numbers, not {type(arg).__name__} `{arg}`: "
        "pass the items of a list or tuple one by one"
    )


def flattened(args: Sequence[Any], *, strided: bool) -> list[Any]:
    """Return the arguments with the sizes and strides of each tensor behind it."""
    flat: list[Any] = []
    for arg in args:
        flat.append(arg)
        if isinstance(arg, torch.Tensor):
            flat += arg.shape
            flat += [stride for stride, _ in _strides_of(arg, strided=strided)]
    return flat


def _strides_of(tensor: torch.Tensor, *, strided: bool) -> Iterator[tuple[int, bool]]:
    """Yield each stride of a tensor, and whether it is the last one.

    Those of a contiguous tensor follow from its sizes: its own may be any where a size is 1.
    """
    sizes = tensor.shape
    for place in range(len(sizes)):
        stride = 1
        for size in sizes[place + 1 :]:
            stride = stride * size
        yield tensor.stride(place) if strided else stride, place == len(sizes) - 1


def address_of(tensor: torch.Tensor) -> int:
    """Return a tensor's address; for a meta tensor, its offset into an aligned allocation."""
    if tensor.device.type == "meta":
        return int(tensor.storage_offset()) * tensor.element_size()
    return tensor.data_ptr()
