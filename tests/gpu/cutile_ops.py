"""Ops in cuTile for the tests on a GPU, where its wheels may be absent.

`python tests/gpu/cutile_ops.py cutile.tar cuda-sm_90-cu130-torch2.11.0` compiles them for that target without a GPU, and
writes a bundle. `CUTILE_BUNDLE=cutile.tar pytest -m gpu tests/gpu/test_gpu_nvidia_languages.py` tests them on the GPU.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "cutile_gemm"))
sys.path.insert(0, str(Path(__file__).parents[2]))
from gemm.kernel import gemm
from nvidia_ops import bundle, declared

from benches.vec_add_nvidia import VEC_ADD
from jitkern.declare import CuTile

TEXT = """
import cuda.tile as ct
Int = ct.Constant[int]

@ct.kernel
def scale(out, x, by, B: Int):
    i = ct.bid(0)
    ct.store(out, index=(i,), tile=ct.astype(ct.load(x, index=(i,), shape=(B,)) * by, out.dtype))

@ct.kernel(num_ctas=2)
def scale_by_pairs(out, x, by, B: Int):
    i = ct.bid(0)
    ct.store(out, index=(i,), tile=ct.astype(ct.load(x, index=(i,), shape=(B,)) * by, out.dtype))

@ct.kernel
def row_sums(out, x, B: Int):
    i, total = ct.bid(0), ct.zeros((1,), dtype=ct.float32)
    for j in range(ct.cdiv(x.shape[1], B)):
        tile = ct.load(x, index=(i, j), shape=(1, B), padding_mode=ct.PaddingMode.ZERO)
        total = total + ct.sum(ct.astype(tile, ct.float32), axis=1)
    ct.store(out, index=(i,), tile=total)
"""

scale, scale_by_pairs, row_sums = declared("cutile", CuTile, TEXT)
OPS = (gemm, scale, scale_by_pairs, row_sums, VEC_ADD["cutile"])


@scale.launch("cuda")
def _(k, x, by):
    x = x.contiguous()
    out = torch.empty_like(x)
    n = x.numel()
    k.scale[{"B": 1024}](out.view(n), x.view(n), by, grid=(n + 1023) // 1024)
    return out


@scale_by_pairs.launch("cuda")
def _(k, x, by):
    x = x.contiguous()
    out = torch.empty_like(x)
    n = x.numel()
    k.scale_by_pairs[{"B": 4096}](out.view(n), x.view(n), by, grid=(n + 4095) // 4096)
    return out


@row_sums.launch("cuda")
def _(k, x):
    out = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    k.row_sums[{"B": 256}](out, x, grid=x.shape[0])
    return out


if __name__ == "__main__":
    bundle(OPS)
