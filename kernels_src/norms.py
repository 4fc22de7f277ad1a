"""What ops on the last dimension share: checks, forms, and the sums over rows of a backward."""

from __future__ import annotations

import math

import torch

from jitkern.kernels_src import rows as forms
from jitkern.kernels_src.elements import DTYPES, blocks, wide_dtype

THREADS = 512  # of the blocks that walk over rows, one on each multiprocessor
DEPTH = 16  # warps of the blocks that add what these found


def matrix(name, x, *alike):
    """Return rows and columns of x, and refuse tensors that are not like it."""
    forms.check(name, x, *alike)
    return math.prod(x.shape[:-1]), x.shape[-1]


def of_columns(name, x, *parameters):
    """Return the dtype of parameters that have a number for each column of x; None are left out."""
    dtype = x.dtype
    given = [p for p in parameters if p is not None]
    for p in given:
        dtype = p.dtype
    for p in given:
        torch._check(
            p.dim() == 1 and p.shape[0] == x.shape[-1] and p.dtype == dtype,
            lambda p=p: (
                f"{name}: weights must be of shape ({x.shape[-1]},) and one dtype, got "
                f"{p.dtype} of shape {tuple(p.shape)}"
            ),
        )
    torch._check(
        dtype == x.dtype or (dtype == torch.float32 and x.element_size() == 2),
        lambda: f"{name}: weights must be of {x.dtype} or float32, got {dtype}",
    )
    return dtype


def quantized_results(x, kind):
    """Return memory for numbers of 8 bits, and for a scale of each row."""
    out = torch.empty(x.shape, dtype=kind, device=x.device)
    return out, torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)


def samples(device, count, weights, rest=()):
    """Yield calls of so many tensors of one shape, so many weights, and the rest."""

    def make(shape, dtype, of_weights, weights=weights):
        given = [torch.randn(shape, dtype=dtype, device=device) for _ in range(count)]
        return *given, *torch.randn(weights, shape[-1], dtype=of_weights, device=device)

    for dtype in DTYPES:
        for shape in ((64, 1000), (3, 5, 33), (2, 1), (0, 8), (4, 0)):
            yield *make(shape, dtype, dtype), *rest
    yield make((2, 4096), torch.bfloat16, torch.float32)
    x, *others, weight = make((40, 7), torch.float32, torch.float32, 1)
    yield x.T.contiguous().T, *others, weight
    yield make((2, 50000), torch.float32, torch.float32, 0)


def quantized_samples(device, count):
    """Yield calls of so many tensors of one shape, a weight, eps, offset and perhaps a dtype."""

    def make(shape, dtype):
        given = [torch.randn(shape, dtype=dtype, device=device) for _ in range(count)]
        return *given, torch.randn(shape[-1], dtype=dtype, device=device)

    for dtype in DTYPES:
        for shape in ((4, 33), (2, 3, 40), (2, 1), (0, 8)):
            yield *make(shape, dtype), 1e-5, 1.0
    for dtype in DTYPES:
        yield *make((4, 32), dtype), 1e-5, 1.0, "float8_e4m3fn"
    x, *others = make((40, 7), torch.float32)
    yield x.T.contiguous().T, *others


def samples_of_gradient(device):
    """Yield gradients, of small numbers lest their sums cancel, tensors, and a weight for each."""

    def make(shape, dtype, of_weight):
        grad = torch.empty(shape, dtype=dtype, device=device).uniform_(-0.5, 0.5)
        weight = torch.randn(shape[-1], dtype=of_weight, device=device)
        return grad, torch.randn(shape, dtype=dtype, device=device), weight

    for dtype in DTYPES:
        for shape in ((16, 64), (3, 5, 33), (0, 8), (4, 0)):
            yield make(shape, dtype, dtype)
    yield make((9, 4096), torch.bfloat16, torch.float32)
    yield make((3, 50000), torch.float32, torch.float32)
    grad, x, weight = make((7, 40), torch.float32, torch.float32)
    yield grad.T.contiguous().T, x.T.contiguous().T, weight


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
    a = wide_dtype(x.dtype)
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
        count = min(blocks(rows, groups), k.multiprocessors)
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
        parts = blocks(cols, width)
        count = min(rows, blocks(4 * k.multiprocessors, parts))
        partial = torch.empty((count, len(results), cols), dtype=a, device=x.device)
        columns[{"T": x.dtype, "A": a, "THREADS": 128, "EDGES": edges}](
            partial, *given[:2], kept, rows, cols, grid=(parts, count), block=128
        )
    total[{"W": wanted[0].dtype, "A": a, "DEPTH": DEPTH}](
        *results, partial, count, cols,
        grid=(blocks(cols, 32), len(results)), block=32 * DEPTH, pdl=k.capability >= (9, 0),
    )  # fmt: skip
