"""Ops in the CuTe DSL for the tests on a GPU, where its wheels may be absent.

`python tests/gpu/cute_ops.py cute.tar cuda-sm_90-cu130-torch2.11.0` compiles them for that target without a GPU, and
writes a bundle. `CUTE_BUNDLE=cute.tar pytest -m gpu tests/gpu/test_gpu_nvidia_languages.py` tests them on the GPU.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "cute_gemm"))
sys.path.insert(0, str(Path(__file__).parents[2]))
from cute_gemm.kernel import gemm
from nvidia_ops import bundle, declared

from benches.vec_add_nvidia import VEC_ADD
from jitkern.declare import Cute

TEXT = """
import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Constexpr, Float32

@cute.kernel
def multiply(out: cute.Tensor, x: cute.Tensor, by: Float32, B: Constexpr):
    i = cute.arch.block_idx()[0] * B + cute.arch.thread_idx()[0]
    if i < cute.size(x, mode=[0]):
        out[i] = (x[i].to(Float32) * by).to(out.element_type)

@cute.jit
def scale(out: cute.Tensor, x: cute.Tensor, by: Float32, B: Constexpr, stream: cuda.CUstream):
    blocks = cute.ceil_div(cute.size(x, mode=[0]), B)
    multiply(out, x, by, B).launch(grid=[blocks, 1, 1], block=[B, 1, 1], stream=stream)

@cute.jit
def scale_by_pairs(
    out: cute.Tensor, x: cute.Tensor, by: Float32, B: Constexpr, stream: cuda.CUstream
):
    blocks = cute.ceil_div(cute.size(x, mode=[0]), 2 * B) * 2
    multiply(out, x, by, B).launch(
        grid=[blocks, 1, 1], block=[B, 1, 1], cluster=[2, 1, 1], stream=stream
    )

@cute.kernel
def sum_row(out: cute.Tensor, x: cute.Tensor):
    row, lane = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    total = Float32(0.0)
    for j in range(lane, cute.size(x, mode=[1]), 32):
        total += x[row, j].to(Float32)
    total = cute.arch.warp_reduction_sum(total)
    if lane == 0:
        out[row] = total

@cute.jit
def row_sums(out: cute.Tensor, x: cute.Tensor, stream: cuda.CUstream):
    sum_row(out, x).launch(grid=[cute.size(x, mode=[0]), 1, 1], block=[32, 1, 1], stream=stream)
"""

scale, scale_by_pairs, row_sums = declared("cute", Cute, TEXT)
OPS = (gemm, scale, scale_by_pairs, row_sums, VEC_ADD["cute"])


@scale.launch("cuda")
def _(k, x, by):
    x = x.contiguous()
    out = torch.empty_like(x)
    n = x.numel()
    k.scale[{"B": 256}](out.view(n), x.view(n), by)
    return out


@scale_by_pairs.launch("cuda")
def _(k, x, by):
    x = x.contiguous()
    out = torch.empty_like(x)
    n = x.numel()
    k.scale_by_pairs[{"B": 256}](out.view(n), x.view(n), by)
    return out


@row_sums.launch("cuda")
def _(k, x):
    out = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    k.row_sums(out, x)
    return out


if __name__ == "__main__":
    bundle(OPS)
