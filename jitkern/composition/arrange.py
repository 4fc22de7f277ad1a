"""Layouts of a pointwise call: Torch's rules for shapes and strides.

These functions run within launch functions, so a trace follows them: they ask for sizes and strides
only, and a comparison is a guard. Dimensions are listed innermost first, unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

MAX_RANK = 6  # of what a strided kernel walks over


def shape_of(name: str, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shape, outermost first, that these tensors broadcast to.

    Raises RuntimeError if they do not.
    """
    sizes: list[Any] = []
    rank = max([tensor.dim() for tensor in tensors])
    for back in range(rank, 0, -1):
        size: Any = 1
        for tensor in tensors:
            if tensor.dim() >= back:
                own = tensor.shape[tensor.dim() - back]
                if size == 1:
                    size = own
                else:
                    torch._check(
                        own in (size, 1),
                        lambda: (
                            f"{name}: the shapes "
                            f"{', '.join([str(list(t.shape)) for t in tensors])} do not broadcast"
                        ),
                    )
        sizes.append(size)
    return tuple(sizes)


def all_contiguous(tensors: Sequence[Any]) -> bool:
    """Whether all tensors are contiguous and of one shape."""
    shape = tensors[0].shape
    for tensor in tensors:
        if tensor.dim() != len(shape) or not tensor.is_contiguous():
            return False
    return all(tensor.shape == shape for tensor in tensors[1:])


def steps_of(tensor: Any, shape: Sequence[Any]) -> list[Any]:
    """Return the strides, outermost first, of a tensor that is broadcast to a shape."""
    missing = len(shape) - tensor.dim()
    steps: list[Any] = [0] * missing
    for size, own, stride in zip(shape[missing:], tensor.shape, tensor.stride()):
        steps.append(0 if own == 1 and size != 1 else stride)
    return steps


def order_of(shape: Sequence[Any], steps: Sequence[Sequence[Any]]) -> list[int]:
    """Return the dimensions, innermost in memory first.

    This is TensorIterator::reorder_dimensions (aten/src/ATen/TensorIterator.cpp): an insertion sort
    by swaps, by the strides of the first tensor that tells two dimensions apart.
    """
    order = list(range(len(shape) - 1, -1, -1))
    for at in range(1, len(order)):
        own = at
        for other in range(at - 1, -1, -1):
            answer = _outer(shape, steps, order[other], order[own])
            if answer > 0:
                order[other], order[own] = order[own], order[other]
                own = other
            elif answer < 0:
                break
    return order


def _outer(shape: Sequence[Any], steps: Sequence[Sequence[Any]], a: int, b: int) -> int:
    """Return 1 if dimension `a` must be outside of `b`, -1 if inside, 0 if nothing tells."""
    for own in steps:
        if own[a] == 0 or own[b] == 0:
            continue
        if own[a] < own[b]:
            return -1
        if own[a] > own[b]:
            return 1
        if shape[a] > shape[b]:
            return 1
    return 0


def dense_steps(shape: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """Return strides, outermost first, of new memory with this order of dimensions."""
    found: list[Any] = [0 for _ in shape]
    step: Any = 1
    for dim in order:
        found[dim] = step
        step = step * shape[dim]
    return found


def collapsed(
    shape: Sequence[Any], order: Sequence[int], steps: Sequence[Sequence[Any]]
) -> tuple[list[Any], list[list[Any]]]:
    """Return as few sizes as walk over the same elements, and the strides of each tensor."""
    sizes: list[Any] = []
    kept: list[list[Any]] = [[] for _ in steps]
    for dim in order:
        size, own = shape[dim], [tensor[dim] for tensor in steps]
        if size == 1:
            continue
        if sizes and all(k[-1] * sizes[-1] == step for k, step in zip(kept, own)):
            sizes = [*sizes[:-1], sizes[-1] * size]
        else:
            sizes = [*sizes, size]
            kept = [[*k, step] for k, step in zip(kept, own)]
    if not sizes:
        return [1], [[1] for _ in steps]
    return sizes, kept
