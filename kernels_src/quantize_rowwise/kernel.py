"""q = round(x / scale), scale = max |x| / most of each row.

most is 127 for int8 and 448 for float8_e4m3fn. A row is the last dimension. The scale is at least
2^-126, whose reciprocal is finite too. The scale of a row of zeros is 0, and so are its numbers;
that of a row with NaN is NaN, with an infinity not finite, and the numbers of these rows mean
nothing.
"""

import torch

from jitkern.declare import Cuda, kernel
from jitkern.kernels_src import norms
from jitkern.kernels_src.elements import wide
from jitkern.kernels_src.rms_norm.kernel import kind_of, quantized

quantize_rowwise = kernel(
    'quantize_rowwise(Tensor x, str dtype="int8") -> (Tensor out, Tensor scale)',
    cuda=Cuda("quantize_rowwise.cu"),
)


@quantize_rowwise.reference
def _(x, dtype):
    kind_of("quantize_rowwise", dtype)
    return quantized(wide(x), dtype)


@quantize_rowwise.launch("cuda")
def _(k, x, dtype):
    rows, cols = norms.matrix("quantize_rowwise", x)
    kind = kind_of("quantize_rowwise", dtype)
    out, scale = norms.quantized_results(x, kind)
    x = x.contiguous()
    kernels = k.quantize_rowwise, k.quantize_rowwise_long
    norms.launch_rows(k, kernels, {"T": x.dtype, "Q": kind}, (out, scale, x), rows, cols, (x,))
    return out, scale


@quantize_rowwise.cost
def _(x, *_):
    return x.nbytes + x.numel() + 4 * (x.numel() // max(x.shape[-1], 1)), 2 * x.numel()


def _whole(device, shape, dtype, top):
    """Return whole numbers that 8 bits hold, and so no halves that float32 and 64 round apart."""
    x = torch.randint(-16, 17, shape, dtype=dtype, device=device)
    x[..., 0] = top
    return x


@quantize_rowwise.samples
def _(device):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for shape in ((4, 64), (0, 8)):
            yield (_whole(device, shape, dtype, 127),)
    yield (_whole(device, (2, 3, 33), torch.bfloat16, -127),)
    yield _whole(device, (4, 4096), torch.bfloat16, 448), "float8_e4m3fn"
    x = torch.empty(7, 40, device=device).T
    yield (x.copy_(_whole(device, (40, 7), torch.float32, 127)),)
