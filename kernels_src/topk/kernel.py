"""The k largest elements over the last dimension, in descending order, and their indices.

The smaller index is first among equals, and NaN is the largest, as in `torch.topk`, which leaves
the order of equals open. Long rows are not sorted: a radix search finds candidates.
"""

import math

import torch

from jitkern.declare import Cuda, kernel
from jitkern.kernels_src import groups, norms
from jitkern.kernels_src.elements import DTYPES, blocks

topk = kernel(
    "topk(Tensor x, int k) -> (Tensor values, Tensor indices)",
    cuda=Cuda("topk.cu"),
    prewarm=[
        (f"{dtype}[64, {columns}]", 8)
        for dtype in ("bf16", "f32")
        for columns in (32, 64, 128, 256, 128256)
    ],
)

COLUMNS = 1 << 30
SHORT = 256  # columns of a row that a warp sorts
MOST = 2048  # elements that the kernel for GPUs finds in a row; PyTorch sorts for more
MEMORY = 40992  # bytes of shared memory beside the groups: Search of largest.cuh


@topk.reference
def _(x, k):
    values, indices = x.sort(dim=-1, descending=True, stable=True)
    return tuple(
        out[..., :k].clone(memory_format=torch.contiguous_format) for out in (values, indices)
    )


def _by_sorting(x, count):
    """Return the result from a sort of whole numbers, which order NaN and both zeros alike."""
    bits = (x.double() + 0.0).view(torch.int64)  # -0 + 0 is 0
    keys = bits ^ ((bits >> 63) & 0x7FFF_FFFF_FFFF_FFFF)
    keys = keys.masked_fill(x.isnan(), 0x7FFF_FFFF_FFFF_FFFF)
    indices = keys.sort(dim=-1, descending=True, stable=True)[1][..., :count]
    indices = indices.clone(memory_format=torch.contiguous_format)
    return x.gather(-1, indices), indices


@topk.launch("cuda")
def _(k, x, count):
    rows, columns = norms.matrix("topk", x)
    torch._check(
        0 <= count <= columns,
        lambda: f"topk: k must be from 0 to the row's {columns} numbers, got {count}",
    )
    torch._check(columns <= COLUMNS, lambda: f"topk: a row may have {COLUMNS} numbers")
    shape = (*x.shape[:-1], count)
    values = torch.empty(shape, dtype=x.dtype, device=x.device)
    indices = torch.empty(shape, dtype=torch.int64, device=x.device)
    x = x.contiguous()
    if k.fake:
        return values, indices
    if x.dtype == torch.float64 or count > MOST:
        return (values, indices) if x.is_meta else _by_sorting(x, count)
    if columns <= SHORT:
        each = 1
        while 32 * each < columns:
            each *= 2
        k.topk_short[{"T": x.dtype, "E": each}](
            values, indices, x, rows, columns, count,
            grid=blocks(rows, 8) if count else 0, block=256,
        )  # fmt: skip
        return values, indices
    shift, chunks = groups.grouping(columns, x.element_size(), count)
    rows = rows if count else 0
    best = torch.empty(rows * chunks * groups.THREADS, dtype=torch.int32, device=x.device)
    k.groups_of[{"T": x.dtype}](
        best, x, columns, shift, chunks, grid=rows * chunks, block=groups.THREADS
    )
    k.topk[{"T": x.dtype}](
        values, indices, x, columns, count, shift, chunks, best, grid=rows,
        block=groups.SEARCH_THREADS, smem=MEMORY + 4 * groups.THREADS * chunks,
        pdl=k.capability >= (9, 0),
    )  # fmt: skip
    return values, indices


@topk.backward
def _(grad_values, indices, x):
    return torch.zeros_like(x).scatter(-1, indices, grad_values)


@topk.cost
def _(x, k):
    rows = math.prod(x.shape[:-1])
    return x.nbytes + rows * k * (x.itemsize + 8), x.numel()


@topk.samples
def _(device):
    for dtype in DTYPES:
        for shape, k in (((3, 1000), 8), ((2, 3, 33), 33), ((5, 1), 1), ((0, 8), 2), ((4, 7), 0)):
            yield torch.randn(shape, dtype=dtype, device=device), k
    yield torch.randn(7000, 3, device=device).T, 1500
    yield torch.randn(100).round().to(device), 20
