"""Which form of include/rows.cuh the kernels of rows take, and the shape of their blocks."""

from __future__ import annotations

import math

import torch

VECTOR = 16  # bytes of an access
LONG = 1024  # threads of a block that reads a row twice
DEPTH = 8  # warps of a block whose rows have elements that lie apart


def axis(name, x, dim):
    """Return the dimension as a number from 0 on, or refuse it.

    The numbers are compared one by one, so that the trace of a launch function takes the dimension
    for a constant.
    """
    torch._check(x.dim() >= 1, lambda: f"{name}: x needs at least one dimension, got {x.dim()}")
    for d in range(x.dim() - 1, -1, -1):
        if dim == d or dim == d - x.dim():
            return d
    torch._check(False, lambda: f"{name}: x has {x.dim()} dimensions, and no dimension {dim}")
    return 0


def matrix(x, d):
    """Return rows, columns, and how many elements lie from one of a row to the next."""
    return math.prod(x.shape[:d]), x.shape[d], math.prod(x.shape[d + 1 :])


def has_edges(cols, *tensors):
    """Whether rows begin or end within 16 bytes; tensors: all that are read or written in rows."""
    size = tensors[0].element_size()
    return cols * size % VECTOR != 0 or any(t.data_ptr() % VECTOR != 0 for t in tensors)


def in_registers(cols, size, edges, *, inputs=1, clusters=True):
    """Return lanes of a row, threads of a block, and vectors of a thread for rows in registers.

    size: bytes of an element. edges: see `has_edges`. inputs: how many tensors are read. clusters:
    whether a row may have the blocks of a cluster. None for rows that are too long for it.
    """
    vectors = (cols * size + VECTOR - 1) // VECTOR
    if edges:
        vectors = vectors + 1
    for lanes in (4, 8, 16, 32):
        if lanes * 2 >= vectors:
            return lanes, 64, 2
    for lanes in (32, 64, 128, 256, 512):
        if lanes * 4 >= vectors:
            return lanes, max(lanes, 64), 4
    each = 8 // inputs
    for lanes in (512, 1024, 2048, 4096):
        if lanes * each >= vectors and (clusters or lanes <= 1024):
            return lanes, min(lanes, 1024), each
    return None
