"""Grad modes, dispatch modes, transforms and odd tensors on ops that the launch runtime serves."""

import pytest
import torch
from calls_of_ops import WAYS, X, misses, through, warmed
from torch.utils._python_dispatch import TorchDispatchMode

from jitkern.runtime import specializer


@pytest.mark.long
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_warm_op_computes_in_every_grad_mode(scale, square, mode):
    for op, expected in ((scale(), 2 * X), (square(), X * X)):
        warmed(op, X)
        before = misses(op)
        with mode():
            result = op(X)
        assert torch.equal(result, expected)
        assert result.is_inference() == (mode is torch.inference_mode)
        assert misses(op) == before


@pytest.mark.long
def test_a_tensor_made_in_inference_mode_is_taken_outside(scale, square):
    with torch.inference_mode():
        x = X.clone()
    for op, expected in ((scale(), 2 * X), (square(), X * X)):
        for _ in range(2):
            assert torch.equal(op(x), expected)
            specializer.settle()


def test_an_inplace_op_changes_inference_tensors_in_their_mode(inc):
    """ATen's own ops raise, too, but once the tensor is changed."""
    with torch.inference_mode():
        x = torch.zeros(3)
    plain = torch.zeros(3)
    for calls in range(1, 4):
        with torch.inference_mode():
            inc(x, 1)
            inc(plain, 1)
        specializer.settle()
        for call in (inc, inc.overload):
            with pytest.raises(RuntimeError, match="inference tensor outside InferenceMode is not"):
                call(x, 1)
        assert x.tolist() == plain.tolist() == [calls] * 3
        assert plain._version == calls


def test_autograd_notices_what_a_warm_inplace_op_changed(inc):
    warmed(inc, torch.zeros(1), 1)
    e = torch.ones(1, requires_grad=True).exp()
    saves = e.square()
    inc(e, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saves.backward()


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.ops.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.long
def test_a_dispatch_mode_sees_the_backwards_op(square):
    op = warmed(square(), X)
    result = op(X.clone().requires_grad_())
    with Seen() as seen:
        result.backward(torch.ones_like(X))
    names = [str(function) for function in seen.ops]
    assert sum(name.startswith("jitkern_test.") for name in names) == 1, names
    assert not any("jitkern_python" in name for name in names)


@pytest.mark.long
@pytest.mark.parametrize("needs_grad", [False, True], ids=["plain", "recorded"])
def test_a_tensor_subclass_sees_the_op_and_its_parts(scale, square, needs_grad):
    from torch.testing._internal.two_tensor import TwoTensor

    for op, reference in ((scale(), lambda x: 2 * x), (square(), lambda x: x * x)):
        warmed(op, X)
        result = op(TwoTensor(X, X + 1).requires_grad_(needs_grad)).detach()
        assert type(result) is TwoTensor
        assert torch.equal(result.a, reference(X))
        assert torch.equal(result.b, reference(X + 1))


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_fake_tensors_launch_nothing(scale, square, warm):
    for op in (scale(), square()):
        if warm:
            warmed(op, X)
        before = misses(op)
        with torch._subclasses.FakeTensorMode():
            result = op(torch.empty(2, 3, requires_grad=True))
        assert type(result) is torch._subclasses.FakeTensor
        assert result.shape == (2, 3)
        assert misses(op) == before


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_backward_computes_the_gradient_cold_and_warm(square, way):
    op = square()
    for _ in range(3):
        x = X.clone().requires_grad_()
        through(op, way)(x).sum().backward()
        assert torch.equal(x.grad, 2 * X)
        specializer.settle()


TRANSFORMS = {
    "grad": (lambda f: torch.func.grad(lambda x: f(x).sum())(X), 2 * X),
    "vmap": (lambda f: torch.func.vmap(f)(X), X * X),
    "vmap over columns": (lambda f: torch.func.vmap(f, in_dims=1, out_dims=1)(X), X * X),
    "vmap of grad": (lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(X), 2 * X),
    "grad of vmap": (lambda f: torch.func.grad(lambda x: torch.func.vmap(f)(x).sum())(X), 2 * X),
    "grad of grad": (
        lambda f: torch.func.grad(lambda x: torch.func.grad(lambda y: f(y).sum())(x).sum())(X),
        torch.full_like(X, 2),
    ),
    "jvp": (lambda f: torch.func.jvp(f, (X,), (torch.ones_like(X),))[1], 2 * X),
    "jvp of grad": (
        lambda f: torch.func.jvp(torch.func.grad(lambda x: f(x).sum()), (X,), (X,))[1], 2 * X,
    ),
    "vjp": (lambda f: torch.func.vjp(f, X)[1](torch.ones_like(X))[0], 2 * X),
    "jacrev": (lambda f: torch.func.jacrev(f)(X[1]), torch.diag(2 * X[1])),
    "jacfwd": (lambda f: torch.func.jacfwd(f)(X[1]), torch.diag(2 * X[1])),
    "hessian": (lambda f: torch.func.hessian(lambda x: f(x).sum())(X[1]), 2 * torch.eye(3)),
    "functionalize": (lambda f: torch.func.functionalize(f)(X), X * X),
}  # fmt: skip


@pytest.mark.parametrize(
    "warm", [pytest.param(False, marks=pytest.mark.long), True], ids=["cold", "warm"]
)
@pytest.mark.parametrize(("transform", "expected"), TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_transforms_give_right_results(square, transform, expected, warm):
    op = square()
    if warm:
        warmed(op, X)
        warmed(op, X[1])
    assert torch.equal(transform(op), expected)


@pytest.mark.long
def test_vmap_of_an_op_with_no_gradient_gives_the_right_result(scale):
    op = warmed(scale(), X)
    assert torch.equal(torch.func.vmap(op)(X), 2 * X)


@pytest.mark.long
def test_a_backward_by_another_op_is_differentiated_twice(square):
    op = square()
    warmed(op, X.double())
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(op, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(op, (x,))


@pytest.mark.long
@pytest.mark.parametrize(
    "odd", [torch._neg_view, lambda x: x.expand(2, 2, 3), lambda x: x[:, ::2], torch.nn.Parameter]
)
def test_odd_tensors_on_a_warm_op_are_read_right(scale, square, odd):
    for op, reference in ((scale(), lambda x: 2 * x), (square(), lambda x: x * x)):
        warmed(op, X)
        assert torch.equal(op(odd(X.clone())), reference(odd(X.clone())))


@pytest.mark.long
def test_autocast_on_a_warm_op_changes_nothing(scale, square):
    for op, expected in ((scale(), 2 * X), (square(), X * X)):
        warmed(op, X)
        before = misses(op)
        with torch.autocast("cpu"):
            assert torch.equal(op(X), expected)
        assert misses(op) == before
