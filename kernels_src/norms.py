"""What the launch functions of norms share: checks, forms, and the sums over rows of a backward."""

from __future__ import annotations

import math

import torch

from jitkern.kernels_src import rows as forms

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
THREADS = 512  # of the blocks that walk over rows, one on each multiprocessor
DEPTH = 16  # warps of the blocks that add what these found


def matrix(name, x, *alike):
    """Return rows and columns of x, and refuse tensors that are not like it."""
    torch._check(x.dim() >= 1, lambda: f"{name}: x needs at least one dimension, got {x.dim()}")
    torch._check(x.dtype in DTYPES, lambda: f"{name}: x must be floating point, got {x.dtype}")
    for other in alike:
        _same(name, x, other)
    return math.prod(x.shape[:-1]), x.shape[-1]


def _same(name, x, other):
    torch._check(
        other.shape == x.shape and other.dtype == x.dtype,
        lambda: (
            f"{name}: all must be like x, {x.dtype} of shape {tuple(x.shape)}, "
            f"got {other.dtype} of shape {tuple(other.shape)}"
        ),
    )


def of_columns(name, x, *parameters):
    """Return the dtype of parameters that have a number for each column of x; None are left out."""
    dtype = x.dtype
    for p in parameters:
        if p is not None:
            dtype = p.dtype
    for p in parameters:
        if p is not None:
            _fits(name, x, p, dtype)
    torch._check(
        dtype == x.dtype or (dtype == torch.float32 and x.element_size() == 2),
        lambda: f"{name}: weights must be of {x.dtype} or float32, got {dtype}",
    )
    return dtype


def _fits(name, x, parameter, dtype):
    torch._check(
        parameter.dim() == 1 and parameter.shape[0] == x.shape[-1] and parameter.dtype == dtype,
        lambda: (
            f"{name}: weights must be of shape ({x.shape[-1]},) and one dtype, got "
            f"{parameter.dtype} of shape {tuple(parameter.shape)}"
        ),
    )


def dense(tensor):
    """Return the tensor contiguous, and None as it is."""
    return None if tensor is None else tensor.contiguous()


def wide(tensor):
    """Return the tensor in the type that kernels compute in, and None as it is."""
    if tensor is None or tensor.dtype == torch.float64:
        return tensor
    return tensor.float()


def samples_of_gradient(device):
    """Yield gradients, of small numbers lest their sums cancel, tensors, and a weight for each."""
    for dtype in DTYPES:
        for shape in ((16, 64), (3, 5, 33), (0, 8), (4, 0)):
            x = torch.randn(shape, dtype=dtype, device=device)
            grad = torch.empty(shape, dtype=dtype, device=device).uniform_(-0.5, 0.5)
            yield grad, x, torch.randn(shape[-1], dtype=dtype, device=device)
    for dtype, shape in ((torch.bfloat16, (9, 4096)), (torch.float32, (3, 50000))):
        x = torch.randn(shape, dtype=dtype, device=device)
        grad = torch.empty(shape, dtype=dtype, device=device).uniform_(-0.5, 0.5)
        yield grad, x, torch.randn(shape[-1], device=device)
    x, grad = (
        torch.randn(40, 7, device=device),
        torch.empty(40, 7, device=device).uniform_(-0.5, 0.5),
    )
    yield grad.T, x.T, torch.randn(40, device=device)


def launch_rows(k, kernels, template, args, rows, cols, tensors, inputs=1):
    """Launch one of two kernels of rows, see `rows.launch`; x is the first of the tensors."""
    forms.launch(k, kernels, template, args, rows, cols, tensors, inputs=inputs, weighted=True)


def walking(k, cols, size, inputs, sums):
    """Return lanes of a row, vectors of a thread, stages and bytes of shared memory, or None.

    size: bytes of an element. sums: how many each column has; their registers leave fewer for
    vectors. Timed on an H200; rows that are too long for it have no such form.
    """
    vectors, most = cols * size // forms.VECTOR, 4 // sums
    for lanes, each in (
        (4, 1), (8, 1), (16, 1), (32, 1), (32, 2), (32, most), (64, most), (128, most),
        (256, most), (512, most), (512, 4),
    ):  # fmt: skip
        if lanes * each >= vectors:
            stage = THREADS * each * forms.VECTOR * inputs
            for stages in (2,) if (lanes, each) == (32, 4) else (8, 6, 4, 3, 2):
                if stages * stage <= min(k.shared_memory_per_block, 200 << 10) - 1024:
                    return lanes, each, stages, stages * stage
            return None
    return None


def launch_backward(k, kernels, template, dx, results, given, weight, numbers, statistics):
    """Launch the backward of a norm.

    kernels: of dx and statistics, on the chip and for longer rows; of dx and partial sums; of
        partial sums from statistics; of the sums of these.
    dx, results: what to write, the results being sums over rows; None for what nobody needs.
    given: grad, x, and perhaps a tensor to add to dx, or None. weight: or None. numbers: the rest.
    statistics: how many numbers of a row its sums need.
    """
    if k.fake:
        return
    both, (walk, columns, total) = kernels[:2], kernels[2:]
    inputs = len([t for t in given if t is not None])
    x = given[1]
    rows, cols = math.prod(x.shape[:-1]), x.shape[-1]
    template = {**template, "DX": dx is not None}
    tensors = (x, *given, dx, weight)
    a = torch.float64 if x.dtype == torch.float64 else torch.float32
    wanted = [result for result in results if result is not None]
    if not wanted:
        if dx is None:
            return
        args = (dx, None, *given, weight, *numbers)
        launch_rows(k, both, {**template, "A": a}, args, rows, cols, tensors, inputs)
        return
    form = None
    if not forms.has_edges(cols, *tensors):
        form = walking(k, cols, x.element_size(), inputs, len(results))
    if form is not None:
        lanes, each, stages, memory = form
        groups = THREADS // lanes
        count = min((rows + groups - 1) // groups, k.multiprocessors)
        partial = torch.empty((count, len(results), cols), dtype=a, device=x.device)
        shape = {"LANES": lanes, "THREADS": THREADS, "VPT": each, "STAGES": stages}
        walk[{**template, **shape, "A": a}](
            dx, partial, *given, weight, *numbers, rows, cols,
            grid=count, block=THREADS, smem=memory,
        )  # fmt: skip
    else:
        kept = torch.empty((rows, statistics), dtype=a, device=x.device)
        args = (dx, kept, *given, weight, *numbers)
        launch_rows(k, both, {**template, "A": a}, args, rows, cols, tensors, inputs)
        edges = forms.has_edges(cols, *given[:2])
        width = 128 if edges else 128 * forms.VECTOR // x.element_size()
        blocks = (cols + width - 1) // width
        count = min(rows, (4 * k.multiprocessors + blocks - 1) // blocks)
        partial = torch.empty((count, len(results), cols), dtype=a, device=x.device)
        columns[{"T": x.dtype, "A": a, "THREADS": 128, "EDGES": edges}](
            partial, *given[:2], kept, rows, cols, grid=(blocks, count), block=128
        )
    total[{"W": wanted[0].dtype, "A": a, "DEPTH": DEPTH}](
        *results, partial, count, cols,
        grid=((cols + 31) // 32, len(results)), block=32 * DEPTH, pdl=k.capability >= (9, 0),
    )  # fmt: skip
