"""y = (round(x / u) @ q.T) * u * scale + bias, both factors of 8 bits and added in int32.

u = max |x| / 127 of each row of x, found at each call; q and its scale for each row are given. For
up to 64 rows of x `low_bit.cuh` has the kernels; more are left to `torch._int_mm`.
"""

import torch

from jitkern.declare import Cuda, kernel
from jitkern.kernels_src import low_bit, norms
from jitkern.kernels_src.elements import blocks, wide_dtype
from jitkern.kernels_src.rms_norm.kernel import quantized

int8_linear = kernel(
    "int8_linear(Tensor x, Tensor qweight, Tensor scale, Tensor? bias=None) -> Tensor",
    cuda=Cuda("int8_linear.cu"),
    prewarm=[("bf16[1, 4096]", f"i8[{rows}, 4096]", f"bf16[{rows}]") for rows in low_bit.WIDE],
)


@int8_linear.reference
def _(x, qweight, scale, bias):
    dtype = wide_dtype(x.dtype)
    q, units = quantized(x.to(dtype), "int8")
    y = (q.double() @ qweight.double().T).to(dtype) * scale.to(dtype) * units
    return (y if bias is None else y + bias).to(x.dtype)


def _many(k, template, args, *sizes):
    low_bit.many(
        k, k.int8_many, template, args, *sizes,
        step=64, step_bytes=1024, x_bytes=64, sums=torch.int32,
    )  # fmt: skip


@int8_linear.launch("cuda")
def _(k, x, qweight, scale, bias):
    tokens, rows, columns = low_bit.check_int8("int8_linear", x, qweight, scale, bias)
    out = low_bit.result(x, rows)
    if k.fake:
        return out
    q = torch.empty((tokens, columns), dtype=torch.int8, device=x.device)
    units = torch.empty(tokens, dtype=torch.float32, device=x.device)
    template, dense = {"T": x.dtype, "S": scale.dtype}, low_bit.aligned(x)
    weight = low_bit.aligned(qweight), low_bit.aligned(scale), low_bit.aligned(bias)
    norms.launch_rows(
        k, (k.quantize, k.quantize_long), {"T": x.dtype, "Q": torch.int8}, (q, units, dense),
        tokens, columns, (dense,),
    )  # fmt: skip
    if tokens > low_bit.MOST and rows % 8 == 0:
        products = torch.empty((tokens, rows), dtype=torch.int32, device=x.device)
        if not x.is_meta:
            products = torch._int_mm(q, weight[0].t())
        k.scale_products[template](
            out, products, units, *weight[1:], tokens, rows,
            grid=blocks(tokens * rows, 256), block=256,
        )  # fmt: skip
    elif tokens <= low_bit.FEW:
        low_bit.few(
            k, k.int8_few, template, (out, q, units, *weight), tokens, rows, columns,
            weight_bytes=1024, step_bytes=1024,
        )  # fmt: skip
    elif tokens <= low_bit.MOST:
        _many(k, template, (out, q, units, *weight), tokens, rows, columns)
    else:
        for start in range(0, tokens, low_bit.MOST):  # torch._int_mm takes no such rows
            count = min(low_bit.MOST, tokens - start)
            part = (t.narrow(0, start, count) for t in (out.view(tokens, rows), q, units))
            _many(k, template, (*part, *weight), count, rows, columns)
    return out


@int8_linear.cost
def _(x, qweight, scale, bias=None):
    return low_bit.cost(x, qweight.shape[0], qweight, scale, bias)


@int8_linear.samples
def _(device):
    yield from low_bit.int8_samples(device)
