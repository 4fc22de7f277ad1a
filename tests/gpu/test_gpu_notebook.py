"""Kernels of cells on a GPU: an op that is declared again, Triton functions."""

import pytest
import torch
from helpers import run_cell

import jitkern
from jitkern.runtime.specializer import settle

pytestmark = pytest.mark.gpu
_OP = '''
import torch
from jitkern.declare import Cuda, kernel

scale = kernel("gpu_notebook::scale(Tensor x) -> Tensor", cuda=Cuda(text="""
template <typename T> __global__ void scale(T* out, const T* x, long long n) {
  long long i = blockIdx.x * 256LL + threadIdx.x;
  if (i < n) out[i] = T(float(x[i]) * FACTOR);
}
"""))


@scale.launch("cuda")
def _(k, x):
    out = torch.empty_like(x)
    k.scale[{"T": x.dtype}](out, x, x.numel(), grid=(x.numel() + 255) // 256, block=256)
    return out
'''
_TRITON = """
import triton
import triton.language as tl

FACTOR = tl.constexpr(5)


@triton.jit
def times(x):
    return x * FACTOR


@triton.jit
def scale(out, x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, times(tl.load(x + i, mask=i < n)), mask=i < n)
"""


def test_an_op_that_is_declared_again_in_every_dtype():
    variables = {"__name__": "__main__"}
    for factor in (2, 3):
        text = _OP.replace("FACTOR", f"{factor}.f")
        scale = run_cell(f"<gpu cell {factor}>", text, variables)["scale"]
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x = torch.ones(1000, device="cuda", dtype=dtype)
            for _ in range(4):
                assert torch.equal(scale(x), x * factor)
                settle()


def test_a_triton_function_of_a_cell():
    scale = run_cell("<gpu triton>", _TRITON, {"__name__": "__main__"})["scale"]
    x = torch.ones(1000, device="cuda")
    out = torch.empty_like(x)
    jitkern.triton_kernel(scale)(out, x, 1000, grid=(8,), BLOCK=128)
    assert torch.equal(out, x * 5)
