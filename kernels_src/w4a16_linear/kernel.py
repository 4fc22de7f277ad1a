"""y[m, n] = sum_k x[m, k] * w[n, k] + bias[n], with w of 4 bits in groups of 64 or 128 numbers k.

w = (q - 8) * scale, (q - zero) * scale with whole zeros (uint8), or
(q - 8) * scale + zero with zeros of the dtype of x; q as `kernels_src/int4.py` packs it, scale and
zero [K / group, N]. Products of up to 64 rows of x are exact and added in float32, group by group,
and rounded once. For more rows the weight is written out in the dtype of x, which rounds it, and
PyTorch multiplies. `low_bit.cuh` has the kernels, which take the design of Marlin (Frantar et al.
2024) further: tiles of weights are the rows of matrix instructions, and tokens their columns.
`int4_warpgroups.cuh` has one for 9 to 64 rows of x on an H100 or H200, whose matrix instructions
are those of warpgroups.
"""

import torch

from jitkern.declare import Cuda, kernel
from jitkern.kernels_src import elements, int4, low_bit

# Forms of `w4a16_wide` for up to 16, 32 and 64 rows of x: stages, and blocks of a multiprocessor.
# The last two are faster with x in the order of the stages, by a kernel before, from LEAST_ORDERED
# numbers of a weight on.
WARPGROUPS = 2
FORMS = (4, 2), (3, 2), (4, 1)
LEAST_ORDERED = 64 << 20


def _shapes(tokens, rows, columns):
    weight = f"i32[{rows // 16}, {columns // 64}, 32, 4]", f"bf16[{columns // 128}, {rows}]"
    return f"bf16[{tokens}, {columns}]", *weight


# Large weights take forms of the kernels that those of the samples do not.
LARGE = [
    *(_shapes(1, rows, 4096) for rows in low_bit.WIDE),
    *(_shapes(1, *weight) for weight in low_bit.STREAMED),
    *(_shapes(tokens, 8192, 8192) for tokens in (32, 64)),
]
w4a16_linear = kernel(
    "w4a16_linear(Tensor x, Tensor qweight, Tensor scale, Tensor? zero=None, Tensor? bias=None) "
    "-> Tensor",
    cuda=Cuda("w4a16_linear.cu", arch_specific=True),
    prewarm=[*LARGE, *((*call, call[2].replace("bf16", "u8")) for call in LARGE)],
)


def _checked(x, qweight, scale, zero, bias):
    """Return tokens, rows, columns and group, and refuse tensors that do not fit."""

    def wrong_weight():
        return (
            f"w4a16_linear: qweight must be int32 [N / 16, K / 64, 32, 4], as "
            f"jitkern.ops.int4.pack makes it, got {qweight.dtype} {tuple(qweight.shape)}"
        )

    torch._check(qweight.dtype == torch.int32 and qweight.dim() == 4, wrong_weight)
    torch._check((qweight.shape[2] == 32) & (qweight.shape[3] == 4), wrong_weight)
    columns = 64 * qweight.shape[1]
    torch._check(
        scale.dtype in low_bit.DTYPES and scale.dim() == 2,
        lambda: (
            f"w4a16_linear: scale must be bfloat16, float16 or float32 [K / group, N], got "
            f"{scale.dtype} {tuple(scale.shape)}"
        ),
    )
    groups, rows = scale.shape[0], scale.shape[1]
    torch._check(
        groups * 128 == columns or groups * 64 == columns,
        lambda: (
            f"w4a16_linear: groups must have 64 or 128 numbers: with K = {columns} scale has "
            f"{columns // 64} or {columns // 128} rows, got {groups}"
        ),
    )
    torch._check(
        qweight.shape[0] == elements.blocks(rows, 16),
        lambda: (
            f"w4a16_linear: qweight has {qweight.shape[0]} tiles of 16 rows, which does not fit "
            f"the {rows} columns of scale"
        ),
    )
    torch._check(
        zero is None or (zero.shape == scale.shape and zero.dtype in (torch.uint8, scale.dtype)),
        lambda: (
            f"w4a16_linear: zero must be uint8 or {scale.dtype}, of the shape "
            f"{tuple(scale.shape)} of scale, got {zero.dtype} {tuple(zero.shape)}"
        ),
    )
    tokens = low_bit.tokens_of("w4a16_linear", x, columns, rows, ("scale", scale), ("bias", bias))
    return tokens, rows, columns, 128 if groups * 128 == columns else 64


@w4a16_linear.reference
def _(x, qweight, scale, zero, bias):
    wide = elements.wide_dtype(x.dtype)
    y = x.to(wide) @ int4.values(qweight, scale, zero, wide).T
    return (y if bias is None else y + bias).to(x.dtype)


def _by_warpgroups(k, dtype, kind, args, tokens, rows, columns):
    """Launch `w4a16_wide`, whose stages are shared out over all blocks that run at once."""
    size = 0 if tokens <= 16 else 1 if tokens <= 32 else 2
    ordered = size > 0 and rows * columns >= LEAST_ORDERED
    depth, at_once = FORMS[size]
    pieces = 1 if size == 1 and not ordered else 2  # that are dequantized at once; two would spill
    of_tokens, width = 2 << size, 64 * WARPGROUPS
    out, x, *others = args
    if ordered:
        plain, x = x, torch.empty(8 * of_tokens * columns, dtype=dtype, device=x.device)
        k.order_tokens[{"T": dtype, "MT": of_tokens}](
            x, plain, tokens, columns, grid=of_tokens * columns // 256, block=256, pdl=True
        )
    zero_bytes = 0 if kind == int4.SYMMETRIC else 1
    # As `WideStage` has it: two groups of weights, scales, zeros, and columns of x. Then barriers.
    column = 128 * of_tokens + (0 if ordered else 16)
    stage = 2 * (width * (64 + 2 + zero_bytes) + 16 * column)
    blocks, stages = elements.blocks(rows, width), columns // 256
    grid = min(at_once * k.multiprocessors, blocks * stages)
    partial, counters = None, None
    if blocks % grid:
        partial = k.workspace(64 * grid * width * of_tokens, zeroed=False, dtype=torch.float32)
        counters = k.workspace(4 * blocks, zeroed=True, dtype=torch.int32)
    template = {"T": dtype, "ZEROS": kind, "MT": of_tokens, "WARPGROUPS": WARPGROUPS}
    template |= {"DEPTH": depth, "PIECES": pieces, "BLOCKS": at_once, "ORDERED": ordered}
    k.w4a16_wide[template](
        out, x, *others, partial, counters, tokens, rows, columns, grid=grid,
        block=128 * WARPGROUPS + (32 if ordered else 128), smem=depth * (stage + 16) + 16, pdl=True,
    )  # fmt: skip


@w4a16_linear.launch("cuda")
def _(k, x, qweight, scale, zero, bias):
    tokens, rows, columns, group = _checked(x, qweight, scale, zero, bias)
    if k.fake:
        return low_bit.result(x, rows)
    kind, edges = int4.kind_of(zero), rows % 16 != 0
    template = {"T": x.dtype, "GROUP": group, "ZEROS": kind}
    weight = low_bit.aligned(qweight), low_bit.aligned(scale), low_bit.aligned(zero)
    if tokens > low_bit.MOST or x.dtype == torch.float32:
        return low_bit.by_torch(
            k.dequantize_int4[template], x, rows, columns, weight, bias,
            grid=elements.blocks(qweight.shape[0] * qweight.shape[1], 8), block=256,
        )  # fmt: skip
    out = low_bit.result(x, rows)
    args = out, low_bit.aligned(x), *weight, low_bit.aligned(bias)
    if (
        k.capability == (9, 0) and tokens > low_bit.FEW and not edges and rows > 0
        and columns > 0 and group == 128 and columns % 256 == 0 and kind != int4.ADDED_ZEROS
    ):  # fmt: skip
        _by_warpgroups(k, x.dtype, kind, args, tokens, rows, columns)
        return out
    template["EDGES"] = edges
    sides = 0 if edges else 1 if kind == int4.SYMMETRIC else 2
    weight_bytes = 8 * group
    step_bytes = weight_bytes + 128 * sides
    if tokens <= low_bit.FEW:
        sizes = {"weight_bytes": weight_bytes, "step_bytes": step_bytes}
        warps, smem = low_bit.streamed_warps(
            k, tokens, rows, columns, **sizes, x_bytes=2 * columns + 64
        )
        if warps:
            low_bit.few_streamed(
                k, k.w4a16_few_streamed, template, args, tokens, rows, columns,
                weight_bytes=weight_bytes, warps=warps, smem=smem,
            )  # fmt: skip
        else:
            low_bit.few(k, k.w4a16_few, template, args, tokens, rows, columns, **sizes)
    else:
        low_bit.many(
            k, k.w4a16_many, template, args, tokens, rows, columns, step=group,
            step_bytes=step_bytes, x_bytes=2 * group + 64, sums=torch.float32,
        )  # fmt: skip
    return out


@w4a16_linear.cost
def _(x, qweight, scale, zero=None, bias=None):
    return low_bit.cost(x, scale.shape[1], qweight, scale, zero, bias)


def _weights(device, rows, columns, group, dtype, kind):
    """Return a random weight: qweight, scale and zero."""
    shape = (rows + 15) // 16, columns // 64, 32, 4
    qweight = torch.randint(-(2**31), 2**31, shape, device=device, dtype=torch.int32)
    shape = columns // group, rows
    scale = torch.empty(shape, dtype=dtype, device=device).uniform_(0.004, 0.008)
    zero = None
    if kind == int4.WHOLE_ZEROS:
        zero = torch.randint(0, 16, shape, dtype=torch.uint8, device=device)
    elif kind == int4.ADDED_ZEROS:
        zero = torch.empty(shape, dtype=dtype, device=device).uniform_(-0.04, 0.04)
    return qweight, scale, zero


@w4a16_linear.samples
def _(device):
    for dtype, group, kind, numbers in (
        (torch.float32, 128, int4.SYMMETRIC, (3,)),
        (torch.float32, 64, int4.WHOLE_ZEROS, (2,)),
        (torch.bfloat16, 128, int4.SYMMETRIC, (1, 8, 16, 32, 64, 65)),
        (torch.bfloat16, 128, int4.WHOLE_ZEROS, (1, 16, 32, 64)),
        (torch.bfloat16, 64, int4.ADDED_ZEROS, (1,)),
        (torch.float16, 128, int4.SYMMETRIC, (1, 16)),
    ):
        weights = _weights(device, 32, 256, group, dtype, kind)
        for tokens in numbers:
            yield torch.randn(tokens, 256, dtype=dtype, device=device), *weights
    x = torch.randn(2, 0, 128, dtype=torch.float32, device=device)
    weights = *_weights(device, 16, 128, 64, x.dtype, int4.SYMMETRIC), x.new_ones(16)
    yield x, *weights
    yield torch.randn(128, 5, device=device).T, *weights
