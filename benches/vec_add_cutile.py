"""out = x + y in cuTile."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from jitkern import config
from jitkern.declare import CuTile, Op, kernel
from jitkern.errors import NotCached

TEXT = """
import cuda.tile as ct

@ct.kernel
def add(out, x, y, SIZE: ct.Constant[int]):
    i = ct.bid(0)
    left = ct.load(x, index=(i,), shape=(SIZE,))
    right = ct.load(y, index=(i,), shape=(SIZE,))
    ct.store(out, index=(i,), tile=left + right)
"""

vec_add = kernel("benches::vec_add_cutile(Tensor x, Tensor y) -> Tensor", cuda=CuTile(text=TEXT))


@vec_add.reference
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


@vec_add.launch("cuda")
def _(k: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x, y = x.contiguous(), y.contiguous()
    out, n = torch.empty_like(x), x.numel()
    k.add[{"SIZE": 1024}](out, x, y, grid=(n + 1023) // 1024)
    return out


@vec_add.samples
def _(device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield torch.rand(16, device=device), torch.rand(16, device=device)


def is_ready() -> bool:
    """Whether cuTile is installed, or its kernel cached: see tests/gpu/cutile_ops.py."""
    return bool(importlib.util.find_spec("cutile_cache")) or is_cached(vec_add)


def is_cached(op: Op[torch.Tensor]) -> bool:
    """Whether the kernel of an op is in the cache."""
    try:
        with config.using(compile="never", fallback="raise"):
            op(*op.sample_inputs("cuda")[0])
    except NotCached:
        return False
    return True
