"""y[m, n] = scale[n] * sum_k x[m, k] * q[n, k] + bias[n], with weights q of 8 bits as they are.

Products of up to 64 rows of x are exact, added in float32, and rounded once. For more rows the
weight is written out in the dtype of x, which rounds it, and PyTorch multiplies. See `low_bit.cuh`.
"""

import torch

from jitkern.declare import Cuda, kernel
from jitkern.kernels_src import elements, low_bit

w8a16_linear = kernel(
    "w8a16_linear(Tensor x, Tensor qweight, Tensor scale, Tensor? bias=None) -> Tensor",
    cuda=Cuda("w8a16_linear.cu"),
    prewarm=[("bf16[1, 4096]", f"i8[{rows}, 4096]", f"bf16[{rows}]") for rows in low_bit.WIDE],
)


@w8a16_linear.reference
def _(x, qweight, scale, bias):
    wide = elements.wide_dtype(x.dtype)
    y = (x.to(wide) @ qweight.to(wide).T) * scale.to(wide)
    return (y if bias is None else y + bias).to(x.dtype)


@w8a16_linear.launch("cuda")
def _(k, x, qweight, scale, bias):
    tokens, rows, columns = low_bit.check_int8("w8a16_linear", x, qweight, scale, bias)
    if k.fake:
        return low_bit.result(x, rows)
    template = {"T": x.dtype, "S": scale.dtype}
    dense, qweight, scale, bias = map(low_bit.aligned, (x, qweight, scale, bias))
    if tokens > low_bit.MOST or x.dtype == torch.float32:
        return low_bit.by_torch(
            k.dequantize_int8[template], x, rows, columns, (qweight, scale), bias,
            grid=elements.blocks(rows * (columns // 8), 256), block=256,
        )  # fmt: skip
    out = low_bit.result(x, rows)
    args = out, dense, qweight, scale, bias
    if tokens <= low_bit.FEW:
        low_bit.few(
            k, k.w8a16_few, template, args, tokens, rows, columns,
            weight_bytes=1024, step_bytes=1024,
        )  # fmt: skip
    else:
        low_bit.many(
            k, k.w8a16_many, template, args, tokens, rows, columns,
            step=64, step_bytes=1024, x_bytes=2 * 64 + 16, sums=torch.float32,
        )  # fmt: skip
    return out


@w8a16_linear.cost
def _(x, qweight, scale, bias=None):
    return low_bit.cost(x, qweight.shape[0], qweight, scale, bias)


@w8a16_linear.samples
def _(device):
    yield from low_bit.int8_samples(device)
