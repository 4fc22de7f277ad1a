"""Ops that are called through the launch runtime."""

import itertools
import shutil

import pytest
import torch
from calls_of_ops import INC, MANY, SCALE, SQUARE, TWICE
from helpers import declared

_number = itertools.count()


@pytest.fixture(autouse=True)
def launch_runtime_is_there(launch_runtime):
    pass


@pytest.fixture
def declare(tmp_path):
    """A fresh op `jitkern_test::launchN` with this C++ source and launch function."""

    def make(signature, text, launch, reference=None):
        name = f"launch{next(_number)}"
        schema = f"jitkern_test::{name}{signature}"
        return declared(schema, tmp_path / f"{name}.cpp", text, launch, reference)

    return make


@pytest.fixture
def scale(declare):
    """`scale(Tensor x, float alpha=2.0) -> Tensor`, which refuses an alpha of 13."""

    def launch(k, x, alpha):
        torch._check(alpha != 13, lambda: f"scale: {alpha} is unlucky")
        x = x.contiguous()
        out = torch.empty_like(x)
        k.scale[{"T": x.dtype}](out, x, alpha, x.numel())
        return out

    return lambda: declare(
        "(Tensor x, float alpha=2.0) -> Tensor", SCALE, launch, lambda x, alpha: alpha * x
    )


@pytest.fixture
def square(declare):
    """A differentiable `square(Tensor x) -> Tensor`; its backward is an op with no gradient."""

    def launch(k, x):
        torch._check(x.dim() != 5, lambda: "square: too many dimensions")
        x = x.contiguous()
        out = torch.empty_like(x)
        k.square[{"T": x.dtype}](out, x, x.numel())
        return out

    def launch_backward(k, grad, x):
        grad, x = grad.contiguous(), x.contiguous()
        out = torch.empty_like(x)
        k.twice[{"T": x.dtype}](out, grad, x, x.numel())
        return out

    def make():
        twice = declare(
            "(Tensor grad, Tensor x) -> Tensor", TWICE, launch_backward, lambda g, x: 2 * g * x
        )
        op = declare("(Tensor x) -> Tensor", SQUARE, launch, lambda x: x * x)
        op.backward(lambda grad, x: (twice(grad, x),))
        return op

    return make


@pytest.fixture
def many(declare):
    """An op with every kind of argument; a k of 13 is refused."""

    def launch(k, x, b, n, f, flag, k_, s):
        torch._check(k_ != 13, lambda: f"many: k is {k_}")
        out = torch.empty_like(x)
        offset = k_ + (n if n is not None else 0) + (1 if flag else 0)
        k.many(out, x, b, f * (s if s is not None else 1.0), offset, x.numel())
        return out

    return declare(
        "(Tensor x, Tensor? b=None, int? n=None, float f=1.0, bool? flag=None, int k=0, float? s=None) -> Tensor",
        MANY,
        launch,
    )


@pytest.fixture
def inc(declare):
    """An op that adds 1 in place, then allocates `n` floats that nobody may have."""

    def launch(k, x, n):
        k.inc(x, x.numel())
        return torch.empty(n)

    return declare("(Tensor(a!) x, int n) -> Tensor", INC, launch)


@pytest.fixture
def with_runtime(run_python, cache_dir):
    """A cache that has the launch runtime and a kernel, and nothing to launch it with."""
    done = run_python(
        "import torch, jitkern.ops; jitkern.ops.vec_add(torch.ones(1), torch.ones(1))"
    )
    assert done.returncode == 0, done.stderr
    for entry in cache_dir.glob("v1/*/*.call.*"):
        shutil.rmtree(entry)
    return run_python
