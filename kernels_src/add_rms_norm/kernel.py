"""total = x + residual, out = rms_norm(total): the pair that follows each block of a transformer.

The norm is that of the sum before it is rounded; see rms_norm for weight, eps and offset. The
gradient of x and residual is that of rms_norm at total, plus that of total.
"""

import torch

from jitkern.declare import Cuda, kernel
from jitkern.kernels_src import norms
from jitkern.kernels_src.elements import dense, wide
from jitkern.kernels_src.rms_norm.kernel import kind_of, quantized, reference, rms_norm_backward

CUDA = Cuda("add_rms_norm.cu")

add_rms_norm = kernel(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, float eps=1e-6, "
    "float offset=0.0) -> (Tensor out, Tensor total)",
    cuda=CUDA,
)
add_rms_norm_quantized = kernel(
    "add_rms_norm_quantized(Tensor x, Tensor residual, Tensor? weight=None, float eps=1e-6, "
    'float offset=0.0, str dtype="int8") -> (Tensor out, Tensor scale, Tensor total)',
    cuda=CUDA,
)


def _prepared(name, x, residual, weight):
    """Return the template, contiguous tensors, a new one for their sum, rows and columns."""
    rows, cols = norms.matrix(name, x, residual)
    template = {"T": x.dtype, "W": norms.of_columns(name, x, weight)}
    x, residual, weight = x.contiguous(), residual.contiguous(), dense(weight)
    return template, (torch.empty_like(x), x, residual, weight), rows, cols


@add_rms_norm.reference
def _(x, residual, weight, eps, offset):
    total = wide(x) + wide(residual)
    return reference(total, weight, eps, offset).to(x.dtype), total.to(x.dtype)


@add_rms_norm.launch("cuda")
def _(k, x, residual, weight, eps, offset):
    template, given, rows, cols = _prepared("add_rms_norm", x, residual, weight)
    total, x, residual, weight = given
    out = torch.empty_like(x)
    norms.launch_rows(
        k, (k.add_rms_norm, k.add_rms_norm_long), template, (out, *given, eps, offset),
        rows, cols, (x, out, total, residual, weight), inputs=2,
    )  # fmt: skip
    return out, total


def _backward(grad_out, grad_total, total, weight, eps, offset, needs):
    if grad_out is None:
        return grad_total, grad_total, None
    of_total = needs[0] or needs[1]
    dx, dweight = rms_norm_backward(
        grad_out, total, weight, grad_total, eps, offset, of_total, needs[2]
    )
    return dx, dx, dweight


_backward.takes_none = True  # an output that nothing depends on costs nothing
add_rms_norm.backward(_backward)


@add_rms_norm.cost
def _(x, _, weight=None, *_numbers):
    return 4 * x.nbytes + (0 if weight is None else weight.nbytes), 5 * x.numel()


@add_rms_norm.samples
def _(device):
    yield from norms.samples(device, 2, 1, rest=(1e-5, 1.0))


@add_rms_norm_quantized.reference
def _(x, residual, weight, eps, offset, dtype):
    kind_of("add_rms_norm_quantized", dtype)
    total = wide(x) + wide(residual)
    return *quantized(reference(total, weight, eps, offset), dtype), total.to(x.dtype)


@add_rms_norm_quantized.launch("cuda")
def _(k, x, residual, weight, eps, offset, dtype):
    name = "add_rms_norm_quantized"
    template, given, rows, cols = _prepared(name, x, residual, weight)
    total, x, residual, weight = given
    kind = kind_of(name, dtype)
    out, scale = norms.quantized_results(x, kind)
    norms.launch_rows(
        k, (k.add_rms_norm_quantized, k.add_rms_norm_quantized_long), {**template, "Q": kind},
        (out, scale, *given, eps, offset), rows, cols, (x, out, total, residual, weight), inputs=2,
    )  # fmt: skip
    return out, scale, total


@add_rms_norm_quantized.cost
def _(x, _, weight=None, *_numbers):
    scales = 4 * (x.numel() // max(x.shape[-1], 1))
    weights = 0 if weight is None else weight.nbytes
    return 3 * x.nbytes + x.numel() + scales + weights, 7 * x.numel()


@add_rms_norm_quantized.samples
def _(device):
    yield from norms.quantized_samples(device, 2)
