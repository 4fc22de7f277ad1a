"""out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension.

Ba, Kiros & Hinton 2016. Without a weight the factor is 1, without a bias nothing is added. With
n = (x - mean) * r, r = 1 / sqrt(variance + eps) and g = grad * weight, the gradient of x is
r * (g - mean(g) - n * mean(g * n)), that of weight the sum over rows of grad * n, that of bias the
sum of grad.
"""

import torch

from jitkern.declare import Cuda, kernel
from jitkern.kernels_src import norms
from jitkern.kernels_src.elements import dense, wide

CUDA = Cuda("layer_norm.cu")

layer_norm = kernel(
    "layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-5) -> Tensor",
    cuda=CUDA,
)
layer_norm_backward = kernel(
    "layer_norm_backward(Tensor grad, Tensor x, Tensor? weight=None, Tensor? bias=None, "
    "float eps=1e-5, bool needs_x=True, bool needs_weight=True, bool needs_bias=True) "
    "-> (Tensor? dx, Tensor? dweight, Tensor? dbias)",
    cuda=CUDA,
)


def normed(x, eps):
    """Return (x - mean) * r, and r."""
    x = x - x.mean(-1, keepdim=True)
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * r, r


@layer_norm.reference
def _(x, weight, bias, eps):
    if all(p is None or p.dtype == x.dtype for p in (weight, bias)):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    y, _ = normed(wide(x), eps)
    if weight is not None:
        y = y * wide(weight).to(y.dtype)
    if bias is not None:
        y = y + wide(bias).to(y.dtype)
    return y.to(x.dtype)


@layer_norm.launch("cuda")
def _(k, x, weight, bias, eps):
    rows, cols = norms.matrix("layer_norm", x)
    template = {"T": x.dtype, "W": norms.of_columns("layer_norm", x, weight, bias)}
    x, weight, bias = x.contiguous(), dense(weight), dense(bias)
    out = torch.empty_like(x)
    norms.launch_rows(
        k, (k.layer_norm, k.layer_norm_long), template, (out, x, weight, bias, eps),
        rows, cols, (x, out, weight, bias),
    )  # fmt: skip
    return out


layer_norm.backward(layer_norm_backward)


@layer_norm.cost
def _(x, weight=None, bias=None, *_):
    weights = sum(p.nbytes for p in (weight, bias) if p is not None)
    return 2 * x.nbytes + weights, 7 * x.numel()


@layer_norm.samples
def _(device):
    yield from norms.samples(device, 1, 2)


@layer_norm_backward.reference
def _(grad, x, weight, bias, eps, needs_x, needs_weight, needs_bias):
    n, r = normed(wide(x), eps)
    g = wide(grad)
    dx = dweight = dbias = None
    if needs_weight and weight is not None:
        dweight = (g * n).sum_to_size(weight.shape).to(weight.dtype)
    if needs_bias and bias is not None:
        dbias = g.sum_to_size(bias.shape).to(bias.dtype)
    if needs_x:
        g = g if weight is None else g * wide(weight).to(g.dtype)
        dx = r * (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True))
        dx = dx.to(x.dtype)
    return dx, dweight, dbias


@layer_norm_backward.launch("cuda")
def _(k, grad, x, weight, bias, eps, needs_x, needs_weight, needs_bias):
    name = "layer_norm_backward"
    norms.matrix(name, x, grad)
    template = {"T": x.dtype, "W": norms.of_columns(name, x, weight, bias)}
    grad, x, weight = grad.contiguous(), x.contiguous(), dense(weight)
    dx = torch.empty_like(x) if needs_x else None
    dweight = torch.empty_like(weight) if needs_weight and weight is not None else None
    dbias = torch.empty_like(bias) if needs_bias and bias is not None else None
    kernels = (
        k.layer_norm_backward, k.layer_norm_backward_long, k.layer_norm_backward_sums,
        k.layer_norm_backward_columns, k.layer_norm_backward_total,
    )  # fmt: skip
    norms.launch_backward(
        k, kernels, template, dx, (dweight, dbias), (grad, x), weight, (eps,), statistics=2
    )
    return dx, dweight, dbias


@layer_norm_backward.cost
def _(grad, x, weight=None, bias=None, _=0.0, *needs):
    needs_x, needs_weight, needs_bias = (*needs, True, True, True)[:3]
    weights = 0 if weight is None else (1 + needs_weight) * weight.nbytes
    biases = 0 if bias is None or not needs_bias else bias.nbytes
    return grad.nbytes + x.nbytes + needs_x * x.nbytes + weights + biases, 14 * x.numel()


@layer_norm_backward.samples
def _(device):
    for grad, x, weight in norms.samples_of_gradient(device):
        yield grad, x, weight, weight
    x, grad, weight = (torch.randn(*size, 64, device=device) for size in ((6,), (6,), ()))
    yield grad, x
    yield grad, x, weight, None, 1e-5, True, False, False
    yield grad, x, None, weight, 1e-5, False, True, True
