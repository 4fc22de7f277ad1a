"""The declarations of the two ops."""

import torch

from jitkern.declare import Extension, Unit, kernel

_FAST = ("--use_fast_math",)
_UNITS = [Unit("csrc/axpy.cu", flags=_FAST), Unit("csrc/half_squares.cu", flags=_FAST)]


def _cpu(function):
    return Extension(
        "csrc/ops.cpp", name="mathops_cpu", function=f"mathops_cpu::{function}",
        flags=["-O3"], libraries=["vendor"], library_dirs=["lib"],
    )  # fmt: skip


def _cuda(function):
    return Extension(
        ["csrc/ops.cpp", *_UNITS], name="mathops_cuda", function=f"mathops_cuda::{function}",
        flags=["-O3", "-DWITH_CUDA"], libraries=["vendor"], library_dirs=["lib"],
    )  # fmt: skip


axpy = kernel(
    "mathops::axpy(Tensor x, Tensor y, float a) -> Tensor",
    cpu=_cpu("axpy"),
    cuda=_cuda("axpy"),
)
half_squares = kernel(
    "mathops::half_squares(Tensor x) -> Tensor",
    cpu=_cpu("half_squares"),
    cuda=_cuda("half_squares"),
)


@axpy.reference
def _(x, y, a):
    return a * x + y


@half_squares.reference
def _(x):
    return x * x / 2


@axpy.samples
def _(device):
    yield torch.randn(1000, device=device), torch.randn(1000, device=device), 2.0


@half_squares.samples
def _(device):
    yield (torch.randn(1000, device=device),)
