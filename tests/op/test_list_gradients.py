"""Gradients of ops that take or return lists of tensors, or return None."""

import threading

import pytest
import torch

from jitkern.errors import DeclarationError

KERNELS = 'extern "C" void nothing(long n) {}'


def leaf(*shape):
    return torch.rand(shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def weighted(declare):
    """Σ w·xᵢ of a list, and each w·xᵢ, with a backward over lists."""

    def launch(k, xs, w):
        scaled = [x * w for x in xs]
        return sum((s.sum() for s in scaled), torch.zeros((), dtype=w.dtype)), scaled

    op = declare("(Tensor[] xs, Tensor w) -> (Tensor total, Tensor[] scaled)", launch)
    asked = []

    @op.backward
    def _(grad_total, grad_scaled, xs, w, scaled, needs):
        asked.append(needs)
        assert [s.shape for s in scaled] == [x.shape for x in xs]
        each = [grad_total + g for g in grad_scaled]
        of_xs = [g * w if needed else None for g, needed in zip(each, needs[0])]
        return of_xs, sum(((g * x).sum() for g, x in zip(each, xs)), torch.zeros_like(w))

    op.asked = asked
    return op


def test_an_op_with_lists_has_gradients_that_are_lists(weighted):
    xs = [leaf(2), torch.rand(3, dtype=torch.float64), leaf(1, 2)]  # fmt: skip
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    total, scaled = weighted(xs, w)
    assert [s.requires_grad for s in scaled] == [True] * 3
    (total + 3 * scaled[0].sum()).backward()
    assert xs[0].grad.tolist() == [8, 8]
    assert xs[1].grad is None
    assert xs[2].grad.tolist() == [[2, 2]]
    assert weighted.asked == [([True, False, True], True)]
    wanted = 4 * xs[0].sum() + xs[1].sum() + xs[2].sum()
    torch.testing.assert_close(w.grad, wanted.detach())
    first, second = (leaf(n) for n in (2, 3))
    assert torch.autograd.gradcheck(lambda a, b, w: (weighted([a, b], w)[0], *weighted([a, b], w)[1]), (first, second, w))  # fmt: skip


@pytest.mark.long
def test_an_op_with_lists_and_a_backward_compiles(weighted):
    def loss(a, b, w):
        total, scaled = weighted([a, b], w)
        return total + scaled[1].square().sum()

    inputs = [leaf(2), leaf(3), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)]  # fmt: skip
    wanted = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(*inputs), inputs)
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b)
    torch.library.opcheck(weighted.overload, (inputs[:2], inputs[2]))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Torch itself reads
def test_a_threads_first_backward_may_be_traced(weighted):
    from torch._dynamo import compiled_autograd

    def run():
        for numbers in ([1.0, 2.0], [3.0]):  # the shapes differ: traced twice
            x, w = torch.tensor(numbers, requires_grad=True), torch.tensor(2.0)
            with compiled_autograd._enable(torch.compile(backend="eager")):
                weighted([x], w)[0].backward()
            found.append(x.grad.tolist())

    found = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [[2, 2], [2]]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda grad: ([grad], None), "no list of 2 gradients for the list `xs`"),
        (lambda grad: (grad, None), "no list of 2 gradients for the list `xs`"),
        (lambda grad: ([grad, torch.ones(5)], None), r"for `xs\[1\]`, a gradient of shape \[5\]"),
        (lambda grad: [grad, grad], "returned 1 gradients for the tensors xs, w"),
    ],
)
def test_gradients_that_are_no_such_lists_are_refused(declare, returned, message):
    op = declare("(Tensor[] xs, Tensor w) -> Tensor", lambda k, xs, w: xs[0] * w)
    op.backward(returned)
    with pytest.raises(DeclarationError, match=message):
        op([leaf(2), leaf(2)], torch.ones(())).sum().backward()


def test_a_result_that_is_none_has_no_gradient(declare):
    op = declare(
        "(Tensor x, bool more) -> (Tensor out, Tensor? twice)",
        lambda k, x, more: (x + 1, 2 * x if more else None),
    )
    op.backward(lambda grad_out, grad_twice: (grad_out + 2 * grad_twice if grad_twice is not None else grad_out,))  # fmt: skip
    for more, wanted in ((True, 3.0), (False, 1.0)):
        x = leaf(2)
        out, twice = op(x, more)
        (out.sum() + (twice.sum() if more else 0)).backward()
        assert x.grad.flatten().tolist() == [wanted] * x.numel()
