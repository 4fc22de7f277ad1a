"""Several gradients in one backward pass: `is_grads_batched`, `jacobian(vectorize=True)`, `jacrev`."""

import pytest
import torch
from torch._vmap_internals import _vmap
from torch.autograd.functional import hessian, jacobian

import jitkern.ops

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


@pytest.mark.long
@pytest.mark.usefixtures("recorded_by")
def test_an_op_of_an_author_without_a_reference(declare):
    op = declare("(Tensor x, Tensor? y=None) -> Tensor", lambda k, x, y: scaled(k, x, 3.0))
    backward = declare(
        "(Tensor grad, Tensor? y, bool needs_x, bool needs_y) -> (Tensor? dx, Tensor? dy)",
        lambda k, grad, y, needs_x, needs_y: (
            scaled(k, grad, 3.0) if needs_x else None,
            scaled(k, y, 0.0) if needs_y and y is not None else None,
        ),
    )
    op.backward(backward)
    for tensors in ((X,), (X, X)):
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        out, grads = op(*inputs), torch.stack([X, 2 * X])
        found = torch.autograd.grad(out, inputs, grads, is_grads_batched=True, retain_graph=True)
        torch.testing.assert_close(found, singly([out], inputs, [grads]))


def test_lists_of_tensors_and_nested_batches(declare):
    op = declare(
        "(Tensor[] xs, float by) -> (Tensor? none, Tensor[] scaled)",
        lambda k, xs, by: (None, [scaled(k, x, by) for x in xs]),
    )
    x, y = torch.rand(4, 5, 2, dtype=DOUBLE), torch.rand(5, 3, dtype=DOUBLE)
    both = _vmap(lambda x: _vmap(lambda x, y: tuple(op([x, y, W], 2.0)[1]))(x, y))(x)
    assert [t.shape for t in both] == [(4, 5, 2), (4, 5, 3), (4, 5, 3)]
    for got, t in zip(both, (x, y.expand(4, 5, 3), W.expand(4, 5, 3))):
        assert torch.equal(got, 2 * t)
    with pytest.raises(RuntimeError, match="a batch of no items"):
        _vmap(lambda x: op([x], 2.0)[1][0])(x[:0])


def test_a_tensor_is_changed_in_place_if_it_has_the_batch(declare):
    op = declare(
        "(Tensor(a!) x, Tensor y) -> ()",
        lambda k, x, y: k.scaled[{"T": x.dtype}](x, y, 2.0, x.numel()),
    )
    x, y = torch.zeros(3, 2, dtype=DOUBLE), torch.rand(3, 2, dtype=DOUBLE)
    _vmap(lambda x, y: op(x, y) or x)(x, y)
    assert torch.equal(x, 2 * y)
    with pytest.raises(RuntimeError, match="changes a tensor without a batch dimension"):
        _vmap(lambda y: op(x[0], y) or y)(y)
