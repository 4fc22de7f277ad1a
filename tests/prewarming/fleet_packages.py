"""Packages for workers of executors, executors, and the entries that a cache holds."""

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
# Functions for `--executor`.
POOLS = """
import concurrent.futures, contextlib, multiprocessing
from pathlib import Path

def spawned(count=2):
    return concurrent.futures.ProcessPoolExecutor(count, multiprocessing.get_context("spawn"))

def one():
    return spawned(1)

class Apart(concurrent.futures.ThreadPoolExecutor):  # one task at a time, each in its own process
    def __init__(self):
        super().__init__(1)

    def submit(self, function, *args):
        return super().submit(self.apart, function, *args)

    def apart(self, function, *args):
        with spawned(1) as pool:
            return pool.submit(function, *args).result()

class Bare:
    def submit(self, function, *args):
        future = concurrent.futures.Future()
        future.set_result(function(*args))
        return future

@contextlib.contextmanager
def told():
    Path("begun").touch()
    try:
        yield Bare()
    finally:
        Path("ended").touch()

def raising():
    raise OSError("no scheduler answers")

def none():
    pass

def kind():
    return concurrent.futures.ThreadPoolExecutor

number = 3
"""


def places(root):
    return sorted(f"{path.parent.name}/{path.name}" for path in Cache(root).paths())
