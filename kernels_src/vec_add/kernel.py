"""out = x + y for tensors of one shape and dtype."""

import torch

from jitkern.declare import Cpp, Cuda, Triton, kernel
from jitkern.kernels_src.elements import DTYPES

vec_add = kernel(
    "vec_add(Tensor x, Tensor y) -> Tensor",
    cuda=[Cuda("vec_add.cu"), Triton("vec_add_triton.py")],
    cpu=Cpp("vec_add.cpp"),
    fusible=True,
)


@vec_add.reference
def _(x, y):
    return x + y


def _inputs(x, y):
    torch._check(
        x.shape == y.shape, lambda: f"vec_add: shapes differ, {tuple(x.shape)} and {tuple(y.shape)}"
    )
    torch._check(x.dtype == y.dtype, lambda: f"vec_add: dtypes differ, {x.dtype} and {y.dtype}")
    x, y = x.contiguous(), y.contiguous()
    return x, y, torch.empty_like(x)


@vec_add.launch("cuda")
def _(k, x, y):
    x, y, out = _inputs(x, y)
    k.vec_add[{"T": x.dtype}](out, x, y, x.numel(), grid=(x.numel() + 255) // 256, block=256)
    return out


@vec_add.launch("triton")
def _(k, x, y):
    x, y, out = _inputs(x, y)
    k.vec_add[{"BLOCK": 1024}](out, x, y, x.numel(), grid=(x.numel() + 1023) // 1024)
    return out


@vec_add.launch("cpu")
def _(k, x, y):
    x, y, out = _inputs(x, y)
    k.vec_add[{"T": x.dtype}](out, x, y, x.numel())
    return out


@vec_add.cost
def _(x, y):
    return 2 * x.nbytes + y.nbytes, x.numel()


@vec_add.samples
def _(device):
    for dtype in DTYPES:
        for shape in ((1024,), (3, 1001), (0,), ()):
            yield (
                torch.randn(shape, dtype=dtype, device=device),
                torch.randn(shape, dtype=dtype, device=device),
            )
    yield torch.randn(33, 17, device=device).T, torch.randn(17, 33, device=device)
