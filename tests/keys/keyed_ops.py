"""Ops whose keys could follow the process: they read sets, objects, functions, random sizes."""

import enum

import torch

from jitkern import pointwise
from jitkern.declare import Cpp, Cuda, Triton, kernel


class Mode(enum.Enum):
    FAST = 1


class Opaque:
    """An object whose repr has its address."""


FACTORS = [2, 3]


def halved(x):
    return x / FACTORS[0]


def doubled(x):
    return x * FACTORS[0]


OPAQUE, MODE = Opaque(), Mode.FAST
NAMES = frozenset(("torch.float32", "torch.float64", "torch.int64", "torch.bfloat16"))
DTYPES = frozenset((torch.float32, torch.float64, torch.bfloat16))
WIDTHS = frozenset((7, 15, 23, 31, 64))
FUNCTIONS = frozenset((halved, doubled))
CPP = 'extern "C" void scaled(T *out, const T *x, int64_t n) { while (n--) out[n] = N * x[n]; }'
CU = 'extern "C" __global__ void scaled(T *out, const T *x, long long n) { out[0] = N * x[n]; }'


def made(closed):
    def by_enclosed(name):
        return name in closed and name in {"torch.float32", "torch.float64", "torch.int8"}

    return by_enclosed


by_enclosed = made(NAMES | {"a", "b"})
op = kernel(
    "keyed::op(Tensor x, str mode='a') -> Tensor",
    cpu=Cpp(text=CPP.replace("int64_t", "long long"), environment=["KEYED_A", "KEYED_B"]),
    cuda=Cuda(text=CU, flags=["-DA", "-DB"]),
)


@op.reference
def _(x, mode):
    for function in FUNCTIONS:
        x = function(x)
    return x if MODE is Mode.FAST or OPAQUE is None else -x


@op.backward
def _(grad):
    return grad if len(FUNCTIONS) + len(NAMES) else None


@op.tune("cpu", "cuda", key=lambda x, mode="a": (str(x.dtype), mode in {"a", "b", "c"}))
def _(x, mode="a"):
    return [{"N": n, "KIND": kind} for n in (1, 2) for kind in ("a", "b")]


@op.launch("cpu", "cuda")
def _(k, x, mode="a", first=1, *, second=Ellipsis):
    out, name = torch.empty_like(x), str(x.dtype)
    if x.dim() > 8:
        torch._check(OPAQUE is None)
    n = k.config["N"] + (x.shape[0] in WIDTHS) + (x.shape[0] in {7, 15})
    n = n + by_enclosed(name) + (name in NAMES) + (x.dtype in DTYPES) + (mode in {"b", "c", "d"})
    k.scaled[{"T": x.dtype, "N": int(n)}](out, x, x.numel(), grid=1, block=32)
    return out


@op.samples
def _(device):
    for dtype in (torch.float32, torch.float64, torch.int64):
        for mode in "ab":
            yield torch.ones(int(torch.randint(1, 10**6, ())), device=device).to(dtype), mode


mapped = kernel("keyed::mapped(Tensor x) -> Tensor", cuda=Triton("keyed_triton.py"))


@mapped.launch("cuda")
def _(k, x):
    out = torch.empty_like(x)
    constants = {"MODE": "fast", "ACT": 1.0, "KIND": torch.float16, "PAIR": (1, None, "a")}
    n = x.numel()
    k.mapped[constants](out, x, n, grid=lambda meta: (n + meta["BLOCK"] - 1) // meta["BLOCK"])
    return out


@mapped.samples
def _(device):
    yield torch.ones(128, device=device)


@pointwise
def gated(x, gate, scale: float = 2.0):
    return x * torch.sigmoid(gate) * scale, x.to(torch.float16)


@pointwise
def shifted(x, by):
    return torch.where(x > 0, x, by)


@pointwise
def clamped(x):
    return torch.clamp(x, min=0.0)


both = shifted >> clamped
