"""A gradient written over an argument: an in-place op below a torch.autograd.Function (the guide)."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import declared

from jitkern.errors import DeclarationError
from jitkern.runtime import specializer

_number = itertools.count()
KERNELS = """
#include <cmath>
extern "C" void loss(double *total, double *x, const long *target, long rows, long columns) {
  *total = 0;
  for (long r = 0; r < rows; r++, x += columns) {
    double sum = 0;
    for (long c = 0; c < columns; c++) sum += std::exp(x[c]);
    *total += (std::log(sum) - x[target[r]]) / rows;
    for (long c = 0; c < columns; c++) x[c] = (std::exp(x[c]) / sum - (c == target[r])) / rows;
  }
}
extern "C" void scale(double *x, const double *by, long n) { for (long i = 0; i < n; i++) x[i] *= *by; }
"""


def launch_loss(k, logits, target):
    total = torch.empty((), dtype=logits.dtype, device=logits.device)
    k.loss(total, logits, target, *logits.shape)
    return total


def launch_scale(k, x, by):
    k.scale(x, by, x.numel())


@pytest.fixture
def ops(tmp_path):
    def make(signature, launch):
        schema = f"jitkern_test::in_place{next(_number)}{signature}"
        return declared(schema, tmp_path / "kernels.cpp", KERNELS, launch)

    loss_ = make("(Tensor(a!) logits, Tensor target) -> Tensor", launch_loss)
    return loss_, make("(Tensor(a!) x, Tensor by) -> ()", launch_scale)


@pytest.fixture
def loss(ops):
    loss_, scale_ = ops

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, target):
            total = loss_(logits.detach(), target)
            ctx.save_for_backward(logits)
            return total

        @staticmethod
        def backward(ctx, grad):
            gradient = ctx.saved_tensors[0].detach()
            scale_(gradient, grad)
            return gradient, None

    return Loss.apply


@pytest.fixture
def data():
    weight = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    return torch.randn(4, 8, dtype=torch.float64), weight, torch.tensor([1, 0, 2, 2])


def wanted_of(x, weight, target):
    total = 2 * torch.nn.functional.cross_entropy(x @ weight, target)
    return total.detach(), torch.autograd.grad(total, weight)[0]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["", "eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_gradient_takes_the_memory_of_the_logits(loss, data, backend, dynamic):
    def step(x, weight, target):
        return 2 * loss(x @ weight, target)

    run = torch.compile(step, backend=backend, fullgraph=True, dynamic=dynamic) if backend else step
    for _ in range(2):
        total = run(*data)
        (gradient,) = torch.autograd.grad(total, data[1])
        wanted, wanted_gradient = wanted_of(*data)
        torch.testing.assert_close(total.detach(), wanted)
        torch.testing.assert_close(gradient, wanted_gradient)
        specializer.settle()


@pytest.mark.long
def test_no_second_buffer_of_the_size_of_the_logits_is_made(loss, data):
    x, weight, target = data
    logits = x @ weight
    total = loss(logits, target)
    assert total.grad_fn.saved_tensors[0].data_ptr() == logits.data_ptr()
    (gradient,) = torch.autograd.grad(total, logits)
    assert gradient.data_ptr() == logits.data_ptr()


@pytest.mark.long
def test_uses_that_would_be_wrong_raise(loss, data):
    x, weight, target = data
    total = loss(x @ weight, target)
    torch.autograd.grad(total, weight, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(total, weight)
    logits = x @ weight
    saved = logits.square()
    loss(logits, target)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(saved.sum(), weight)


@pytest.mark.long
def test_the_ops_below_pass_opcheck(ops, data):
    loss_, scale_ = ops
    x, weight, target = data
    torch.library.opcheck(loss_.overload, ((x @ weight).detach(), target))
    torch.library.opcheck(scale_.overload, (x.clone(), torch.ones((), dtype=x.dtype)))


def test_a_backward_of_an_in_place_op_is_refused_with_a_remedy(ops):
    with pytest.raises(DeclarationError, match="call it from an autograd.Function"):
        ops[0].backward(lambda grad: (grad, None))
