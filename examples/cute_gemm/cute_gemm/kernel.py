"""out = a @ b, for matrices of bfloat16."""

import torch

from jitkern.declare import Cute, kernel

LARGE_TILE, SMALL_TILE = (128, 128), (64, 64)  # large ones of a small matrix leave processors idle
ODD = [(127, 65, 33), (200, 1000, 72), (513, 257, 1023)]
LARGE = [(2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192)]

gemm = kernel("cute_gemm::gemm(Tensor a, Tensor b) -> Tensor", cuda=Cute("gemm.py"))


@gemm.reference
def _(a, b):
    return a @ b


@gemm.launch("cuda")
def _(k, a, b):
    torch._check(a.dtype == b.dtype == torch.bfloat16, lambda: "gemm takes bfloat16")
    torch._check(a.shape[1] == b.shape[0], lambda: f"gemm of {[*a.shape]} and {[*b.shape]}")
    a, b = a.contiguous(), b.contiguous()
    m, n = a.shape[0], b.shape[1]
    out = torch.empty((m, n), dtype=a.dtype, device=a.device)
    height, width = LARGE_TILE if m * n >= 1 << 22 else SMALL_TILE
    k.gemm[{"M": height, "N": width, "K": 64}](out, a, b)
    return out


@gemm.backward
def _(grad, a, b):
    return gemm(grad, b.t()), gemm(a.t(), grad)


@gemm.samples
def _(device):
    for m, n, depth in (*ODD, *LARGE):
        a = torch.randn(m, depth, device=device, dtype=torch.bfloat16)
        yield a, torch.randn(depth, n, device=device, dtype=torch.bfloat16)
