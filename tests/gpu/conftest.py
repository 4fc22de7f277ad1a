"""Fixtures of tests on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from jitkern.declare import Cuda, kernel

_number = itertools.count()


@pytest.fixture
def declared(tmp_path):
    """Declare an op for CUDA alone, from the text of its kernels and its launch function."""

    def declare(text, function, signature="(Tensor x) -> Tensor", source=None, **options):
        path = tmp_path / f"k{next(_number)}.cu"
        path.write_text(text)
        source = source or Cuda(str(path), **options)
        op = kernel(f"jitkern_gpu::k{next(_number)}{signature}", cuda=source)
        op.launch("cuda")(function)
        return op

    return declare


@pytest.fixture
def hopper():
    """Skip a test where no GPU has clusters and TMA."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.fixture
def two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
