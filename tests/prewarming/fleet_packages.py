"""Packages for workers of engines, and the entries that a cache holds."""

from __future__ import annotations

from jitkern.cache.store import Cache

MODULE = """
import os
import torch
from pathlib import Path
from jitkern.declare import Cpp, kernel
AWAY = os.environ.get("DRIVER", str(os.getpid())) != str(os.getpid())
HERE = Path(__file__).parent
{before}
op = kernel("{name}::f(Tensor x) -> Tensor", cpu=Cpp("k.cpp", flags={flags}))
@op.launch("cpu")
def _(k, x):
    {inside}
    out = torch.empty_like(x)
    k.f[{{"T": x.dtype}}](out, x, x.numel())
    return out
@op.samples
def _(device):
    for dtype in (torch.float32, torch.float64, torch.int32):
        yield torch.ones(3, dtype=dtype, device=device)
    yield torch.ones(9, device=device)[1:]
"""
KERNEL = 'extern "C" void f(T* out, const T* x, long long n) { while (n--) out[n] = x[n]; }\n'
DIES_ONCE = """
if AWAY and not (HERE / "died").exists():
    (HERE / "died").touch()
    os.kill(os.getpid(), 9)
"""


def places(root):
    return sorted(f"{path.parent.name}/{path.name}" for path in Cache(root).paths())
