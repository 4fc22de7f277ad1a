"""Several gradients in one backward pass: `is_grads_batched`, `jacobian(vectorize=True)`, `jacrev`."""

import pytest
import torch
from torch._vmap_internals import _vmap
from torch.autograd.functional import hessian, jacobian

import jitkern.ops
from jitkern.errors import DeclarationError

DOUBLE = torch.float64
KERNELS = """
extern "C" void scaled(T* out, const T* x, double by, long n) { for (long i = 0; i < n; i++) out[i] = by * x[i]; }
"""
X, W = (torch.linspace(-1, 2, n, dtype=DOUBLE).view(shape) for n, shape in ((6, (2, 3)), (3, (3,))))


def scaled(k, x, by):
    out = torch.empty_like(x)
    k.scaled[{"T": x.dtype}](out, x.contiguous(), by, x.numel())
    return out


def singly(outputs, inputs, grads):
    """The gradients that one backward pass for each of the batch finds."""
    each = [
        torch.autograd.grad(outputs, inputs, [g[i] for g in grads], retain_graph=True)
        for i in range(len(grads[0]))
    ]
    return tuple(map(torch.stack, zip(*each)))


def check(function, *tensors):
    """Compare all ways to have several gradients of a function with one gradient at a time."""
    inputs = [tensor.clone().requires_grad_() for tensor in tensors]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.linspace(-1, 1, 3 * o.numel(), dtype=DOUBLE).view(3, *o.shape) for o in outputs]
    found = torch.autograd.grad(outputs, inputs, grads, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(found, singly(outputs, inputs, grads))
    wanted = jacobian(function, tensors)
    torch.testing.assert_close(jacobian(function, tensors, vectorize=True), wanted)
    of_each = torch.func.jacrev(function, tuple(range(len(tensors))))
    torch.testing.assert_close(of_each(*tensors), wanted)


@pytest.mark.common_cache
@pytest.mark.long
def test_norms_whose_gradients_are_partly_none():
    ops = jitkern.ops
    check(ops.rms_norm, X, W)
    check(lambda w: ops.rms_norm(X, w), W)
    check(lambda x: ops.layer_norm(x, None, None), X)
    check(lambda w, b: ops.layer_norm(X, w, b), W, W)
    check(lambda x, w: ops.add_rms_norm(x, X, w), X, W)

    def loss(x, w):
        return ops.rms_norm(x, w).square().sum()

    torch.testing.assert_close(hessian(loss, (X, W), vectorize=True), hessian(loss, (X, W)))


@pytest.mark.long
@pytest.mark.common_cache
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_loss_that_comes_with_its_gradient(reduction):
    target = torch.tensor([2, 0])
    check(lambda x: jitkern.ops.cross_entropy_with_grad(x, target, reduction=reduction)[0], X)


@pytest.mark.usefixtures("recorded_by")
def test_the_gradient_op_of_an_author_has_torch_s_own_loop(declare):
    op = declare("(Tensor x) -> Tensor", lambda k, x: scaled(k, x, 3.0))
    op.backward(declare("(Tensor grad) -> Tensor", lambda k, grad: scaled(k, grad, 3.0)))
    x = X.clone().requires_grad_()
    out, grads = op(x), torch.stack([X, 2 * X])
    found = torch.autograd.grad(out, [x], [grads], is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(found, singly([out], [x], [grads]))


def test_the_reference_serves_lists_and_nested_batches(declare):
    op = declare(
        "(Tensor[] xs, float by) -> (Tensor? none, Tensor[] scaled)",
        lambda k, xs, by: (None, [scaled(k, x, by) for x in xs]),
    )

    def both():
        return _vmap(lambda x: _vmap(lambda x, y: tuple(op([x, y, W], 2.0)[1]))(x, y))(x)

    x, y = torch.rand(4, 5, 2, dtype=DOUBLE), torch.rand(5, 3, dtype=DOUBLE)
    with pytest.raises(DeclarationError, match="has no reference"):
        both()
    op.reference(lambda xs, by: (None, [x * by for x in xs]))
    assert [t.shape for t in both()] == [(4, 5, 2), (4, 5, 3), (4, 5, 3)]
    for got, t in zip(both(), (x, y.expand(4, 5, 3), W.expand(4, 5, 3))):
        assert torch.equal(got, 2 * t)


def test_the_reference_changes_a_tensor_that_has_the_batch(declare):
    op = declare(
        "(Tensor(a!) x, Tensor y) -> ()",
        lambda k, x, y: k.scaled[{"T": x.dtype}](x, y, 2.0, x.numel()),
    )
    op.reference(lambda x, y: (x.copy_(2 * y), None)[1])
    x, y = torch.zeros(3, 2, dtype=DOUBLE), torch.rand(3, 2, dtype=DOUBLE)
    _vmap(lambda x, y: op(x, y) or x)(x, y)
    assert torch.equal(x, 2 * y)
    with pytest.raises(RuntimeError, match="vmap"):
        _vmap(lambda y: op(x[0], y) or y)(y)
