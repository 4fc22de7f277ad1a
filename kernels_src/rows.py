"""Which form of include/rows.cuh the kernels of rows take, and the shape of their blocks."""

from __future__ import annotations

import math

import torch

from jitkern.kernels_src.elements import VECTOR, blocks, check_floating

SHORT = (  # forms of rows of up to 32 KB, see `on_chip`
    (4, 64, 2, 0), (8, 64, 2, 0), (16, 64, 2, 0), (32, 64, 2, 0), (32, 64, 4, 0), (64, 64, 4, 0),
    (128, 128, 4, 0), (256, 256, 4, 0), (512, 512, 4, 0),
)  # fmt: skip
LONG = 1024  # threads of a block that reads a row twice
DEPTH = 8  # warps of a block whose rows have elements that lie apart


def check(name, x, *alike):
    """Refuse a tensor without rows of floating point, and tensors that are not like it."""
    torch._check(x.dim() >= 1, lambda: f"{name}: x needs at least one dimension, got {x.dim()}")
    check_floating(name, "x", x.dtype)
    for other in alike:
        torch._check(
            other.shape == x.shape and other.dtype == x.dtype,
            lambda other=other: (
                f"{name}: all must be like x, {x.dtype} of shape {tuple(x.shape)}, "
                f"got {other.dtype} of shape {tuple(other.shape)}"
            ),
        )


def axis(name, x, dim):
    """Return the dimension as a number from 0 on, or refuse it.

    The numbers are compared one by one, so that the trace of a launch function takes the dimension
    for a constant.
    """
    check(name, x)
    for d in range(x.dim() - 1, -1, -1):
        if dim == d or dim == d - x.dim():
            return d
    torch._check(False, lambda: f"{name}: x has {x.dim()} dimensions, and no dimension {dim}")
    return 0


def matrix(x, d):
    """Return rows, columns, and how many elements lie from one of a row to the next."""
    return math.prod(x.shape[:d]), x.shape[d], math.prod(x.shape[d + 1 :])


def has_edges(cols, *tensors):
    """Whether rows begin or end within 16 bytes.

    tensors: all that are read or written in rows, the first of the size that counts; None are left
    out.
    """
    size = tensors[0].element_size()
    known = [t for t in tensors if t is not None]
    return cols * size % VECTOR != 0 or any(t.data_ptr() % VECTOR != 0 for t in known)


def launch(k, kernels, template, args, rows, cols, tensors, *, inputs=1, weighted=False, last=()):
    """Launch one of two kernels of rows: `rows_on_chip`, or `rows_read_twice` for longer ones.

    args, last: the arguments before and after the numbers of rows and columns. tensors: see
        `has_edges`. inputs, weighted: see `on_chip`.
    """
    if k.fake:
        return
    first, long = kernels
    edges = has_edges(cols, *tensors)
    size = tensors[0].element_size()
    form = on_chip(k, cols, size, edges, inputs=inputs, weighted=weighted)
    template = {**template, "EDGES": edges}
    if form is None:
        long[{**template, "THREADS": LONG}](*args, cols, *last, grid=rows, block=LONG)
        return
    lanes, threads, registers, shared = form
    keywords = {"grid": blocks(rows * lanes, threads), "block": threads}
    if shared:
        keywords["smem"] = shared * inputs * threads * VECTOR
    if lanes > threads:
        keywords["cluster"] = lanes // threads
    shape = {"LANES": lanes, "THREADS": threads, "VPT": registers, "MORE": shared}
    first[{**template, **shape}](*args, rows, cols, *last, **keywords)


def on_chip(k, cols, size, edges, *, inputs=1, weighted=False):
    """Return how `rows_on_chip` reads rows once; None for rows that are too long for it.

    size: bytes of an element. edges: see `has_edges`. inputs: how many tensors are read. Short rows
    share warps, longer ones have a block; then shared memory holds most of a row, and then
    clusters of blocks do. Timed on an H200: benches/results/softmax_h200.csv.
    weighted: whether a weight is loaded for each column. Then threads with few columns are better,
    and clusters of blocks come first.

    Returns lanes of a row, threads of a block, and vectors of a thread in registers and in shared
    memory.
    """
    vectors = blocks(cols * size, VECTOR) + (1 if edges else 0)
    return _first(SHORT, vectors) or _first(_long(k, inputs, weighted=weighted), vectors)


def _first(forms, vectors):
    """Return the first form that holds so many vectors, or None."""
    for form in forms:
        lanes, _, registers, shared = form
        if lanes * (registers + shared) >= vectors:
            return form
    return None


def _long(k, inputs, *, weighted):
    """Return the forms of rows that are longer than those of SHORT."""
    each, memory = 8 // inputs, k.shared_memory_per_block
    clusters = (2048, 4096) if k.capability >= (9, 0) else ()
    known = [(512, 512, each, 0)]
    if weighted:
        known += [(1024, 1024, each, 0)]
        if clusters and memory >= 6 * 1024 * VECTOR:
            few = max(2 // inputs, 1), 6 // inputs
            known += [(lanes, 1024, *few) for lanes in clusters]
    elif memory >= 512 * 8 * VECTOR:
        known += [(512, 512, each, each)]
    shared = 12 if memory >= 12 * 1024 * VECTOR else 8  # of 16 vectors
    if memory >= shared * 1024 * VECTOR:
        halves = (16 - shared) // inputs, shared // inputs
        known += [(lanes, 1024, *halves) for lanes in (1024, *clusters)]
    return known
