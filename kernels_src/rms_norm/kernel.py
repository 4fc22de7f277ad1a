"""out = x / rms(x) * (weight + offset) over the last dimension, rms(x) = sqrt(mean(x^2) + eps).

Zhang & Sennrich 2019. Without a weight the factor is 1. With g = grad * (weight + offset) and
r = 1 / rms(x), the gradient of x is r * g - x * r^3 * mean(g * x), that of weight the sum over rows
of grad * x * r. The result may be quantized, with a scale for each row.
"""

import torch

from jitkern.declare import Cpp, Cuda, kernel
from jitkern.kernels_src import norms
from jitkern.kernels_src.elements import dense, wide

CPU = Cpp("rms_norm.cpp", native=True, openmp=True)
LEAST = 2.0**-126  # of the units of quantized rows but 0: the reciprocal is finite, too
QUANTIZED = ("int8", torch.int8, 127.0), ("float8_e4m3fn", torch.float8_e4m3fn, 448.0)

rms_norm = kernel(
    "rms_norm(Tensor x, Tensor? weight=None, float eps=1e-6, float offset=0.0) -> Tensor",
    cuda=Cuda("rms_norm.cu"),
    cpu=CPU,
)
rms_norm_backward = kernel(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor? weight=None, Tensor? more=None, "
    "float eps=1e-6, float offset=0.0, bool needs_x=True, bool needs_weight=True) "
    "-> (Tensor? dx, Tensor? dweight)",
    cuda=Cuda("rms_norm.cu"),
    cpu=CPU,
)
rms_norm_quantized = kernel(
    "rms_norm_quantized(Tensor x, Tensor? weight=None, float eps=1e-6, float offset=0.0, "
    'str dtype="int8") -> (Tensor out, Tensor scale)',
    cuda=Cuda("rms_norm.cu"),
)


def reference(x, weight, eps, offset):
    """Return the norm in float32 or float64, unrounded."""
    x = wide(x)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * (wide(weight).to(x.dtype) + offset)


def quantized(y, dtype):
    """Return numbers in units of each row's largest, and the units, none below LEAST but 0."""
    kind, most = next((kind, most) for text, kind, most in QUANTIZED if text == dtype)
    top = y.abs().amax(-1, keepdim=True) if y.shape[-1] else y.new_zeros(*y.shape[:-1], 1)
    # Not `most / top`, which is the reciprocal times most and so may be another number.
    per_unit = (torch.full_like(top, most) / top).clamp(max=1 / LEAST)
    y = y * torch.where(top > 0, per_unit, torch.zeros_like(top))
    scale = torch.where(top > 0, (top / most).clamp(min=LEAST), top).float()
    scale = scale.clone(memory_format=torch.contiguous_format)
    return (y.round() if kind == torch.int8 else y).to(kind), scale


def kind_of(name, dtype):
    """Return the dtype of quantized numbers."""
    for text, kind, _ in QUANTIZED:
        if dtype == text:
            return kind
    texts = ", ".join(text for text, *_ in QUANTIZED)
    torch._check(False, lambda: f"{name}: dtype must be one of {texts}, got {dtype}")
    return torch.int8


@rms_norm.reference
def _(x, weight, eps, offset):
    if offset == 0 and (weight is None or weight.dtype == x.dtype):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    return reference(x, weight, eps, offset).to(x.dtype)


@rms_norm.launch("cuda")
def _(k, x, weight, eps, offset):
    rows, cols = norms.matrix("rms_norm", x)
    w = norms.of_columns("rms_norm", x, weight)
    x, weight = x.contiguous(), dense(weight)
    out = torch.empty_like(x)
    norms.launch_rows(
        k, (k.rms_norm, k.rms_norm_long), {"T": x.dtype, "W": w}, (out, x, weight, eps, offset),
        rows, cols, (x, weight, out),
    )  # fmt: skip
    return out


@rms_norm.launch("cpu")
def _(k, x, weight, eps, offset):
    rows, cols = norms.matrix("rms_norm", x)
    w = norms.of_columns("rms_norm", x, weight)
    x, weight = x.contiguous(), dense(weight)
    out = torch.empty_like(x)
    k.rms_norm[{"T": x.dtype, "W": w}](out, x, weight, eps, offset, rows, cols)
    return out


rms_norm.backward(rms_norm_backward)


@rms_norm.cost
def _(x, weight=None, *_):  # a square and a sum, two products
    return 2 * x.nbytes + (0 if weight is None else weight.nbytes), 4 * x.numel()


@rms_norm.samples
def _(device):
    yield from norms.samples(device, 1, 1, rest=(1e-5, 1.0))


@rms_norm_backward.reference
def _(grad, x, weight, more, eps, offset, needs_x, needs_weight):
    v, g = wide(x), wide(grad)
    r = torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    normed = v * r
    dx = dweight = None
    if needs_weight and weight is not None:
        dweight = (g * normed).sum_to_size(weight.shape).to(weight.dtype)
    if needs_x:
        g = g if weight is None else g * (wide(weight).to(g.dtype) + offset)
        dx = r * (g - normed * (g * normed).mean(-1, keepdim=True))
        dx = (dx if more is None else dx + wide(more)).to(x.dtype)
    return dx, dweight


def _prepared(grad, x, weight, more, needs_x, needs_weight):
    """Return checked, contiguous tensors, and new ones for the results."""
    norms.matrix("rms_norm_backward", x, grad, *(() if more is None else (more,)))
    grad, x, weight, more = (dense(t) for t in (grad, x, weight, more))
    dx = torch.empty_like(x) if needs_x else None
    dweight = torch.empty_like(weight) if needs_weight and weight is not None else None
    return (grad, x, more), weight, dx, dweight


@rms_norm_backward.launch("cuda")
def _(k, grad, x, weight, more, eps, offset, needs_x, needs_weight):
    given, weight, dx, dweight = _prepared(grad, x, weight, more, needs_x, needs_weight)
    w = norms.of_columns("rms_norm_backward", x, weight)
    kernels = (
        k.rms_norm_backward, k.rms_norm_backward_long, k.rms_norm_backward_sums,
        k.rms_norm_backward_columns, k.rms_norm_backward_total,
    )  # fmt: skip
    template = {"T": x.dtype, "W": w, "INPUTS": 2 if more is None else 3}
    norms.launch_backward(
        k, kernels, template, dx, (dweight,), given, weight, (eps, offset), statistics=1
    )
    return dx, dweight


@rms_norm_backward.launch("cpu")
def _(k, grad, x, weight, more, eps, offset, needs_x, needs_weight):
    (grad, x, more), weight, dx, dweight = _prepared(grad, x, weight, more, needs_x, needs_weight)
    w = norms.of_columns("rms_norm_backward", x, weight)
    rows, cols = norms.matrix("rms_norm_backward", x)
    args = (dx, dweight, grad, x, weight, more, eps, offset, rows, cols)
    k.rms_norm_backward[{"T": x.dtype, "W": w}](*args)
    return dx, dweight


@rms_norm_backward.cost
def _(grad, x, weight=None, more=None, _eps=0.0, _offset=0.0, *needs):
    needs_x, needs_weight = (*needs, True, True)[:2]
    read = grad.nbytes + x.nbytes + (0 if more is None else more.nbytes)
    weights = 0 if weight is None else (1 + needs_weight) * weight.nbytes
    return read + needs_x * x.nbytes + weights, 10 * x.numel()


@rms_norm_backward.samples
def _(device):
    for grad, x, weight in norms.samples_of_gradient(device):
        yield grad, x, weight, grad, 1e-5, 1.0
    x, grad, weight = (torch.randn(*size, 64, device=device) for size in ((6,), (6,), ()))
    yield grad, x
    yield grad, x, weight, None, 1e-6, 0.0, True, False
    yield grad, x, weight, None, 1e-6, 0.0, False, True


@rms_norm_quantized.reference
def _(x, weight, eps, offset, dtype):
    kind_of("rms_norm_quantized", dtype)
    return quantized(reference(x, weight, eps, offset), dtype)


@rms_norm_quantized.launch("cuda")
def _(k, x, weight, eps, offset, dtype):
    name = "rms_norm_quantized"
    rows, cols = norms.matrix(name, x)
    template = {"T": x.dtype, "W": norms.of_columns(name, x, weight), "Q": kind_of(name, dtype)}
    out, scale = norms.quantized_results(x, template["Q"])
    x, weight = x.contiguous(), dense(weight)
    norms.launch_rows(
        k, (k.rms_norm_quantized, k.rms_norm_quantized_long), template,
        (out, scale, x, weight, eps, offset), rows, cols, (x, weight, out),
    )  # fmt: skip
    return out, scale


@rms_norm_quantized.cost
def _(x, weight=None, *_):
    weights = 0 if weight is None else weight.nbytes
    return x.nbytes + x.numel() + 4 * (x.numel() // max(x.shape[-1], 1)) + weights, 6 * x.numel()


@rms_norm_quantized.samples
def _(device):
    yield from norms.quantized_samples(device, 1)
