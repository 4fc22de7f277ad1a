"""out = x + y in NVIDIA's languages of Python, cuTile and the CuTe DSL."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from jitkern import config
from jitkern.declare import Cute, CuTile, Op, Source, kernel
from jitkern.errors import NotCached

CUTILE = """
import cuda.tile as ct

@ct.kernel
def add(out, x, y, SIZE: ct.Constant[int]):
    i = ct.bid(0)
    left = ct.load(x, index=(i,), shape=(SIZE,))
    right = ct.load(y, index=(i,), shape=(SIZE,))
    ct.store(out, index=(i,), tile=left + right)
"""
CUTE = """
import cuda.bindings.driver as cuda
import cutlass.cute as cute

THREADS = 256

@cute.kernel
def sums(out: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if i < cute.size(out, mode=[0]):
        out[i] = x[i] + y[i]

@cute.jit
def add(out: cute.Tensor, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
    blocks = cute.ceil_div(cute.size(out, mode=[0]), THREADS)
    sums(out, x, y).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)
"""
PACKAGES = {"cutile": "cutile_cache", "cute": "nvidia_cutlass_dsl"}


def declared(language: str, source: Source) -> Op[torch.Tensor]:
    """An op of x + y, without its launch function."""
    op = kernel(f"benches::vec_add_{language}(Tensor x, Tensor y) -> Tensor", cuda=source)
    op.reference(torch.add)

    @op.samples
    def _(device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield torch.rand(16, device=device), torch.rand(16, device=device)

    return op


VEC_ADD = {
    "cutile": declared("cutile", CuTile(text=CUTILE)),
    "cute": declared("cute", Cute(text=CUTE)),
}


@VEC_ADD["cutile"].launch("cuda")
def _(k: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x, y = x.contiguous(), y.contiguous()
    out, n = torch.empty_like(x), x.numel()
    k.add[{"SIZE": 1024}](out, x, y, grid=(n + 1023) // 1024)
    return out


@VEC_ADD["cute"].launch("cuda")
def _(k: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    k.add(out, x, y)
    return out


def is_ready(language: str) -> bool:
    """Whether a language is installed, or its kernel cached: see tests/gpu/nvidia_ops.py."""
    if importlib.util.find_spec(PACKAGES[language]):
        return True
    op = VEC_ADD[language]
    try:
        with config.using(compile="never", fallback="raise"):
            op(*op.sample_inputs("cuda")[0])
    except NotCached:
        return False
    return True
