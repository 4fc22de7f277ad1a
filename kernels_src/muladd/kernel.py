"""out = a * b + c for tensors of one shape and dtype; differentiable."""

import torch

from jitkern.declare import Cuda, Extension, kernel
from jitkern.kernels_src.elements import DTYPES, wide

muladd = kernel(
    "muladd(Tensor a, Tensor b, Tensor c) -> Tensor",
    cuda=[
        Cuda("muladd.cu"),
        Extension("muladd_extension.cu", function="jitkern_extension::muladd_cuda"),
    ],
    cpu=Extension("muladd_extension.cpp", function="jitkern_extension::muladd_cpu"),
    fusible=True,
)


@muladd.reference
def _(a, b, c):
    return torch.addcmul(wide(c), wide(a), wide(b)).to(a.dtype)  # rounded once


@muladd.launch("cuda")
def _(k, a, b, c):
    torch._check(
        a.shape == b.shape == c.shape,
        lambda: f"muladd: shapes differ, {tuple(a.shape)}, {tuple(b.shape)} and {tuple(c.shape)}",
    )
    torch._check(
        a.dtype == b.dtype == c.dtype,
        lambda: f"muladd: dtypes differ, {a.dtype}, {b.dtype} and {c.dtype}",
    )
    a, b, c = a.contiguous(), b.contiguous(), c.contiguous()
    out = torch.empty_like(a)
    k.muladd[{"T": a.dtype}](out, a, b, c, a.numel(), grid=(a.numel() + 255) // 256, block=256)
    return out


@muladd.backward
def _(grad, a, b):
    return grad * b, grad * a, grad


@muladd.cost
def _(a, b, c):
    return 2 * a.nbytes + b.nbytes + c.nbytes, 2 * a.numel()


@muladd.samples
def _(device):
    for dtype in DTYPES:
        for shape in ((1000,), (5, 7), (0,)):
            yield tuple(torch.randn(shape, dtype=dtype, device=device) for _ in range(3))
    yield tuple(torch.randn(8, 6, device=device).T for _ in range(3))
