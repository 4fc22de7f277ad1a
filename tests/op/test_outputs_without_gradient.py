"""Outputs that have no gradient, and gradients that are not made of zeros in vain."""

import itertools

import pytest
import torch
from helpers import declared
from torch.utils._python_dispatch import TorchDispatchMode

from jitkern.declare import kernel
from jitkern.errors import DeclarationError

_number = itertools.count()
KERNELS = """
extern "C" void both(T* out, T* twice, const T* x, long n) {
  for (long i = 0; i < n; i++) { out[i] = x[i] * x[i]; twice[i] = 2 * x[i]; }
}
"""


def launch(k, x):
    x = x.contiguous()
    out, twice = torch.empty_like(x), torch.empty_like(x)
    k.both[{"T": x.dtype}](out, twice, x, x.numel())
    return out, twice


@pytest.fixture
def declare(tmp_path):
    """An op that returns the square of `x`, and its derivative, which a backward may read."""

    def make(*, backward=None, **keywords):
        schema = f"jitkern_test::outputs{next(_number)}(Tensor x) -> (Tensor out, Tensor twice)"
        path = tmp_path / "kernels.cpp"
        op = declared(schema, path, KERNELS, launch, lambda x: (x * x, 2 * x), **keywords)
        if backward:
            op.backward(backward)
        return op

    return make


@pytest.fixture
def squared(declare):
    return declare(nondifferentiable=["twice"], backward=lambda grad, twice: grad * twice)


class Zeros(TorchDispatchMode):
    """Counts what fills memory with zeros."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if "zeros" in str(function) or "zero_" in str(function):
            self.made.append((str(function), tuple(result.shape)))
        return result


def leaf():
    return torch.arange(6.0).reshape(2, 3).requires_grad_()


def test_an_output_without_gradient_has_none(squared):
    x = leaf()
    out, twice = squared(x)
    assert out.requires_grad and not twice.requires_grad and twice.grad_fn is None
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.equal(2 * x)


def test_its_gradient_is_made_of_no_zeros(squared):
    x = leaf()
    out, _ = squared(x)
    with Zeros() as zeros:
        out.backward(torch.ones_like(out))
    assert not zeros.made and x.grad.equal(2 * x.detach())


@pytest.mark.long
def test_an_unused_output_costs_zeros_only_if_the_backward_asks(declare):
    x = leaf()
    asking = declare(backward=lambda grad_out, grad_twice, x: grad_out * 2 * x + grad_twice * 2)
    silent = declare(backward=lambda grad_out, x: grad_out * 2 * x)
    for op, count in ((asking, 1), (silent, 0)):
        out, _ = op(x)
        with Zeros() as zeros:
            (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
        assert grad.equal(2 * x) and len(zeros.made) == count
    _, twice = asking(x)
    (grad,) = torch.autograd.grad(twice.sum(), x)
    assert grad.equal(torch.full_like(x, 2))


@pytest.mark.long
def test_checks_of_torch_pass(squared):
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert set(torch.library.opcheck(squared.overload, (x,)).values()) == {"SUCCESS"}
    assert torch.autograd.gradcheck(lambda x: squared(x)[0], x)


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_agrees(squared, dynamic):
    def loss(x):
        out, twice = squared(x)
        return (out * twice.sin()).sum()

    x = leaf()
    (expected,) = torch.autograd.grad(loss(x), x)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    (found,) = torch.autograd.grad(compiled(x), x)
    assert torch.allclose(found, expected)
    assert torch.allclose(expected, 2 * x.detach() * (2 * x.detach()).sin())


def test_transforms_agree(squared):
    x = leaf().detach()
    assert torch.func.grad(lambda x: squared(x)[0].sum())(x).equal(2 * x)
    rows = torch.func.vmap(torch.func.grad(lambda row: squared(row)[0].sum()))(x)
    assert rows.equal(2 * x)
    assert torch.func.grad(lambda x: squared(x)[1].sum())(x).equal(torch.zeros_like(x))


@pytest.mark.long
def test_a_reference_gives_it_no_gradient_either(declare):
    op = declare(nondifferentiable="twice", fusible=True, backward=lambda grad, x: grad * 2 * x)
    x = leaf()
    for results in (op.run_reference(x), torch.compile(op, backend="aot_eager")(x)):
        assert [result.requires_grad for result in results] == [True, False]


@pytest.mark.long
def test_an_op_without_backward_returns_it_without_a_node(declare):
    out, twice = declare(nondifferentiable=["twice"])(leaf())
    assert out.requires_grad and not twice.requires_grad


def test_a_backward_cannot_ask_for_its_gradient(declare):
    op = declare(nondifferentiable=["twice"])
    with pytest.raises(DeclarationError, match="unknown parameters grad_twice; it may have: grad,"):
        op.backward(lambda grad, grad_twice: grad)


def test_a_name_that_is_no_output_or_tensor_is_refused():
    with pytest.raises(
        DeclarationError, match=r"nondifferentiable='y' is neither an output .*out0, out1, x"
    ):
        kernel("jitkern_test::odd(Tensor x) -> (Tensor, Tensor)", nondifferentiable=["y"])


def test_an_input_that_is_named_has_no_gradient_and_says_so(tmp_path):
    op = declared(
        f"jitkern_test::outputs{next(_number)}(Tensor x, Tensor table) -> Tensor",
        tmp_path / "kernels.cpp", KERNELS, lambda k, x, table: launch(k, x)[1],
        nondifferentiable=["table"],
    )  # fmt: skip
    op.backward(lambda grad, table: (grad * table, None))
    x, table = leaf(), torch.full((2, 3), 2.0)  # of which the kernel makes no use
    assert torch.autograd.grad(op(x, table).sum(), x)[0].equal(table)
    with pytest.raises(DeclarationError, match=r"reached `table`, .*pass `table.detach\(\)`"):
        op(x, table.requires_grad_()).sum().backward()
