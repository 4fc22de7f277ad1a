"""What tests of pointwise functions share: tolerances, special values, comparisons."""

from __future__ import annotations

import math

import pytest
import torch

from jitkern import pointwise

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_each_device = pytest.mark.parametrize("device", DEVICES)
# The bound of the error against float64 of the same inputs: relative, and absolute.
BOUNDS = {
    torch.float32: (2**-21, 1e-7),
    torch.bfloat16: (2**-8 * 1.02, 1e-6),
    torch.float16: (2**-11 * 1.05, 1e-6),
    torch.float64: (1e-14, 1e-15),
}
FLOATS = list(BOUNDS)
SPECIAL = [
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -7.0, 1e-3, -1e-3, 0.3, 100.0, -100.0, 88.5, 1e-40,
    math.inf, -math.inf, math.nan, 3e38, -3e38, 6e4,
]  # fmt: skip


def randn(*shape, device="cpu", dtype=torch.float32):
    return torch.randn(shape, device=device, dtype=torch.float64).to(dtype)


def named(name, function, **options):
    """Return a pointwise function of a lambda."""
    function.__name__ = name
    return pointwise(**options)(function)


def wrong(got, exact, noise=0.0):
    """Return which numbers of `got` are not `exact` (float64), rounded once.

    noise: what the error of float32 in operands may come to.
    """
    if not got.dtype.is_floating_point:
        return got != exact
    relative, absolute = BOUNDS[got.dtype]
    wide = got.double()
    near = (wide - exact).abs() <= relative * exact.abs() + absolute + noise
    same = (got == exact.to(got.dtype)) | (wide.isnan() & exact.isnan())
    return ~(near | same)
