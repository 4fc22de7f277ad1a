"""`jitkern.ops.cross_entropy_in_place`: the gradient takes the memory of the logits."""

import pytest
import torch
import torch.nn.functional as F
from helpers import refusing_to_wait

import jitkern
from jitkern import ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
each_device = pytest.mark.parametrize("device", DEVICES)


def data(device, reduction="mean"):
    torch.manual_seed(0)
    x, weight = torch.randn(6, 8, device=device), torch.randn(8, 40, device=device)
    target = torch.randint(0, 40, (6,), device=device)
    target[1] = -100
    weight.requires_grad_()
    loss = F.cross_entropy(x @ weight, target, reduction=reduction)
    return x, weight, target, loss


@pytest.mark.long
@each_device
@pytest.mark.parametrize("backend", ["", "eager", "aot_eager"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_gradient(device, backend, reduction):
    x, weight, target, wanted = data(device, reduction)
    by = torch.full_like(wanted, 2.5)
    (gradient,) = torch.autograd.grad(wanted, weight, by)

    def step(x, weight, target):
        return jitkern.ops.cross_entropy_in_place(x @ weight, target, reduction=reduction)

    run = torch.compile(step, backend=backend, fullgraph=True) if backend else step
    for _ in range(2):
        loss = run(x, weight, target)
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(torch.autograd.grad(loss, weight, by)[0], gradient)


@each_device
def test_no_second_buffer_and_no_wait(device):
    x, weight, target, _ = data(device)
    logits = x @ weight
    jitkern.ops.cross_entropy_in_place(logits, target).backward()  # everything is compiled
    logits = x @ weight
    with refusing_to_wait() if device == "cuda" else torch.enable_grad():
        loss = jitkern.ops.cross_entropy_in_place(logits, target)
        (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.data_ptr() == logits.data_ptr()


@pytest.mark.long
@each_device
def test_dimensions_after_the_classes(device):
    torch.manual_seed(1)
    x, weight = torch.randn(2, 5, 8, device=device), torch.randn(8, 11, device=device)
    weight.requires_grad_()
    target = torch.randint(0, 11, (2, 5), device=device)
    wanted = F.cross_entropy((x @ weight).mT, target)
    loss = jitkern.ops.cross_entropy_in_place((x @ weight).mT, target)
    torch.testing.assert_close(loss, wanted)
    pair = (torch.autograd.grad(3 * each, weight)[0] for each in (loss, wanted))
    torch.testing.assert_close(*pair)


@each_device
def test_logits_stay_where_no_gradient_is_needed(device):
    x, weight, target, wanted = data(device)
    with torch.no_grad():
        logits = x @ weight
        before = logits.clone()
        torch.testing.assert_close(jitkern.ops.cross_entropy_in_place(logits, target), wanted)
    assert torch.equal(logits, before)


def test_uses_that_would_be_wrong_raise():
    x, weight, target, _ = data("cpu")
    loss = jitkern.ops.cross_entropy_in_place(x @ weight, target)
    torch.autograd.grad(loss, weight, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, weight)
    logits = x @ weight
    squares = logits.square()
    jitkern.ops.cross_entropy_in_place(logits, target)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(squares.sum(), weight)
    with pytest.raises(RuntimeError, match="a leaf of the graph"):
        jitkern.ops.cross_entropy_in_place(weight, target[:1].expand(8))
    with pytest.raises(RuntimeError, match="pass them contiguous"):
        jitkern.ops.cross_entropy_in_place((x @ weight).T, torch.zeros(40, dtype=torch.int64))
    loss = jitkern.ops.cross_entropy_in_place(x @ weight, target)
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(gradient.sum(), weight)
    assert ops.cross_entropy(x @ weight, target).isfinite()
