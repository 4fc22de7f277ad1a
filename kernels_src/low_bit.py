"""What launch functions of linear layers with weights of 4 or 8 bits share: checks and forms."""

import math

import torch

from jitkern.kernels_src.elements import blocks

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Rows of x, which are tokens.
FEW = 8  # the most that `few_tokens` takes
MOST = 64  # the most for the kernels of low_bit.cuh; more are left to a matrix product of PyTorch's
COLUMNS = 1 << 17  # of a weight of 8 bits, whose products with 8 bits then fit 32
WARPS = 4  # of a block of `many_tokens`
WIDE = 6144, 12288  # rows of weights that take one and the other form of `few` of many rows
# `few_tokens_streamed` reads chunks of so many bytes, and is the fastest from so many numbers of 4
# bits for each multiprocessor on. Weights with so many rows and columns take its two forms.
CHUNK, LEAST = 4096, 800 << 10
STREAMED = (57344, 4096), (57344, 8192)


def tokens_of(name, x, columns, rows, *others):
    """Return how many rows x has, and refuse one that does not fit the weight.

    columns, rows: of the weight. others: scales, then the bias, each with its name; the bias may be
    None, and otherwise has a number for each row of the weight.
    """
    torch._check(
        x.dtype in DTYPES,
        lambda: f"{name}: x must be bfloat16, float16 or float32, got {x.dtype}",
    )
    torch._check(
        x.dim() >= 1 and x.shape[-1] == columns,
        lambda: (
            f"{name}: the weight is for {columns} input features, and x has the shape "
            f"{tuple(x.shape)}"
        ),
    )
    for what, other in others:
        torch._check(
            other is None or other.dtype == x.dtype,
            lambda what=what, other=other: (
                f"{name}: {what} must be of the dtype of x, {x.dtype}, got {other.dtype}"
            ),
        )
    bias = others[-1][1]
    torch._check(
        bias is None or (bias.dim() == 1 and bias.shape[0] == rows),
        lambda: f"{name}: bias must be of shape ({rows},), got {tuple(bias.shape)}",
    )
    return math.prod(x.shape[:-1])


def check_int8(name, x, qweight, scale, bias):
    """Return rows of x, and rows and columns of a weight of 8 bits; refuse what does not fit."""
    torch._check(
        qweight.dtype == torch.int8 and qweight.dim() == 2 and qweight.shape[1] % 64 == 0,
        lambda: (
            f"{name}: qweight must be int8 [N, K], K a multiple of 64, got {qweight.dtype} "
            f"{tuple(qweight.shape)}"
        ),
    )
    rows, columns = qweight.shape[0], qweight.shape[1]
    torch._check(
        columns <= COLUMNS, lambda: f"{name}: a row may have {COLUMNS} numbers, got {columns}"
    )
    torch._check(
        scale.dim() == 1 and scale.shape[0] == rows and scale.dtype in (torch.float32, x.dtype),
        lambda: (
            f"{name}: scale must be of shape ({rows},) and float32 or of the dtype of x, "
            f"{x.dtype}, got {scale.dtype} {tuple(scale.shape)}"
        ),
    )
    tokens = tokens_of(name, x, columns, rows, ("bias", bias))
    return tokens, rows, columns


def result(x, rows):
    """Return memory for a linear layer with `rows` outputs for each row of x."""
    return torch.empty((*x.shape[:-1], rows), dtype=x.dtype, device=x.device)


def by_torch(kernel, x, rows, columns, weight, bias, **keywords):
    """Let a kernel, with keywords of its launch, write the weight out; PyTorch multiplies."""
    w = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    kernel(w, *weight, rows, columns, **keywords)
    out = result(x, rows)
    if x.is_meta:  # nothing but kernels is prewarmed
        return out
    tokens = math.prod(x.shape[:-1])
    flat, of_flat = x.reshape(tokens, columns), out.view(tokens, rows)
    if bias is None:  # autocast leaves products into given memory as they are
        torch.mm(flat, w.T, out=of_flat)
    else:
        torch.addmm(bias, flat, w.T, out=of_flat)
    return out


def cost(x, rows, *weight):
    """Return bytes and operations of a linear layer with `rows` outputs for each row of x."""
    given = x.nbytes + sum(t.nbytes for t in weight if t is not None)
    outputs = x.shape[:-1].numel() * rows
    return given + outputs * x.itemsize, 2 * outputs * x.shape[-1]


def _whole(shape, device):
    """Return whole numbers in units of 1/128, of which each row has the largest that int8 holds."""
    x = torch.randint(-127, 128, shape, dtype=torch.float32, device=device)
    x[:, 0] = 127
    return x / 128


def int8_samples(device):
    """Yield calls with weights of 8 bits, and x that has no roundings to differ in."""
    for dtype, numbers in (
        (torch.float32, (3,)), (torch.bfloat16, (1, 8, 16, 32, 64, 65)), (torch.float16, (1, 16)),
    ):  # fmt: skip
        qweight = torch.randint(-127, 128, (32, 128), dtype=torch.int8, device=device)
        scale = torch.empty(32, dtype=dtype, device=device).uniform_(0.0005, 0.001)
        for tokens in numbers:
            yield _whole((tokens, 128), device).to(dtype), qweight, scale
    scale = scale.float()
    yield torch.randn(2, 0, 128, device=device), qweight, scale, scale
    x = torch.empty(128, 5, device=device).T
    yield x.copy_(_whole((5, 128), device)), qweight, scale, scale


def aligned(x):
    """Return the tensor contiguous and at a multiple of 16 bytes, None as it is."""
    if x is None:
        return None
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def few(k, kernel, template, args, tokens, rows, columns, *, weight_bytes, step_bytes):
    """Launch `few_tokens`.

    weight_bytes, step_bytes: of a tile in a step, without and with scales and zeros. Blocks of 16
    warps with one or two tiles are fastest where all of them run at once, two on a multiprocessor.
    A warp has room for 2048 bytes of weights of a tile: with more, less is read in the same time.
    """
    tiles = blocks(rows, 16)
    each = 2 if 2 * k.multiprocessors < tiles <= 4 * k.multiprocessors else 1
    warps = 16 if tiles <= 4 * k.multiprocessors else 8
    depth = 2048 // weight_bytes
    grid = blocks(tiles, each) if tokens else 0
    kernel[{**template, "NT": each, "WARPS": warps, "DEPTH": depth}](
        *args, tokens, rows, columns, grid=grid, block=32 * warps,
        smem=warps * each * depth * step_bytes, pdl=k.capability >= (9, 0),
    )  # fmt: skip


def streamed_warps(k, tokens, rows, columns, *, weight_bytes, step_bytes, x_bytes):
    """Return how many warps a block of `few_tokens_streamed` has, and its bytes of shared memory.

    No warps: weights are too few for it, there is not a tile for each multiprocessor, or it does
    not fit. weight_bytes, step_bytes: of a tile in a step, without and with scales and zeros.
    x_bytes: of a row of x in shared memory.
    """
    if k.capability < (9, 0) or rows * columns < LEAST * k.multiprocessors:
        return 0, 0
    if rows % 16 or columns % (CHUNK // 8) or rows < 16 * k.multiprocessors:
        return 0, 0
    chunks = columns // (CHUNK // 8)  # of a tile
    chunk = CHUNK // weight_bytes * step_bytes
    width = tokens + tokens % 2
    for warps in (12, 8):
        # Two chunks of a warp and their barriers, two sums of a tile, 6 barriers more, and x.
        smem = warps * 2 * (chunk + 8 + 4 * 16 * width) + 48 + tokens * x_bytes
        if chunks >= warps and smem <= k.shared_memory_per_block:
            return warps, smem
    return 0, 0


def few_streamed(k, kernel, template, args, tokens, rows, columns, *, weight_bytes, warps, smem):
    """Launch `few_tokens_streamed`, with a block for each multiprocessor."""
    chunk, grid = CHUNK // weight_bytes, k.multiprocessors
    handed = k.workspace(8 * grid * 16 * FEW, zeroed=True, dtype=torch.int64)
    kernel[{**template, "WARPS": warps, "CHUNK": chunk, "DEPTH": 2}](
        *args, handed, tokens, rows, columns, grid=grid if tokens else 0, block=32 * warps,
        smem=smem, pdl=True,
    )  # fmt: skip


def many(k, kernel, template, args, tokens, rows, columns, *, step, step_bytes, x_bytes, sums):
    """Launch `many_tokens`.

    step: numbers of a row in a step. x_bytes: of a row of x in shared memory. sums: the dtype of
    sums. Blocks are shared out over parts of the rows until there are two for each multiprocessor,
    unless a part would have one step.
    """
    of_tokens, depth = (2, 6) if tokens <= 16 else (4, 4) if tokens <= 32 else (8, 4)
    smem = depth * (WARPS * 2 * step_bytes + 8 * of_tokens * x_bytes)
    if smem > k.shared_memory_per_block:
        depth, smem = 2, smem // depth * 2
    width = 32 * WARPS
    count = blocks(rows, width)
    parts = max(1, min(2 * k.multiprocessors // max(count, 1), columns // step // 2))
    partial, counters = None, None
    if parts > 1:
        partial = k.workspace(4 * parts * tokens * count * width, zeroed=False, dtype=sums)
        counters = k.workspace(4 * count, zeroed=True, dtype=torch.int32)
    kernel[{**template, "NT": 2, "MT": of_tokens, "WARPS": WARPS, "DEPTH": depth}](
        *args, partial, counters, tokens, rows, columns, grid=(count if tokens else 0, parts),
        block=32 * WARPS, smem=smem, pdl=k.capability >= (9, 0),
    )  # fmt: skip
