"""A norm whose kernels take pointwise functions around them, and such functions."""

import math

import torch
import torch.nn.functional as F

from jitkern import compose, pointwise
from jitkern.declare import Cpp, Cuda, kernel

rms_norm = kernel(
    "jitkern_norms::rms_norm(Tensor x, Tensor weight, float eps=1e-6) -> Tensor",
    cuda=Cuda("rms_norm.cu"),
    cpu=Cpp("rms_norm.cpp"),
)


@rms_norm.reference
def _(x, weight, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


@rms_norm.launch("cuda")
def _(k, x, weight, eps, prologue=lambda like: (), epilogue=lambda like: ()):
    x = x.contiguous()
    out = torch.empty_like(x)
    more = (*prologue(x), *epilogue(out))
    rows = math.prod(x.shape[:-1])
    k.rms_norm[{"T": x.dtype}](out, x, weight, eps, x.shape[-1], *more, grid=rows, block=32)
    return out


@rms_norm.launch("cpu")
def _(k, x, weight, eps, prologue=lambda like: (), epilogue=lambda like: ()):
    x = x.contiguous()
    out = torch.empty_like(x)
    rows = math.prod(x.shape[:-1])
    more = (*prologue(x), *epilogue(out))
    k.rms_norm[{"T": x.dtype}](out, x, weight, eps, rows, x.shape[-1], *more)
    return out


by_name = kernel(  # arguments by name, one of them optional, and configurations
    "jitkern_norms::by_name(Tensor x, *, Tensor? weight=None, float eps=1e-6) -> Tensor",
    cpu=Cpp("rms_norm.cpp"),
)


@by_name.reference
def _(x, *, weight, eps):
    return rms_norm.run_reference(x, torch.ones_like(x[0]) if weight is None else weight, eps)


@by_name.tune("cpu", key=lambda x, weight, eps: x.shape[-1] > 8)
def _(x, *, weight, eps):
    return [{"times": 1}, {"times": 1, "again": True}]


@by_name.launch("cpu")
def _(k, x, *, weight, eps, epilogue=lambda like: ()):
    out, ones = torch.empty_like(x), torch.ones(x.shape[-1], dtype=x.dtype)
    weight = ones if weight is None else weight
    rows = k.config["times"] * x.shape[0]
    k.rms_norm[{"T": x.dtype}](out, x, weight, eps, rows, x.shape[-1], *epilogue(out))
    return out


@by_name.backward
def _(grad, x, eps):
    return grad * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps), None


@rms_norm.backward
def _(grad, x, weight, eps):
    scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    inner = grad * weight
    of_x = scale * (inner - x * scale * scale * (inner * x).mean(-1, keepdim=True))
    return of_x, (grad * x * scale).sum_to_size(weight.shape)


@rms_norm.samples
def _(device):
    yield torch.randn(4, 32, device=device), torch.randn(32, device=device)


@pointwise(dtypes=[torch.float32])
def silu(value):
    return F.silu(value)


@pointwise(dtypes=[torch.float32])
def bias(value, added):
    return value + added


@pointwise(dtypes=[torch.float32])
def scale(value, factor: float):
    return value * factor


@pointwise(dtypes=[torch.float32])
def halved(value, factor: float = 0.5):
    return value * factor


activated = rms_norm >> silu
whole = scale >> rms_norm >> bias >> silu
again = compose(scale, rms_norm, bias, silu)
