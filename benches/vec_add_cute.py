"""out = x + y in the CuTe DSL."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from benches.vec_add_cutile import is_cached
from jitkern.declare import Cute, kernel

TEXT = """
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

vec_add = kernel("benches::vec_add_cute(Tensor x, Tensor y) -> Tensor", cuda=Cute(text=TEXT))


@vec_add.reference
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


@vec_add.launch("cuda")
def _(k: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    k.add(out, x, y)
    return out


@vec_add.samples
def _(device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield torch.rand(16, device=device), torch.rand(16, device=device)


def is_ready() -> bool:
    """Whether the DSL is installed, or its kernel cached: see tests/gpu/cute_ops.py."""
    return bool(importlib.util.find_spec("nvidia_cutlass_dsl")) or is_cached(vec_add)
