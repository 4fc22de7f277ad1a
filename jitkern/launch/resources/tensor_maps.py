"""Tensor maps: descriptors by which a kernel has the tensor memory accelerator (TMA) copy tiles.

The rules are those of cuTensorMapEncodeTiled in the CUDA driver API. A trace follows the checks,
whose answers become guards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from jitkern.errors import LaunchError
from jitkern.named_tuple import NamedTuple
from jitkern.source.dtypes import codes_of_torch
from jitkern.source.gpus import capability_of
from jitkern.target import Target

LONGEST_BOX = 256  # elements in a dimension
RANKS = 5
SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}  # CUtensorMapSwizzle
PROMOTIONS = {"none": 0, "64B": 1, "128B": 2, "256B": 3}  # CUtensorMapL2promotion
FILLS = {"zeros": 0, "nan": 1}  # CUtensorMapFloatOOBfill
_TYPES = {  # CUtensorMapDataType, by the codes of dtypes
    "bool": 0, "u8": 0, "i8": 0, "f8e4m3": 0, "f8e5m2": 0, "u16": 1, "i16": 1, "u32": 2, "i32": 3,
    "u64": 4, "i64": 5, "f16": 6, "f32": 7, "f64": 8, "bf16": 9,
}  # fmt: skip


class TensorMap:
    """An argument for a parameter `const __grid_constant__ CUtensorMap`.

    encoded: its 128 bytes; while a launch function is traced, the register of its address. tensor:
    what it describes, which stays alive with the map.
    """

    def __init__(self, tensor: Any, encoded: Any) -> None:
        self.tensor = tensor
        self.encoded = encoded

    def __repr__(self) -> str:
        return "k.tensor_map(...)"


class TensorMapOptions(NamedTuple):
    """Options of a map other than sizes, strides and box, as the driver's numbers."""

    type: int
    rank: int
    swizzle: int
    promotion: int
    fill: int


class Layout(NamedTuple):
    """The sizes of a tensor and its strides in bytes, without the innermost; innermost first."""

    sizes: Sequence[Any]
    strides: Sequence[Any]


def options_of(
    target: Target, x: Any, box: Sequence[Any], swizzle: str, l2_promotion: str, oob_fill: str
) -> TensorMapOptions:
    """Return the options of a map, checked as far as they depend on no size. Raises LaunchError."""
    if target.device != "cuda" or capability_of(target) < (9, 0):
        raise LaunchError(
            f"k.tensor_map() is for GPUs from sm_90 on, and this launch is for {target}: read the "
            "tensor without TMA there, in a launch function or a branch of its own"
        )
    if not isinstance(x, torch.Tensor):
        raise LaunchError(f"k.tensor_map() takes a tensor first, got {type(x).__name__}")
    code = codes_of_torch().get(x.dtype, "")
    if code not in _TYPES:
        raise LaunchError(f"k.tensor_map(): TMA copies no {x.dtype}: pass a view as another dtype")
    rank = x.dim()
    if not 1 <= rank <= RANKS:
        raise LaunchError(f"k.tensor_map(): x must have 1 to {RANKS} dimensions, got {rank}")
    for name, given, known in (
        ("swizzle", swizzle, SWIZZLES), ("l2_promotion", l2_promotion, PROMOTIONS),
        ("oob_fill", oob_fill, FILLS),
    ):  # fmt: skip
        if given not in known:
            listed = ", ".join(map(repr, known))
            raise LaunchError(f"k.tensor_map({name}={given!r}): there are {listed}")
    if oob_fill == "nan" and _TYPES[code] < _TYPES["f16"]:
        raise LaunchError(
            f"k.tensor_map(oob_fill='nan') of {x.dtype}: TMA knows the NaN of larger floats alone"
        )
    _check_box(x, box, rank, swizzle)
    return TensorMapOptions(
        _TYPES[code], rank, SWIZZLES[swizzle], PROMOTIONS[l2_promotion], FILLS[oob_fill]
    )


def _check_box(x: Any, box: Sequence[Any], rank: int, swizzle: str) -> None:
    if not isinstance(box, (tuple, list)) or len(box) != rank:
        raise LaunchError(
            f"k.tensor_map(): `box` must have a size for each of the {rank} dimensions of x, in "
            f"their order, got {box!r}"
        )
    if not all(isinstance(n, int) and 1 <= n <= LONGEST_BOX for n in box):
        raise LaunchError(
            f"k.tensor_map(): each size of `box` must be 1 to {LONGEST_BOX} elements, got {box!r}: "
            "copy a larger tile in several steps"
        )
    inner = box[-1] * x.dtype.itemsize
    if inner % 16 != 0:
        raise LaunchError(
            f"k.tensor_map(): the last size of `box` must be a multiple of 16 bytes, got {inner}: "
            f"{box[-1]} elements of {x.dtype}"
        )
    if swizzle != "none" and inner > int(swizzle[:-1]):
        raise LaunchError(
            f"k.tensor_map(swizzle={swizzle!r}): the last size of `box` must be {swizzle[:-1]} "
            f"bytes at most, got {inner}: make the box narrower, or the swizzle wider"
        )


def layout_of(x: Any) -> Layout:
    """Return the layout of a tensor, checked. Raises LaunchError."""
    size = x.dtype.itemsize
    rank = x.dim()
    for d in range(rank):
        if not 1 <= x.shape[d] <= 2**32:
            raise LaunchError(
                f"k.tensor_map(): TMA copies tensors of 1 to 2**32 elements in a dimension, got "
                f"{tuple(x.shape)}: launch nothing for an empty tensor"
            )
    strides: list[Any] = []
    for d in reversed(range(rank)):
        stride = x.stride(d)
        if x.shape[d] == 1:
            stride = 16 // size if d < rank - 1 else 1  # is never used
        if d == rank - 1:
            if stride != 1:
                raise LaunchError(
                    "k.tensor_map(): the elements of the last dimension of x must lie side by "
                    f"side, got strides {tuple(x.stride())}: pass x.contiguous(), or transpose in "
                    "the kernel"
                )
        elif stride * size % 16 != 0 or not 0 <= stride * size < 2**40:
            raise LaunchError(
                "k.tensor_map(): all strides of x but the last must be multiples of 16 bytes, "
                f"below 2**40, got {tuple(x.stride())} elements of {size} bytes: pad the rows of x"
            )
        else:
            strides.append(stride * size)
    if x.data_ptr() % 16 != 0:
        raise LaunchError(
            "k.tensor_map(): the address of x must be a multiple of 16 bytes: pass x.clone(), or "
            "begin its slice at another element"
        )
    return Layout([x.shape[d] for d in reversed(range(rank))], strides)
