"""out = softmax(x) over the last dimension; online normalizer (Milakov & Gimelshein 2018)."""

import math

import torch

from jitkern.declare import Cpp, Cuda, Extension, Triton, kernel

softmax = kernel(
    "softmax(Tensor x) -> Tensor",
    cuda=[
        Cuda("softmax.cu"),
        Triton("softmax_triton.py"),
        Extension("softmax_extension.cu", function="jitkern_extension::softmax"),
    ],
    cpu=Cpp("softmax.cpp", native=True, openmp=True),
)

softmax_backward = kernel(
    "softmax_backward(Tensor grad, Tensor out) -> Tensor",
    cuda=Cuda("softmax.cu"),
    cpu=Cpp("softmax.cpp", native=True, openmp=True),
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _rows(x):
    torch._check(x.dim() >= 1, lambda: f"softmax: x needs at least one dimension, got {x.dim()}")
    torch._check(x.dtype in DTYPES, lambda: f"softmax: x must be floating point, got {x.dtype}")
    return math.prod(x.shape[:-1]), x.shape[
        -1
    ]  # not .numel(), which makes a symbolic size constant


@softmax.reference
def _(x):
    return torch.softmax(x, dim=-1)


@softmax.launch("cuda")
def _(k, x):
    rows, cols = _rows(x)
    x = x.contiguous()
    out = torch.empty_like(x)
    k.softmax[{"T": x.dtype}](out, x, cols, grid=rows, block=256)
    return out


@softmax.launch("triton")
def _(k, x):
    rows, cols = _rows(x)
    x = x.contiguous()
    out = torch.empty_like(x)
    k.softmax[{"BLOCK": 1024}](out, x, cols, grid=rows, num_warps=4)
    return out


@softmax.launch("cpu")
def _(k, x):
    rows, cols = _rows(x)
    x = x.contiguous()
    out = torch.empty_like(x)
    k.softmax[{"T": x.dtype}](out, x, rows, cols)
    return out


@softmax.backward
def _(grad, out):
    return softmax_backward(grad, out)


@softmax.cost
def _(x):  # for each number: a maximum, a difference, exp, a sum, a product
    return 2 * x.nbytes, 5 * x.numel()


@softmax.samples
def _(device):
    for dtype in DTYPES:
        for shape in ((64, 1000), (3, 5, 33), (2, 1), (0, 8), (4, 0)):
            yield torch.randn(shape, dtype=dtype, device=device)
    yield torch.randn(7, 40, device=device).T
    yield torch.randn(2, 5000, device=device)


@softmax_backward.reference
def _(grad, out):
    return out * (grad - (grad * out).sum(-1, keepdim=True))


@softmax_backward.launch("cuda")
def _(k, grad, out):
    rows, cols = _rows(out)
    grad, out = grad.contiguous(), out.contiguous()
    dx = torch.empty_like(out)
    k.softmax_backward[{"T": out.dtype}](dx, grad, out, cols, grid=rows, block=256)
    return dx


@softmax_backward.launch("cpu")
def _(k, grad, out):
    rows, cols = _rows(out)
    grad, out = grad.contiguous(), out.contiguous()
    dx = torch.empty_like(out)
    k.softmax_backward[{"T": out.dtype}](dx, grad, out, rows, cols)
    return dx


@softmax_backward.cost
def _(grad, out):
    return grad.nbytes + 2 * out.nbytes, 4 * out.numel()


@softmax_backward.samples
def _(device):
    for dtype in DTYPES:
        out = torch.softmax(torch.randn(16, 50, dtype=dtype, device=device), dim=-1)
        yield torch.randn(16, 50, dtype=dtype, device=device), out
