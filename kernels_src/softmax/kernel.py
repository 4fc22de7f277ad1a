"""softmax of scale * x along a dimension, out[i] = exp(scale * x[i]) / sum_j exp(scale * x[j]).

log_softmax is its logarithm. The largest number and the sum are found together, with the online
normalizer (Milakov & Gimelshein 2018). Backward, from the output:

    softmax      dx = scale * out * (grad - sum_j grad[j] * out[j])
    log_softmax  dx = scale * (grad - exp(out) * sum_j grad[j])
"""

import torch

from jitkern.declare import Cpp, Cuda, Extension, Triton, kernel
from jitkern.kernels_src import rows as forms
from jitkern.kernels_src.elements import DTYPES, blocks, wide

CPU = Cpp("softmax.cpp", native=True, openmp=True)

softmax = kernel(
    "softmax(Tensor x, int dim=-1, float scale=1.0) -> Tensor",
    cuda=[
        Cuda("softmax.cu"),
        Triton("softmax_triton.py"),
        Extension("softmax_extension.cu", function="jitkern_extension::softmax"),
    ],
    cpu=CPU,
)
log_softmax = kernel(
    "log_softmax(Tensor x, int dim=-1, float scale=1.0) -> Tensor", cuda=Cuda("softmax.cu")
)
softmax_backward = kernel(
    "softmax_backward(Tensor grad, Tensor out, int dim=-1, float scale=1.0) -> Tensor",
    cuda=Cuda("softmax.cu"),
    cpu=CPU,
)
log_softmax_backward = kernel(
    "log_softmax_backward(Tensor grad, Tensor out, int dim=-1, float scale=1.0) -> Tensor",
    cuda=Cuda("softmax.cu"),
)


def _checked(name, x, dim):
    """Return the contiguous tensor, and its rows, columns and distance of a row's elements."""
    d = forms.axis(name, x, dim)
    return x.contiguous(), *forms.matrix(x, d)


def _pair(name, grad, out, dim):
    """The same for a gradient and an output, which must be alike."""
    torch._check(
        grad.shape == out.shape and grad.dtype == out.dtype,
        lambda: (
            f"{name}: grad and out differ, {grad.dtype} of shape {tuple(grad.shape)} and "
            f"{out.dtype} of shape {tuple(out.shape)}"
        ),
    )
    out, rows, cols, inner = _checked(name, out, dim)
    return grad.contiguous(), out, rows, cols, inner


def _on_gpu(k, kernels, template, tensors, scale, rows, cols, inner):
    """Launch one of the three kernels: rows on the chip, read twice, or strided.

    The latter alone takes a SIGN of 0.
    """
    if k.fake:
        return
    on_chip, long, strided = kernels
    template = {"T": tensors[0].dtype, **template}
    if inner != 1 or template.get("SIGN") == 0:
        grid, block = rows * blocks(inner, 32), 32 * forms.DEPTH
        template |= {"DEPTH": forms.DEPTH}
        strided[template](*tensors, scale, cols, inner, grid=grid, block=block)
        return
    args, inputs = (*tensors, scale), len(tensors) - 1
    forms.launch(k, (on_chip, long), template, args, rows, cols, tensors, inputs=inputs)


def _declare_forward(op, name, log):
    @op.launch("cuda")
    def _(k, x, dim, scale):
        x, rows, cols, inner = _checked(name, x, dim)
        out = torch.empty_like(x)
        kernels = k.softmax, k.softmax_long, k.softmax_strided
        sign = -1 if scale < 0 else 0 if scale == 0 else 1
        _on_gpu(k, kernels, {"LOG": log, "SIGN": sign}, (out, x), scale, rows, cols, inner)
        return out


def _declare_backward(op, name, log):
    @op.launch("cuda")
    def _(k, grad, out, dim, scale):
        grad, out, rows, cols, inner = _pair(name, grad, out, dim)
        dx = torch.empty_like(out)
        kernels = k.softmax_backward, k.softmax_backward_long, k.softmax_backward_strided
        _on_gpu(k, kernels, {"LOG": log}, (dx, grad, out), scale, rows, cols, inner)
        return dx


_declare_forward(softmax, "softmax", log=False)
_declare_forward(log_softmax, "log_softmax", log=True)
_declare_backward(softmax_backward, "softmax_backward", log=False)
_declare_backward(log_softmax_backward, "log_softmax_backward", log=True)


@softmax.launch("cpu")
def _(k, x, dim, scale):
    x, rows, cols, inner = _checked("softmax", x, dim)
    out = torch.empty_like(x)
    k.softmax[{"T": x.dtype}](out, x, rows, cols, inner, scale)
    return out


@softmax_backward.launch("cpu")
def _(k, grad, out, dim, scale):
    grad, out, rows, cols, inner = _pair("softmax_backward", grad, out, dim)
    dx = torch.empty_like(out)
    k.softmax_backward[{"T": out.dtype}](dx, grad, out, rows, cols, inner, scale)
    return dx


@softmax.launch("triton")
def _(k, x, dim, scale):
    x, rows, cols, inner = _checked("softmax", x, dim)
    out = torch.empty_like(x)
    k.softmax[{"BLOCK": 1024}](out, x, cols, inner, scale, grid=rows * inner, num_warps=4)
    return out


@softmax.reference
def _(x, dim, scale):
    return torch.softmax(x if scale == 1 else x * scale, dim)


@log_softmax.reference
def _(x, dim, scale):
    return torch.log_softmax(wide(x) if scale == 1 else wide(x) * scale, dim).to(x.dtype)


@softmax_backward.reference
def _(grad, out, dim, scale):
    return scale * out * (grad - (grad * out).sum(dim, keepdim=True))


@log_softmax_backward.reference
def _(grad, out, dim, scale):
    g = wide(grad)
    return (scale * (g - wide(out).exp() * g.sum(dim, keepdim=True))).to(out.dtype)


softmax.backward(softmax_backward)
log_softmax.backward(log_softmax_backward)


@softmax.cost
def _(x, _dim, _scale):  # for each number: a maximum, a difference, exp, a sum, a product
    return 2 * x.nbytes, 5 * x.numel()


@log_softmax.cost
def _(x, _dim, _scale):
    return 2 * x.nbytes, 5 * x.numel()


@softmax_backward.cost
def _(grad, out, _dim, _scale):
    return grad.nbytes + 2 * out.nbytes, 4 * out.numel()


@log_softmax_backward.cost
def _(grad, out, _dim, _scale):
    return grad.nbytes + 2 * out.nbytes, 5 * out.numel()


def _samples(device):
    for dtype in DTYPES:
        for shape in ((64, 1000), (3, 5, 33), (2, 1), (0, 8), (4, 0)):
            yield (torch.randn(shape, dtype=dtype, device=device),)
    yield (torch.randn(7, 40, device=device).T,)
    yield (torch.randn(2, 5000, device=device),)
    yield torch.randn(3, 40, 50, device=device), 1, 0.125
    yield torch.randn(9, 64, device=device), -1, -2.0


def _backward_samples(log):
    def pair(shape, dim, dtype, device):
        out = torch.softmax(torch.randn(shape, dtype=dtype), dim=dim)
        return torch.randn(shape, dtype=dtype, device=device), (out.log() if log else out).to(
            device
        )

    def samples(device):
        for dtype in DTYPES:
            yield pair((16, 50), -1, dtype, device)
        yield *pair((3, 40, 50), 1, torch.float32, device), 1, 0.125

    return samples


softmax.samples(_samples)
log_softmax.samples(_samples)
softmax_backward.samples(_backward_samples(log=False))
log_softmax_backward.samples(_backward_samples(log=True))
